"""What a devcluster is made of, as text: its shape, its folder, its ports and the files that Slurm reads.

No process is started here. The folder holds everything:

    devcluster.json   the shape and the ports; its presence says that the folder is a devcluster's
    slurm.conf, gres.conf, plugstack.conf, munge.key, munge.sock, gpu0..., log/, state/, spool/<host>/
"""

from __future__ import annotations

import dataclasses
import json
import os
import pwd
import random
import shutil
import socket
import stat
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slurm_ft import env
from slurm_ft.errors import LaunchError, UsageError
from slurm_ft.testing import devcluster_network

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "sinfo", "setsid")
OF_SLURM = frozenset(PROGRAMS) - {"munged", "setsid"} | {"slurmstepd", "slurmdbd", "sacct", "sacctmgr"}
PACKAGES = "apt-get install slurmctld slurmd slurm-client munge util-linux"
SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")  # daemons live here; a plain user's PATH lacks them
_TRIPLET = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
MARKER = "devcluster.json"
LOOPBACK = "127.0.0.1"
SOCKET_LIMIT = 107  # bytes of sun_path, without the closing zero
PORTS = range(20000, 32000)  # below the range from which Linux takes ports for outgoing connections

# Chosen so that a death is noticed within seconds and nothing waits without need.
SLURM_CONF = """\
ClusterName=devcluster
SlurmctldHost={machine}({address})
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
# Only this machine can reach the daemons, and only who can read munge.key is believed.
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
CredType=cred/munge
# A requeued job is held for as long as a credential lives: 120 s by default.
AuthInfo=socket={folder}/munge.sock,cred_expire=20
# Everything stays in the folder, and out of the system log.
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log
SlurmctldSyslogDebug=quiet
SlurmdSyslogDebug=quiet
PlugStackConfig={folder}/plugstack.conf
{plugins}
MailProg=/bin/true
# Without a cgroup of its own a host's steps are followed by their place in the process tree.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
{accounting}
PropagateResourceLimits=NONE
# More CPUs and memory than the machine has are taken at their word.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
{gres_types}
# A dead host is noticed SlurmdTimeout and two MessageTimeouts later, and is back as soon as its slurmd is.
SlurmdTimeout={node_timeout}
MessageTimeout={message_timeout}
ReturnToService=2
InactiveLimit=0
KillWait={kill_wait}
MinJobAge=300
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
{nodes}
PartitionName=dev Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

ACCOUNTING = """\
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.sock"""

NO_ACCOUNTING = """\
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none"""


@dataclass(frozen=True)
class Shape:
    """What the cluster looks like. `node_timeout`: seconds until a dead host is noticed (SlurmdTimeout).

    `netns`: each host has a network of its own (devcluster_network), with addresses from `subnet`. `slurm_root` is
    the folder of a Slurm other than the machine's own: it holds bin, sbin and the plugins.
    """

    hosts: int = 4
    gpus: int = 0
    cpus: int = 4
    memory: int = 4000
    node_timeout: int = 10
    kill_wait: int = 5
    netns: bool = False
    subnet: int = 0
    slurm_root: str = ""
    accounting: bool = False

    def __post_init__(self) -> None:
        least = {"hosts": 1, "gpus": 0, "cpus": 1, "memory": 1, "node_timeout": 3, "kill_wait": 1}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                text = f"--{name.replace('_', '-')} {getattr(self, name)} is too small"
                raise UsageError(text, hint=f"the smallest value is {smallest}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"node{number}" for number in range(1, self.hosts + 1))


def default_folder() -> Path:
    """SLURM_FT_DEVCLUSTER, else a folder of this user alone."""
    if chosen := os.environ.get(env.DEVCLUSTER):
        return Path(chosen)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "slurm-ft-devcluster"
    return Path(f"/tmp/slurm-ft-devcluster-{os.getuid()}")


def find_programs(names: Iterable[str] = PROGRAMS, slurm_root: str = "") -> dict[str, str]:
    """Full paths of the programs a devcluster needs. Slurm's own come from `slurm_root`, where one is named."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *SYSTEM_FOLDERS])
    own = os.pathsep.join(f"{slurm_root}/{folder}" for folder in ("sbin", "bin"))
    found = {name: shutil.which(name, path=own if slurm_root and name in OF_SLURM else path) for name in names}
    missing = [name for name, place in found.items() if place is None]
    if slurm_root and OF_SLURM.intersection(missing):
        raise UsageError(f"{slurm_root} has no {', '.join(missing)} in its bin and sbin", "name a Slurm's own prefix")
    if missing:
        raise LaunchError(f"not installed on this machine: {', '.join(missing)}", hint=f"`{PACKAGES}`")
    return {name: place for name, place in found.items() if place is not None}


def program(name: str, slurm_root: str = "") -> str:
    """Full path of one program."""
    return find_programs((name,), slurm_root)[name]


def plugin_folder(slurm_root: str) -> Path:
    """Where the plugins below a prefix are."""
    places = [Path(slurm_root) / name for name in ("lib/slurm", "lib64/slurm", f"lib/{_TRIPLET}/slurm-wlm")]
    for place in places:
        if (place / "auth_munge.so").exists():
            return place
    raise UsageError(
        f"{slurm_root} has no plugins of Slurm", f"looked for auth_munge.so in {', '.join(map(str, places))}"
    )


def check_folder(folder: Path) -> None:
    """Refuse a folder that is somebody else's, holds something else, or is too deep for a socket."""
    deepest = folder / "spool" / "node100" / "node100_9999999.4294967291"
    if (excess := len(os.fsencode(deepest)) - SOCKET_LIMIT) > 0:
        text = f"the folder {folder} is {excess} characters too long: Slurm puts sockets below it"
        raise UsageError(text, hint="choose a shorter one with --folder, for example below /tmp")
    try:
        about = folder.lstat()
    except FileNotFoundError:
        return
    other = "choose another one with --folder"
    if not stat.S_ISDIR(about.st_mode):
        raise UsageError(f"{folder} is not a folder", hint=other)
    if about.st_uid != os.geteuid():
        raise UsageError(f"the folder {folder} belongs to user {about.st_uid}", hint=other)
    if not is_devcluster(folder) and any(folder.iterdir()):
        raise UsageError(f"the folder {folder} holds something else than a devcluster", hint=other)


def is_devcluster(folder: Path) -> bool:
    return (folder / MARKER).exists()


def choose_ports(count: int) -> list[int]:
    """Ports that are free now. Somebody can still take one before the daemon does: `up` tries again then."""
    ports: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise LaunchError(f"fewer than {count} free ports between {PORTS.start} and {PORTS.stop}")


def write_files(folder: Path, shape: Shape, ports: list[int]) -> None:
    """Fill the folder, throwing away what an earlier devcluster left in it."""
    clear_folder(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)  # the mode above is cut by the umask, and an empty folder may have been there before
    write_marker(folder, shape, ports)
    for name in ("log", "state", "spool", *(f"spool/{host}" for host in shape.names)):
        (folder / name).mkdir(mode=0o700)
    key = os.open(folder / "munge.key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(key, "wb") as file:
        file.write(os.urandom(128))
    # Slurm wants a character device for a GPU and does not open it: a link to one needs no root.
    for number in range(shape.gpus):
        (folder / f"gpu{number}").symlink_to("/dev/null")
    (folder / "plugstack.conf").touch()
    (folder / "gres.conf").write_text(gres_conf(folder, shape))
    (folder / "slurm.conf").write_text(slurm_conf(folder, shape, ports))


def write_marker(folder: Path, shape: Shape, ports: list[int]) -> None:
    text = json.dumps({"shape": dataclasses.asdict(shape), "ports": ports}, indent=1)
    (folder / MARKER).write_text(text + "\n")  # before anything else: a half-made folder is still known for ours


def read_marker(folder: Path) -> tuple[Shape, list[int]]:
    try:
        content = json.loads((folder / MARKER).read_text())
        return Shape(**content["shape"]), list(content["ports"])
    except FileNotFoundError:
        raise UsageError(f"no devcluster in {folder}", hint="start one: `… up`, or name it with --folder") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder / MARKER} is damaged: {error}", hint="`… down`, then `… up`") from None


def shape_of(folder: Path) -> Shape | None:
    """The shape of the devcluster in a folder, for its end; None when none is written there, or it is damaged."""
    try:
        return read_marker(folder)[0]
    except UsageError:
        return None


def clear_folder(folder: Path) -> None:
    """Remove what is inside, the marker last: a clear that is cut short can be done again."""
    if not folder.exists():
        return
    for entry in sorted(folder.iterdir(), key=lambda path: path.name == MARKER):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def gres_conf(folder: Path, shape: Shape) -> str:
    if not shape.gpus:
        return ""
    last = f"[0-{shape.gpus - 1}]" if shape.gpus > 1 else "0"
    return f"NodeName={','.join(shape.names)} Name=gpu File={folder}/gpu{last}\n"


def slurm_conf(folder: Path, shape: Shape, ports: list[int]) -> str:
    machine = devcluster_network.machine()
    return SLURM_CONF.format(
        folder=folder,
        machine=machine,
        address=f"{devcluster_network.BLOCK}.{shape.subnet}.1" if shape.netns else LOOPBACK,
        user=user_name(),
        port=ports[0],
        gres_types="GresTypes=gpu" if shape.gpus else "# no GPUs",
        node_timeout=shape.node_timeout,
        message_timeout=max(2, min(10, shape.node_timeout // 3)),
        kill_wait=shape.kill_wait,
        nodes=_node_lines(folder, shape, machine, ports[1 : 1 + shape.hosts]),
        plugins=plugin_line(shape),
        accounting=ACCOUNTING.format(port=ports[-1], folder=folder) if shape.accounting else NO_ACCOUNTING,
    )


def plugin_line(shape: Shape) -> str:
    return f"PluginDir={plugin_folder(shape.slurm_root)}" if shape.slurm_root else "# the machine's own Slurm"


def port_count(shape: Shape) -> int:
    """slurmctld's, one for each slurmd, and slurmdbd's, in this order."""
    return 1 + shape.hosts + shape.accounting


def _node_lines(folder: Path, shape: Shape, machine: str, ports: list[int]) -> str:
    network = devcluster_network.Network(folder, shape.names)
    size = f"CPUs={shape.cpus} RealMemory={shape.memory}" + (f" Gres=gpu:{shape.gpus}" if shape.gpus else "")
    return "\n".join(
        f"NodeName={name} NodeHostname={name if shape.netns else machine} "
        f"NodeAddr={network.address(shape.subnet, name) if shape.netns else LOOPBACK} Port={port} {size} State=UNKNOWN"
        for name, port in zip(shape.names, ports, strict=True)
    )


def user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        text = f"user {os.geteuid()} has no name on this machine, and Slurm wants one"
        raise LaunchError(text, hint="add the user to /etc/passwd, or run as another one") from None
