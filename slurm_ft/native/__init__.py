"""The Python face of `native/`: memory that outlives a rank, collectives that can be aborted, and probes.

Nothing is loaded when this is imported, and no library has to be there: `load()` raises `Unavailable` with the reason,
and `report()` says what there is. See docs/native.md.
"""

from __future__ import annotations

from slurm_ft.native.buffers import Region
from slurm_ft.native.communicator import Communicator, unique_id
from slurm_ft.native.errors import (
    Aborted,
    InvalidUse,
    NativeError,
    OutOfMemory,
    PeerLost,
    Status,
    TimedOut,
    Unavailable,
    Unsupported,
)
from slurm_ft.native.library import Feature, Library, Versions, built, load
from slurm_ft.native.memory import DmaBuf, Memory, dma_buf
from slurm_ft.native.report import Report, faults, report

__all__ = [
    "Aborted",
    "Communicator",
    "DmaBuf",
    "Feature",
    "InvalidUse",
    "Library",
    "Memory",
    "NativeError",
    "OutOfMemory",
    "PeerLost",
    "Region",
    "Report",
    "Status",
    "TimedOut",
    "Unavailable",
    "Unsupported",
    "Versions",
    "built",
    "dma_buf",
    "faults",
    "load",
    "report",
    "unique_id",
]
