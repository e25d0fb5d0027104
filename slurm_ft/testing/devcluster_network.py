"""Hosts of a devcluster with a network of their own: one that can be cut, healed and slowed by itself.

Each host is a network namespace, joined to the others by a bridge. The machine itself has the first address on the
bridge: slurmctld and whoever submits jobs are there. A host's slurmd, and with it all steps, run in its namespace,
with a host name of their own and an /etc/hosts that names the hosts; both live in namespaces too, and nothing in
the machine's /etc is touched.

    machine  198.18.N.1    bridge sftXXXXXX    (XXXXXX stands for the cluster's folder)
    node1    198.18.N.11   sftXXXXXX.1  <->  eth0 in the namespace sft-XXXXXX-node1
    ...

The addresses are from the block that RFC 2544 sets aside for testing networks. A host that is cut off keeps its
link, and its packets go nowhere, as when a switch dies: nobody is told, no connection is closed.

All names carry the cluster's id, and the bridge tells the folder (its alias). So `remove` needs no memory, and
`sweep` finds what a cluster left behind whose owner and watcher were both killed. Needs root and iproute2.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm_ft.errors import LaunchError, UsageError

PROGRAMS = ("ip", "tc", "nsenter", "unshare", "mount")
PACKAGES = "apt-get install iproute2 util-linux"
BRIDGE = re.compile(r"sft[0-9a-f]{6}")
BLOCK = "198.18"
FIRST_HOST = 11
ANSWER_SECONDS = 10.0

ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
"""What runs in a host's new namespaces: its name, its /etc/hosts, then the command."""


def machine() -> str:
    """The name of this machine, as slurm.conf has it."""
    return socket.gethostname().split(".")[0]


def cluster_id(folder: Path) -> str:
    """Six letters that stand for a folder: names of network devices have room for 15."""
    return hashlib.blake2s(os.fsencode(folder)).hexdigest()[:6]


def obstacle() -> str:
    """Why hosts cannot have a network of their own here, or ''."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    if missing := [name for name in PROGRAMS if shutil.which(name, path=path) is None]:
        return f"not installed on this machine: {', '.join(missing)} ({PACKAGES})"
    name = f"sft-try-{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
    except LaunchError as error:
        return f"this kernel or container allows no network namespaces: {error.message}"
    _quietly("ip", "netns", "delete", name)
    return ""


class Network:
    """The network of the cluster in `folder`. Holds no state: all is asked of the kernel."""

    def __init__(self, folder: Path, hosts: tuple[str, ...]) -> None:
        self._folder, self._hosts = folder, hosts
        self.id = cluster_id(folder)
        self.bridge = f"sft{self.id}"

    # -- names

    def namespace(self, host: str) -> str:
        return f"sft-{self.id}-{host}"

    def link(self, host: str) -> str:
        """The end of a host's cable that is plugged into the bridge."""
        return f"{self.bridge}.{self._hosts.index(host) + 1}"

    def address(self, subnet: int, host: str) -> str:
        return f"{BLOCK}.{subnet}.{FIRST_HOST + self._hosts.index(host)}"

    @property
    def hosts_file(self) -> Path:
        return self._folder / "hosts"

    # -- making and removing

    def choose_subnet(self) -> int:
        """A third number of the address that nothing on this machine uses. Somebody can still be faster."""
        used = set(re.findall(rf"\b{re.escape(BLOCK)}\.(\d+)\.", _run("ip", "-o", "-4", "addr", "show")))
        start = int(self.id, 16)
        for offset in range(256):
            if str(number := (start + offset) % 256) not in used:
                return number
        raise LaunchError(f"all of {BLOCK}.0.0/16 is in use on this machine")

    def make(self, subnet: int) -> None:
        """Make bridge, namespaces and links; what an earlier cluster in this folder left is removed first."""
        if why := obstacle():
            raise UsageError(f"--netns is not possible: {why}", hint="leave --netns out: hosts then share this network")
        self.remove()
        named = {f"{BLOCK}.{subnet}.1": machine(), **{self.address(subnet, host): host for host in self._hosts}}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for address, name in named.items())]
        self.hosts_file.write_text("\n".join(lines) + "\n")
        _run("ip", "link", "add", self.bridge, "type", "bridge")
        _run("ip", "link", "set", self.bridge, "alias", str(self._folder)[-255:])
        _run("ip", "addr", "add", f"{BLOCK}.{subnet}.1/24", "dev", self.bridge)
        _run("ip", "link", "set", self.bridge, "up")
        for host in self._hosts:
            self._make_host(subnet, host)

    def _make_host(self, subnet: int, host: str) -> None:
        link, namespace = self.link(host), self.namespace(host)
        inside = ("ip", "-n", namespace)
        _run("ip", "netns", "add", namespace)
        _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _run("ip", "link", "set", link, "master", self.bridge)
        _run("ip", "link", "set", link, "up")
        _run(*inside, "addr", "add", f"{self.address(subnet, host)}/24", "dev", "eth0")
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "link", "set", "eth0", "up")

    def remove(self) -> None:
        """Remove all that carries this cluster's id. Nothing there is no error."""
        _remove(self.id)

    # -- using

    def inside(self, host: str, command: list[str]) -> list[str]:
        """A command line that runs `command` on a host: its network, its name, its /etc/hosts."""
        return ["nsenter", f"--net=/run/netns/{self.namespace(host)}", *self._named(host, command)]

    def beside(self, command: list[str]) -> list[str]:
        """A command line that runs `command` on the machine, which goes by its address on the bridge there: Slurm's
        programs listen on the address that their host's name stands for."""
        return self._named(machine(), command)

    def _named(self, name: str, command: list[str]) -> list[str]:
        private = ["unshare", "--mount", "--uts", "--propagation", "slave"]
        return [*private, "sh", "-c", ENTER, "sh", name, str(self.hosts_file), *command]

    def cut(self, host: str) -> None:
        """From now on no packet reaches the host or leaves it, and nobody is told."""
        _run("ip", "link", "set", self.link(host), "nomaster")

    def heal(self, host: str) -> None:
        """Plug the host in again, at full speed."""
        _run("ip", "link", "set", self.link(host), "master", self.bridge)
        for where, device in self._ends(host):
            _quietly("tc", *where, "qdisc", "del", "dev", device, "root")

    def is_cut(self, host: str) -> bool:
        about: list[dict[str, Any]] = json.loads(_run("ip", "-json", "link", "show", self.link(host)))
        return "master" not in about[0]

    def slow(self, host: str, delay: str = "", rate: str = "") -> None:
        """Delay each packet to and from the host, or let through so much a second, in the words of tc."""
        if not delay and not rate:
            raise UsageError("how slow?", hint="give --delay 50ms, --rate 10mbit, or both")
        if delay:
            discipline = ["netem", "delay", delay, *(["rate", rate] if rate else [])]
        else:
            discipline = ["tbf", "rate", rate, "burst", "32kb", "latency", "400ms"]
        try:
            for where, device in self._ends(host):
                _run("tc", *where, "qdisc", "replace", "dev", device, "root", *discipline)
        except LaunchError as error:
            if "kind is unknown" not in error.message:
                raise
            hint = "--rate alone needs no netem" if delay else "load the module sch_tbf"
            raise UsageError(f"this kernel has no queueing discipline `{discipline[0]}`", hint=hint) from None

    def _ends(self, host: str) -> list[tuple[list[str], str]]:
        return [([], self.link(host)), (["-n", self.namespace(host)], "eth0")]


def sweep(in_use: Callable[[Path], bool]) -> list[str]:
    """Remove the networks of clusters that are no more; gives their ids. `in_use(folder)` says which are."""
    removed = []
    for bridge in json.loads(_run("ip", "-json", "-details", "link", "show", "type", "bridge") or "[]"):
        name, folder = bridge.get("ifname", ""), bridge.get("ifalias", "")
        if BRIDGE.fullmatch(name) and folder and cluster_id(Path(folder)) == name[3:] and not in_use(Path(folder)):
            _remove(name[3:])
            removed.append(name[3:])
    return removed


def _remove(number: str) -> None:
    for line in _quietly("ip", "netns", "list").splitlines():
        name = line.split()[0] if line.strip() else ""
        if name.startswith(f"sft-{number}-"):
            _quietly("ip", "netns", "delete", name)
    for line in _quietly("ip", "-brief", "link", "show").splitlines():
        name = line.split()[0].partition("@")[0]
        if name == f"sft{number}" or name.startswith(f"sft{number}."):
            _quietly("ip", "link", "delete", name)


def _run(*command: str) -> str:
    """What a command prints. Raises LaunchError, with its words, when it fails."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
            check=False,
            env={**os.environ, "PATH": path},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"`{' '.join(command)}` failed: {error}") from None
    if done.returncode:
        raise LaunchError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def _quietly(*command: str) -> str:
    """The same, where a failure does not matter."""
    try:
        return _run(*command)
    except LaunchError:
        return ""
