"""What the kernel and the vendor's tools say about GPUs, without a driver and without a context. Pure readers.

AMD: `/sys/class/kfd` (devices, and which process holds how much memory on which) and `mem_info_vram_*` of the PCI
device. NVIDIA: `nvidia-smi`, whose CSV output is parsed here. Devices are named by bus id: an index means something
else in each process. Every reader takes the root of the file system, or the text, so that tests bring their own.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

SMI_SECONDS = 20
SMI_DEVICES = ("--query-gpu=pci.bus_id,name,memory.total,memory.used", "--format=csv,noheader,nounits")
SMI_PROCESSES = ("--query-compute-apps=pid,gpu_bus_id,used_memory", "--format=csv,noheader,nounits")
MIB = 1 << 20
NETWORK_FOLDERS = ("/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib", "/opt/rocm/lib")


@dataclass(frozen=True)
class Gpu:
    """One GPU as the machine sees it."""

    bus_id: str
    name: str
    bytes: int
    used: int
    platform: str

    @property
    def free(self) -> int:
        return max(self.bytes - self.used, 0)


@dataclass(frozen=True)
class Holder:
    """A process that holds memory of a GPU."""

    pid: int
    bus_id: str
    bytes: int


def bus_id(text: str) -> str:
    """One spelling for all: `00000000:C1:00.0` and `c1:00.0` become `0000:c1:00.0`."""
    match = re.fullmatch(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no bus id")
    return f"{int(match[1] or '0', 16):04x}:{match[2]}:{match[3]}.{match[4]}"


# --- AMD ---


def amd_gpus(root: Path = Path("/")) -> list[Gpu]:
    """All AMD GPUs of the machine, whatever the masks of this process say, in KFD's order."""
    return [gpu for _, gpu in _amd_nodes(root)]


def amd_holders(root: Path = Path("/")) -> list[Holder]:
    """Which process holds memory on which AMD GPU. In a container the numbers are those of the host."""
    buses = {number: gpu.bus_id for number, gpu in _amd_nodes(root)}
    found = []
    for path in sorted((root / "sys/class/kfd/kfd/proc").glob("*/vram_*")):
        number, pid = path.name.removeprefix("vram_"), path.parent.name
        used = _integer(path)
        if pid.isdigit() and number in buses and used:
            found.append(Holder(int(pid), buses[number], used))
    return sorted(found, key=lambda holder: (holder.bus_id, holder.pid))


def _amd_nodes(root: Path) -> list[tuple[str, Gpu]]:
    """(KFD's number of the GPU, the GPU) for each node that is one."""
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*")
    found = []
    for node in sorted((path for path in nodes if path.name.isdigit()), key=lambda path: int(path.name)):
        number = _text(node / "gpu_id")
        facts = dict(line.split()[:2] for line in _text(node / "properties").splitlines() if len(line.split()) >= 2)
        if number in ("", "0") or not facts.get("location_id", "").isdigit():
            continue
        location, domain = int(facts["location_id"]), int(facts.get("domain", "0"))
        place = f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"
        device = root / "sys/bus/pci/devices" / place
        sizes = _integer(device / "mem_info_vram_total"), _integer(device / "mem_info_vram_used")
        found.append((number, Gpu(place, _text(node / "name") or "AMD GPU", *sizes, platform="rocm")))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _integer(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdigit() else 0


# --- NVIDIA ---


def nvidia_gpus(text: str) -> list[Gpu]:
    """From the answer to SMI_DEVICES."""
    rows = (row for row in _rows(text, 4) if row[2].isdigit())
    return [
        Gpu(bus_id(bus), name, int(total) * MIB, int(used or 0) * MIB if used.isdigit() else 0, "cuda")
        for bus, name, total, used in rows
    ]


def nvidia_holders(text: str) -> list[Holder]:
    """From the answer to SMI_PROCESSES. A size that the driver does not tell (MIG, WSL) is 0."""
    rows = (row for row in _rows(text, 3) if row[0].isdigit())
    return [Holder(int(pid), bus_id(bus), int(used) * MIB if used.isdigit() else 0) for pid, bus, used in rows]


def _rows(text: str, columns: int) -> Iterable[list[str]]:
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines())
    return (row for row in rows if len(row) == columns)


def _smi(arguments: tuple[str, ...]) -> str:
    """What nvidia-smi prints; nothing when it is not there, fails or hangs, as it does with a broken driver."""
    command = ["nvidia-smi", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SMI_SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


# --- both ---


def gpus(root: Path = Path("/")) -> list[Gpu]:
    """All GPUs of this machine."""
    return amd_gpus(root) + nvidia_gpus(_smi(SMI_DEVICES))


def holders(root: Path = Path("/")) -> list[Holder]:
    """All processes that hold memory of a GPU of this machine."""
    return amd_holders(root) + nvidia_holders(_smi(SMI_PROCESSES))


def leftovers(found: Iterable[Holder], wanted: Iterable[int]) -> list[Holder]:
    """The holders that are none of `wanted`, perhaps of an older step. Whose they are is for the caller to check."""
    keep = set(wanted)
    return [holder for holder in found if holder.pid not in keep]


# --- the network of NCCL and RCCL ---


@dataclass(frozen=True)
class Plugin:
    """A network plugin by its file name, and where it was found; '' when nowhere."""

    name: str
    path: str


def network_plugins(environ: Mapping[str, str], folders: Iterable[str] = NETWORK_FOLDERS) -> list[Plugin]:
    """The files that NCCL or RCCL would try, in their order, and where each is. What really loads: `network_chosen`."""
    chosen = environ.get("NCCL_NET_PLUGIN", "")
    if chosen == "none":
        return []
    stems = ["librccl-net.so", "libnccl-net.so"]
    names = (
        [chosen if "/" in chosen or chosen.endswith(".so") else f"libnccl-net-{chosen}.so", *stems] if chosen else stems
    )
    places = [place for place in environ.get("LD_LIBRARY_PATH", "").split(":") if place]
    return [Plugin(name, _find(name, [*places, *folders])) for name in names]


def _find(name: str, folders: Iterable[str]) -> str:
    paths = [name] if "/" in name else [os.path.join(folder, name) for folder in folders]
    return next((path for path in paths if os.path.exists(path)), "")


def network_chosen(log: str) -> str:
    """The transport that a start under NCCL_DEBUG=INFO chose, such as `Socket` or `IB`; '' if it does not say.

    With `Selected Provider is cxi` in the same log the provider is added.
    """
    chosen = re.findall(r"Using network (.+?)\s*$", log, re.MULTILINE)
    provider = re.findall(r"[Ss]elected [Pp]rovider is ([\w;-]+)", log)
    if not chosen:
        return ""
    return f"{chosen[-1]} ({provider[-1]})" if provider else str(chosen[-1])
