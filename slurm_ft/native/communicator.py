"""Collectives that can be aborted, with one life cycle on all platforms.

    create -> (ready) -> wait -> all_reduce/broadcast -> wait -> ... -> close
                                       |
                                  PeerLost, TimedOut -> abort -> close, then another communicator with a new id,
                                                        or shrink instead of abort where the library has it

`create` and the operations return at once; `wait` has a time limit, so nothing blocks for ever. A communicator holds
the buffers of running operations until it is known that they are finished. `abort` may be called from another thread.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Collection
from types import TracebackType
from typing import Any, Self

from slurm_ft.native.buffers import REDUCTIONS, TYPES, region_of
from slurm_ft.native.errors import InvalidUse, Status
from slurm_ft.native.library import Library

ID_BYTES = 128
PATIENCE = 10.0


def unique_id(library: Library) -> bytes:
    """A new group's id: one rank makes it and passes it to the others. RCCL wants a device for it."""
    raw = (ctypes.c_ubyte * ID_BYTES)()
    library.call("sft_comm_id", raw)
    return bytes(raw)


class Communicator:
    """This rank's seat in a group."""

    def __init__(self, library: Library, handle: int) -> None:
        self.library = library
        self._handle = handle
        self._held: list[Any] = []
        self._closer = weakref.finalize(self, _close, library, handle, os.getpid(), self._held)
        self._closer.atexit = False

    @classmethod
    def create(cls, library: Library, group: bytes, rank: int, ranks: int, device: int = 0) -> Self:
        """Take a seat; `wait` until all have."""
        if len(group) != ID_BYTES:
            raise InvalidUse(f"an id has {ID_BYTES} bytes, not {len(group)}", Status.INVALID)
        handle = ctypes.c_uint64()
        library.call("sft_comm_create", device, group, _number(rank), _number(ranks), ctypes.byref(handle))
        return cls(library, handle.value)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._closer.alive:
            self.close(PATIENCE if error is None else 0.0)

    def ready(self) -> bool:
        """False while something runs; raises what went wrong."""
        return self.library.call("sft_comm_state", self._handle) is Status.OK

    def wait(self, seconds: float = PATIENCE) -> None:
        """Until all that was started is finished. `TimedOut` leaves it running."""
        self.library.call("sft_comm_wait", self._handle, _milliseconds(seconds))
        self._held.clear()

    def all_reduce(self, data: Any, out: Any = None, reduction: str = "sum", stream: int = 0) -> None:
        """Start the reduction of `data` over all ranks, into `out` or in place."""
        source = region_of(data)
        target = source if out is None else region_of(out)
        if (source.length, source.dtype) != (target.length, target.dtype):
            raise InvalidUse("data and out differ in type or size", Status.INVALID)
        if reduction not in REDUCTIONS:
            raise InvalidUse(f"no reduction {reduction}; there are {', '.join(REDUCTIONS)}", Status.INVALID)
        kind = TYPES[source.dtype][0]
        arguments = (source.address, target.address, source.length, kind, REDUCTIONS[reduction], stream)
        self._start("sft_comm_all_reduce", arguments, (source, target))

    def broadcast(self, data: Any, root: int = 0, stream: int = 0) -> None:
        """Start the copy of root's `data` into that of all others."""
        target = region_of(data)
        kind = TYPES[target.dtype][0]
        self._start("sft_comm_broadcast", (target.address, target.length, kind, _number(root), stream), (target,))

    def split(self, colour: int, key: int = 0) -> Communicator | None:
        """All ranks call it. Those of one colour get a communicator, ordered by key; -1 gets none."""
        child = ctypes.c_uint64()
        self.library.call("sft_comm_split", self._handle, _number(colour), _number(key), ctypes.byref(child))
        return Communicator(self.library, child.value) if child.value else None

    def shrink(self, excluded: Collection[int]) -> Communicator:
        """All but `excluded` call it, also after an error. Their order stays."""
        ranks = (ctypes.c_int * max(len(excluded), 1))(*(_number(rank) for rank in excluded))
        child = ctypes.c_uint64()
        self.library.call("sft_comm_shrink", self._handle, ranks, len(excluded), ctypes.byref(child))
        return Communicator(self.library, child.value)

    def abort(self, seconds: float = PATIENCE) -> None:
        """End what runs, here; peers that wait for this rank get an error.

        `TimedOut` means that the vendor's library hangs in its own abort: the process has to end.
        """
        self.library.call("sft_comm_abort", self._handle, _milliseconds(seconds))

    def close(self, seconds: float = PATIENCE) -> None:
        """Finish and leave; what takes longer is aborted. A second close is an error."""
        self._closer.detach()
        try:
            self.library.call("sft_comm_close", self._handle, _milliseconds(seconds))
        finally:
            self._held.clear()

    def _start(self, name: str, arguments: tuple[int, ...], held: tuple[Any, ...]) -> None:
        self._held.extend(held)
        self.library.call(name, self._handle, *arguments)


def _number(value: int) -> int:
    if not -(1 << 31) <= value < 1 << 31:
        raise InvalidUse(f"{value} is out of range", Status.INVALID)
    return value


def _milliseconds(seconds: float) -> int:
    if not 0 <= seconds < 1e6:
        raise InvalidUse(f"a time of {seconds} s", Status.INVALID)
    return round(seconds * 1000)


def _close(library: Library, handle: int, owner: int, held: list[Any]) -> None:
    """For an object that nobody closed: abort, and only then let go of the buffers."""
    if os.getpid() == owner:
        library.call("sft_comm_close", handle, 0)
    held.clear()
