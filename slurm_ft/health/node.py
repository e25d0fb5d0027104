"""What is looked at on one host. Each function gives one sentence for each fault, and takes the root of the file
system, so that tests bring their own.

    node      GPUs there and idle, room in /dev/shm, limits, what ended programs have left behind
    network   the interfaces that the environment names, InfiniBand ports, RCCL's or NCCL's network plugin
    storage   the run folder and the scratch folder: writable, with room
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from slurm_ft import env
from slurm_ft.health import fabric
from slurm_ft.health.bounded import Check
from slurm_ft.native import probes

GIB = 1 << 30
MIB = 1 << 20
IDLE_BYTES = 512 * MIB
"""Memory of a GPU that may be in use although nobody uses it: drivers keep some. NVIDIA's resiliency extension
waits for less than this before it restarts a job."""
SHM_WITH_GPUS = GIB
"""Room in /dev/shm: what NVIDIA's troubleshooting page for NCCL advises for containers (--shm-size=1g)."""
SHM_WITHOUT = 64 * MIB
STALE_BYTES = 64 * MIB
STALE_NAMES = ("nccl-*", "rccl-*", "torch_*", "sem.mp-*", "sem.loky-*", "psm_*")
"""How shared memory of NCCL, RCCL, torch and multiprocessing is called."""
FILES = 4096
"""Open files: a rank has a socket for each peer and channel, and one for each worker and shard of data."""
ROOM = GIB
INODES = 1000


@dataclass(frozen=True)
class Wanted:
    """What a host is held against. `gpus`: None when nobody says how many; `environ`: the ranks' environment."""

    gpus: int | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    shared: str = ""
    scratch: str = ""
    root: Path = Path("/")


AREAS = ("node", "network", "storage")


def checks(wanted: Wanted, areas: frozenset[str]) -> dict[str, Check]:
    """The checks of these areas, by what they look at."""
    found: dict[str, Check] = {}
    if "node" in areas:
        found |= {
            "GPUs": partial(gpu_faults, wanted),
            "/dev/shm": partial(shm_faults, wanted),
            "limits": partial(limit_faults, wanted),
            "left-over processes": partial(process_faults, wanted),
            "left-over shared memory": partial(stale_faults, wanted),
        }
    if "network" in areas:
        found |= {
            "interfaces": partial(fabric.interface_faults, wanted.environ, wanted.root),
            "InfiniBand": partial(fabric.port_faults, wanted.environ, wanted.root),
            "the network plugin": partial(fabric.plugin_faults, wanted.environ),
        }
    if "storage" in areas:
        found |= {
            f"the {word} folder": partial(folder_faults, place, word)
            for word, place in (("run", wanted.shared), ("scratch", wanted.scratch))
            if place
        }
    return found


# --- node ----------------------------------------------------------------------------------------------


def gpu_faults(wanted: Wanted) -> list[str]:
    """GPUs that are missing, and those that somebody else uses. A live keeper of the run around us may hold memory of
    a GPU, also after a rank was killed, and is not seen to."""
    found, holders = probes.gpus(wanted.root), probes.holders(wanted.root)
    faults = []
    if wanted.gpus is not None and len(found) < wanted.gpus:
        faults.append(f"{len(found)} of {wanted.gpus} GPUs are there")
    own = own_processes(wanted)
    kept = "live" in env.KEEPER_MODES.get(wanted.environ.get(env.KEEPER_MODE, ""), ())
    for gpu in found:
        here = [item for item in holders if item.bus_id == gpu.bus_id]
        others = [item for item in here if item.pid not in own]
        if others:
            faults += [f"process {item.pid} holds {item.bytes / GIB:.1f} GiB of GPU {gpu.bus_id}" for item in others]
        elif not here and not kept and gpu.used > IDLE_BYTES:
            faults.append(
                f"{gpu.used / GIB:.1f} GiB of GPU {gpu.bus_id} are in use, and no process is seen to hold them"
            )
    return faults


def shm_faults(wanted: Wanted) -> list[str]:
    needed = SHM_WITH_GPUS if wanted.gpus else SHM_WITHOUT
    place = wanted.root / "dev/shm"
    try:
        free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    except OSError as error:
        return [f"/dev/shm cannot be used: {error.strerror}"]
    return [f"/dev/shm has room for {free / MIB:.0f} MiB, and {needed / MIB:.0f} are needed"] if free < needed else []


def limit_faults(wanted: Wanted) -> list[str]:
    """Limits of this process, which the ranks will inherit."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return limits_too_low(soft, files, fabric.has_rdma(wanted.root))


def limits_too_low(memlock: int, files: int, rdma: bool) -> list[str]:
    """`memlock` in bytes and `files` as getrlimit has them, the second as the hard limit."""
    faults = []
    if rdma and memlock != resource.RLIM_INFINITY:
        faults.append(
            f"only {memlock / 1024:.0f} KiB of memory may be locked, and RDMA locks all that it sends (ulimit -l, "
            "PropagateResourceLimitsExcept=MEMLOCK)"
        )
    if files != resource.RLIM_INFINITY and files < FILES:
        faults.append(f"only {files} files may be open at once (ulimit -Hn), and {FILES} are needed")
    return faults


def process_faults(wanted: Wanted) -> list[str]:
    """Ranks of ours, and their children, that have outlived their agent."""
    return [
        f"process {pid} is left over from attempt {facts.get(env.ATTEMPT)} of a replica of {facts.get(env.RUN)}"
        for pid, parent, facts in _processes(wanted.root)
        if parent == 1 and env.ATTEMPT in facts and env.SOCKET in facts
    ]


def stale_faults(wanted: Wanted) -> list[str]:
    """Files in /dev/shm of this user that no process has open or mapped."""
    place = wanted.root / "dev/shm"
    files = [path for name in STALE_NAMES for path in place.glob(name)]
    files = [path for path in files if _size(path) and path.stat().st_uid == os.getuid()]
    if sum(map(_size, files)) < STALE_BYTES:
        return []
    used = _mapped(wanted.root)
    stale = [path for path in files if path.name not in used]
    size = sum(map(_size, stale))
    if size < STALE_BYTES:
        return []
    return [f"{len(stale)} files of ended programs, such as {stale[0].name}, hold {size / MIB:.0f} MiB of /dev/shm"]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _mapped(root: Path) -> set[str]:
    """The names in /dev/shm that a process which we may look into uses."""
    names: set[str] = set()
    for process in (root / "proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            names |= {os.path.basename(os.readlink(link)) for link in (process / "fd").iterdir()}
        with contextlib.suppress(OSError):
            lines = (process / "maps").read_text(errors="replace").splitlines()
            names |= {line.rpartition("/")[2] for line in lines if "/dev/shm/" in line}
    return names


def own_processes(wanted: Wanted) -> set[int]:
    """The processes of this job: what they hold is in use and no fault."""
    job = wanted.environ.get("SLURM_JOB_ID", "")
    mine = {pid for pid, _, facts in _processes(wanted.root) if job and facts.get("SLURM_JOB_ID") == job}
    return mine - {int(fault.split()[1]) for fault in process_faults(wanted)}


def _processes(root: Path) -> list[tuple[int, int, dict[str, str]]]:
    """(number, parent, environment) of each process that we may look into."""
    found = []
    for process in (root / "proc").glob("[0-9]*"):
        try:
            text = (process / "environ").read_bytes().decode(errors="replace")
            parent = int((process / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        facts = dict(item.split("=", 1) for item in text.split("\0") if "=" in item)
        found.append((int(process.name), parent, facts))
    return sorted(found, key=lambda item: item[0])


# --- storage -------------------------------------------------------------------------------------------


def nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there: a run makes its own."""
    return next((place for place in (folder, *folder.parents) if place.is_dir()), folder)


def folder_faults(folder: str, word: str) -> list[str]:
    """A folder that cannot be written, or has no room. A quota shows only in that the test file cannot be written."""
    place = nearest(Path(folder))
    token = place / f".slurm-ft-check-{os.uname().nodename}-{os.getpid()}"
    try:
        token.write_bytes(os.urandom(4096))
        with open(token, "rb") as file:
            os.fsync(file.fileno())
        about = os.statvfs(place)
    except OSError as error:
        return [f"the {word} folder {folder} cannot be written: {error.strerror}"]
    finally:
        with contextlib.suppress(OSError):
            token.unlink()
    faults = []
    if (free := about.f_bavail * about.f_frsize) < ROOM:
        faults.append(f"the {word} folder {folder} has room for {free / MIB:.0f} MiB, and {ROOM / MIB:.0f} are needed")
    if about.f_files and about.f_favail < INODES:
        faults.append(f"the {word} folder {folder} has room for {about.f_favail} more files, and {INODES} are needed")
    return faults
