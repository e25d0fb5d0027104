"""The devcluster itself: start, stop, lose a host, get it back.

`up` starts munged, slurmctld and one slurmd for each host, each in a session of its own and each marked in its
environment. From then on the object holds no state: which processes there are is read from /proc, what was asked
for from devcluster.json. So another process can take the cluster over (`DevCluster.attach`), and `down` works after
any crash. Two commands never work on one folder at the same time: each holds a lock on it.

A watcher process holds a pidfd of the owner, the process that must not be outlived. When the owner ends, in
whatever way, the watcher takes the cluster down.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO

from slurm_ft import env
from slurm_ft.errors import LaunchError, SlurmFTError, UsageError
from slurm_ft.testing import devcluster_accounting as accounting
from slurm_ft.testing import devcluster_config as config
from slurm_ft.testing import devcluster_processes as processes
from slurm_ft.testing.devcluster_config import Shape
from slurm_ft.testing.devcluster_init import ENDED
from slurm_ft.testing.devcluster_network import Network, sweep
from slurm_ft.testing.devcluster_processes import HOST, MARK, WATCHER, Process

START_SECONDS = 60.0
ANSWER_SECONDS = 3.0  # for one Slurm command; whoever waits for more asks again
INIT = Path(__file__).with_name("devcluster_init.py")
USABLE = frozenset({"idle", "mixed", "allocated", "completing"})
LOST = ("down", "drain", "fail")
ATTEMPTS = 3  # of `up`, when a port was taken between our look and the daemon's


class PortTaken(LaunchError):
    """Somebody else took a port first."""


class DevCluster:
    """A real Slurm on this machine.

    with DevCluster(hosts=4) as cluster:
        subprocess.run(["srun", "-N4", "hostname"], env=cluster.environ)
    """

    def __init__(
        self,
        hosts: int = 4,
        gpus: int = 0,
        cpus: int = 4,
        memory: int = 4000,
        folder: str | os.PathLike[str] | None = None,
        node_timeout: int = 10,
        kill_wait: int = 5,
        die_with: int | None = None,
        netns: bool = False,
        slurm_root: str | os.PathLike[str] = "",
        accounting: bool = False,
    ) -> None:
        root = os.path.abspath(slurm_root) if slurm_root else ""
        self.shape = Shape(
            hosts, gpus, cpus, memory, node_timeout, kill_wait, netns=netns, slurm_root=root, accounting=accounting
        )
        self.folder = resolve(folder)
        self.owner = os.getpid() if die_with is None else die_with

    @classmethod
    def attach(cls, folder: str | os.PathLike[str] | None = None) -> DevCluster:
        """The cluster that is up in `folder`, started by whoever."""
        place = resolve(folder)
        config.check_folder(place)
        shape, _ = config.read_marker(place)
        cluster = cls(folder=place)
        cluster.shape = shape
        return cluster

    def __enter__(self) -> DevCluster:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    @property
    def hosts(self) -> tuple[str, ...]:
        return self.shape.names

    @property
    def network(self) -> Network:
        """The network of the hosts, where they have one of their own."""
        return Network(self.folder, self.hosts)

    @property
    def _conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def settings(self) -> dict[str, str]:
        """The variables that lead Slurm's commands, and ours, to this cluster."""
        settings = {"SLURM_CONF": str(self._conf), env.DEVCLUSTER: str(self.folder)}
        if self.shape.slurm_root:
            settings["PATH"] = os.pathsep.join([f"{self.shape.slurm_root}/bin", os.environ.get("PATH", os.defpath)])
        return settings

    def command(self, command: list[str]) -> list[str]:
        """A command line that runs a command of Slurm's on this cluster, in `environ`."""
        return self.network.beside(command) if self.shape.netns else command

    @property
    def environ(self) -> dict[str, str]:
        """The whole environment for a command on this cluster; nothing of a Slurm job around us is left in it."""
        return {**outside_slurm(), **self.settings}

    # -- start and stop

    def up(self) -> None:
        """Start everything; returns when all hosts are idle. On an error nothing is left running."""
        config.find_programs(slurm_root=self.shape.slurm_root)
        if self.shape.accounting:
            accounting.find_programs(self.shape.slurm_root)
        config.check_folder(self.folder)
        with self._lock(create=True):
            if self.processes():
                hint = "use it (`… env`), or end it first: `… down`"
                raise UsageError(f"a devcluster is already up in {self.folder}", hint=hint)
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    return self._start()
                except PortTaken:
                    self._stop(grace=0)
                    if attempt == ATTEMPTS:
                        raise
                except BaseException:
                    self._stop(grace=0)
                    raise

    def down(self, keep: bool = False, grace: float = 3.0) -> None:
        """End everything and remove the folder, unless `keep`. Nothing to end is not an error."""
        config.check_folder(self.folder)
        if not self.folder.exists():
            return
        with self._lock():
            if not self.folder.exists():
                return  # another `down` was faster
            self.shape = config.shape_of(self.folder) or self.shape  # whoever started it
            self._stop(grace)
            if not keep:
                config.clear_folder(self.folder)
                self.folder.rmdir()

    def _start(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        ports = config.choose_ports(config.port_count(self.shape))
        if self.shape.netns:
            sweep(_in_use)
            self.shape = dataclasses.replace(self.shape, subnet=self.network.choose_subnet())
        config.write_files(self.folder, self.shape, ports)
        self._start_watcher()
        if self.shape.netns:
            self.network.make(self.shape.subnet)
        self._spawn("munged", self._munged())
        self._await(lambda: (self.folder / "munge.sock").is_socket(), deadline, "munged")
        if self.shape.accounting:
            self._start_accounting(deadline, ports[-1])
        self._spawn_slurmctld()
        for host in self.hosts:
            self._spawn_slurmd(host)
        self._await(self._all_idle, deadline, "slurmctld", *self.hosts)

    def _start_accounting(self, deadline: float, port: int) -> None:
        """Database, slurmdbd and the cluster's name in it, in this order: slurmctld fetches its ids at its start."""
        programs = accounting.find_programs(self.shape.slurm_root)
        accounting.write_files(self.folder, self.shape, port)
        accounting.fill_database(self.folder, programs)
        self._spawn("mariadbd", accounting.mariadbd(self.folder, programs))
        self._await(accounting.socket(self.folder).is_socket, deadline, "mariadbd")
        self._spawn("slurmdbd", [programs["slurmdbd"], "-D"], accounting.environment(self.folder))
        add = ("sacctmgr", "--immediate", "--quiet", "add", "cluster", "devcluster")
        listed = ("sacctmgr", "--noheader", "--parsable2", "list", "cluster", "format=cluster")
        self._await(
            lambda: bool(self._ask(*add)) or "devcluster" in self._ask(*listed), deadline, "slurmdbd", "mariadbd"
        )

    def _munged(self) -> list[str]:
        """`--force`: munged wants a socket that all users can reach; ours is for one user."""
        files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid"}
        files |= {"log-file": "log/munged.log", "seed-file": "munged.seed"}
        options = [f"--{option}={self.folder / name}" for option, name in files.items()]
        return [config.program("munged"), "--foreground", "--force", *options]

    def _spawn(self, name: str, command: list[str], extra: Mapping[str, str] | None = None) -> None:
        """Start a daemon below an init of its own, as nobody's child. `name` is a host, or the daemon's own."""
        command = [sys.executable, "-I", "-S", str(INIT), *command]
        if self.shape.netns:
            command = self.network.inside(name, command) if name in self.hosts else self.network.beside(command)
        environment = outside_slurm() | {MARK: str(self.folder), HOST: name, "SLURM_CONF": str(self._conf)}
        environment |= extra or {}
        with open(self.folder / "log" / f"{name}.out", "wb") as out:
            _detach(command, environment, out, cwd=self.folder)

    def _spawn_slurmctld(self) -> None:
        self._spawn("slurmctld", [self._program("slurmctld"), "-D", "-f", str(self._conf)])

    def _spawn_slurmd(self, host: str) -> None:
        argv = [self._program("slurmd"), "-D", "-f", str(self._conf), "-N", host]
        if self.shape.slurm_root:
            argv += ["-d", config.program("slurmstepd", self.shape.slurm_root)]
        self._spawn(host, argv)

    def _program(self, name: str) -> str:
        return config.program(name, self.shape.slurm_root)

    def _start_watcher(self) -> None:
        """The owner's pidfd is opened here and handed over: there is no moment at which its pid can be reused."""
        if self.owner == 0:
            return
        try:
            owner = os.pidfd_open(self.owner)
        except OSError as error:
            raise UsageError(f"no process {self.owner} to live with: {error.strerror}") from None
        command = [sys.executable, "-m", "slurm_ft.testing.devcluster", "watch", "--folder", str(self.folder)]
        with ExitStack() as stack:
            stack.callback(os.close, owner)
            out = stack.enter_context(open(self.folder / "log" / "watcher.out", "ab"))
            environment = outside_slurm() | {MARK: str(self.folder), HOST: WATCHER}
            _detach([*command, "--pidfd", str(owner)], environment, out, pass_fds=(owner,))

    def _stop(self, grace: float) -> None:
        """Jobs first, by Slurm's own means; then the daemons; then whatever is left."""
        if grace and any(process.role in ("slurmstepd", "job") for process in self.processes()):
            self._cancel_jobs(grace)
        daemons = [process for process in self.processes() if process.role in processes.DAEMONS]
        processes.send(daemons, signal.SIGTERM, wait=1.0 if grace else 0.3)
        if left := processes.end(self.processes, time.monotonic() + 20):
            raise LaunchError(
                f"these processes of the devcluster cannot be killed: {', '.join(map(str, left))}",
                hint="they hang in the kernel, or belong to another user",
            )
        shape = config.shape_of(self.folder)
        if shape is None or shape.netns:  # None: nobody knows, and only what carries the cluster's id is removed
            self.network.remove()

    def _cancel_jobs(self, grace: float) -> None:
        """A kindness: where no scancel is found, or it does not answer, the jobs are killed like all else."""
        deadline = time.monotonic() + grace
        try:
            command = [self._program("scancel"), "--partition=dev"]
            subprocess.run(command, env=self.environ, capture_output=True, timeout=grace, check=False)
        except (SlurmFTError, OSError, subprocess.TimeoutExpired):
            return
        ours = [process for process in self.processes() if process.role in ("slurmstepd", "job", "client")]
        processes.wait(ours, deadline)

    # -- hosts

    def kill_host(self, host: str) -> list[Process]:
        """The host dies: SIGKILL to its slurmd, its slurmstepds and all that runs on it. Returns what was killed."""
        self._check_host(host)
        killed = self.processes(host)
        if left := processes.end(lambda: self.processes(host), time.monotonic() + 10):
            raise LaunchError(f"still alive on {host}: {', '.join(map(str, left))}")
        return killed

    def revive_host(self, host: str) -> None:
        """The host boots again; returns when Slurm takes jobs for it."""
        self._check_host(host)
        if any(process.role == "slurmd" for process in self.processes(host)):
            raise UsageError(f"{host} is alive", hint=f"`… kill-host {host}` first")
        deadline = time.monotonic() + START_SECONDS
        before = self._slurmd_start(host)
        # Slurm counts starts in whole seconds; a new one must differ from the old one for us to know it.
        self._await(lambda: time.strftime("%Y-%m-%dT%H:%M:%S") != before, deadline, "slurmctld")
        self._spawn_slurmd(host)
        self._await(lambda: self._slurmd_start(host) not in ("", before), deadline, host)
        self._await(lambda: self._usable(host), deadline, host)

    # -- the network of a host

    def cut(self, host: str) -> None:
        """The host loses its network, and nobody is told: it lives on, alone."""
        self._own_network(host).cut(host)

    def heal(self, host: str) -> None:
        """The host has its network again, at full speed."""
        self._own_network(host).heal(host)

    def slow(self, host: str, delay: str = "", rate: str = "") -> None:
        """The host's network is slow until it is healed: `delay` for each packet, `rate` as tc writes them."""
        self._own_network(host).slow(host, delay, rate)

    def is_cut(self, host: str) -> bool:
        return self.shape.netns and self.network.is_cut(host)

    def _own_network(self, host: str) -> Network:
        self._check_host(host)
        if not self.shape.netns:
            raise UsageError("the hosts of this devcluster share the machine's network", hint="start it with --netns")
        return self.network

    def stop_slurmctld(self) -> None:
        """Slurm's own controller is taken down in order; jobs and steps go on, and no command is answered.

        Killed, it would forget what it has not saved yet: a job of the last seconds is pending again.
        """
        daemon = [process for process in self.processes() if process.role == "slurmctld"]
        processes.send(daemon, signal.SIGTERM, 10.0)
        if any(process.role == "slurmctld" for process in self.processes()):
            raise LaunchError("slurmctld does not stop", hint=f"see {self.folder / 'log'}")

    def start_slurmctld(self) -> None:
        """It starts again from its saved state; returns when it answers."""
        if any(process.role == "slurmctld" for process in self.processes()):
            raise UsageError("slurmctld is alive", hint="stop it first")
        self._spawn_slurmctld()
        self._await(lambda: bool(self.states()), time.monotonic() + START_SECONDS, "slurmctld")

    def states(self) -> dict[str, str]:
        """State of each host as Slurm sees it ("idle", "allocated", "down*", ...); empty when Slurm is silent."""
        answer = self._ask("sinfo", "--noheader", "--Node", "--format=%N %T", "--partition=dev")
        return dict(line.split(maxsplit=1) for line in answer.splitlines())

    def processes(self, host: str | None = None) -> list[Process]:
        """All processes of the cluster, or of one host."""
        found = processes.find(self.folder)
        return found if host is None else [process for process in found if process.host == host]

    def _check_host(self, host: str) -> None:
        if host not in self.hosts:
            raise UsageError(f"no host {host!r} here", hint=f"there are {', '.join(self.hosts)}")

    def _all_idle(self) -> bool:
        states = self.states()
        return all(states.get(host) == "idle" for host in self.hosts)

    def _usable(self, host: str) -> bool:
        state = self.states().get(host, "")
        if state.startswith(LOST):
            self._ask("scontrol", "update", f"NodeName={host}", "State=RESUME")
        return state in USABLE

    def _slurmd_start(self, host: str) -> str:
        """When the slurmd that slurmctld knows was started."""
        words = self._ask("scontrol", "--oneliner", "show", "node", host).split()
        return next((word.partition("=")[2] for word in words if word.startswith("SlurmdStartTime=")), "")

    def _ask(self, program: str, *arguments: str) -> str:
        """What a Slurm command answers; empty when it fails or is silent."""
        command = [self._program(program), *arguments]
        try:
            done = subprocess.run(
                command, env=self.environ, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return ""
        return done.stdout if done.returncode == 0 else ""

    # -- waiting and locking

    def _await(self, ready: Callable[[], bool], deadline: float, *needed: str) -> None:
        """Wait for `ready`. `needed` names daemons or hosts whose end, or silence, is the reason if it never is."""
        while not ready():
            if gone := [name for name in needed if ENDED in self._log(name)]:
                self._explain(f"{gone[0]} ended while the devcluster was starting", gone[0])
            if time.monotonic() > deadline:
                self._explain(f"{needed[0]} was not ready within {START_SECONDS:.0f} s", needed[0])
            time.sleep(0.03)

    def _log(self, name: str) -> str:
        return (self.folder / "log" / f"{name}.out").read_text(errors="replace")

    def _explain(self, sentence: str, daemon: str) -> None:
        """Raise, with the last words of the daemon."""
        lines = self._log(daemon).splitlines()
        tail = "\n".join(f"  {line}" for line in lines[-8:])
        taken = any("Address already in use" in line for line in lines)
        kind = PortTaken if taken else LaunchError
        raise kind(f"{sentence}; its last lines:\n{tail}", hint=f"all logs are in {self.folder / 'log'}")

    @contextmanager
    def _lock(self, create: bool = False) -> Iterator[None]:
        """One command at a time. The lock is on the folder itself: it needs no file, and ends with its holder."""
        if create:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            yield
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def resolve(folder: str | os.PathLike[str] | None) -> Path:
    """An absolute path without links: it is what marks the processes of the cluster."""
    chosen = Path(folder) if folder is not None else config.default_folder()
    # A link in the last place is refused later, so only the parents are followed.
    return chosen.parent.resolve() / chosen.name


def _in_use(folder: Path) -> bool:
    """Is there a devcluster in the folder, or a command that works on one?"""
    if not config.is_devcluster(folder):
        return False
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return bool(processes.find(folder))


def outside_slurm() -> dict[str, str]:
    """This process's environment without the traces of a Slurm job or of another devcluster around it."""
    ours = (MARK, HOST, "SLURMD_NODENAME", env.DEVCLUSTER)
    return {
        key: value
        for key, value in os.environ.items()
        if key not in ours and (key.startswith("SLURM_FT_") or not key.startswith("SLURM_"))
    }


def _detach(
    command: list[str],
    environment: dict[str, str],
    out: IO[bytes],
    cwd: Path | None = None,
    pass_fds: tuple[int, ...] = (),
) -> None:
    """Start a process that is nobody's child, so that nobody has to wait for it."""
    subprocess.run(
        [config.program("setsid"), "--fork", *command],
        env=environment,
        cwd=cwd,
        pass_fds=pass_fds,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        check=True,
    )


def watch(folder: Path, owner: int) -> None:
    """Take the cluster down when the process behind the pidfd `owner` ends."""
    poller = select.poll()
    poller.register(owner, select.POLLIN)
    poller.poll()
    DevCluster(folder=folder).down(grace=0)
