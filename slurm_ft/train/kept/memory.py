"""A piece of held memory on the host: a memfd that the keeper has made, mapped here, with tensors as views of it.

    0       header: what this is, and where its parts are; written once
    64      the commit word: one aligned store of 8 bytes that makes a new state the valid one
    4096    a ring of records: the small part of a state (record.py), each with its number and checksum
            the layout, as JSON
            tensors (in slots, for snapshots)

A process that is killed has done a prefix of its stores, and all of a prefix is seen by who maps the memory later:
so what is written before the commit word is there when the commit word is. (That is no promise against a loss of
power, and none is needed: the memory would be gone too.)
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import zlib
from typing import Any, NamedTuple, Protocol

import torch

from slurm_ft.train.kept.layout import PAGE, Entry, Layout, up
from slurm_ft.train.kept.record import decode, dtype_of

MAGIC = b"SFTKEPT1"
FORMAT = 2
LIVE, SNAPSHOT, MORE, ON_DEVICE = 1, 2, 3, 4
_HEADER = struct.Struct("<8sII6Q")
_COMMIT_AT = 64
_RECORD = struct.Struct("<QQII")
"""Number, bytes, checksum of what follows, a filler."""


class Damaged(ValueError):
    """The memory is not what it should be; the words say how."""


class Maker(Protocol):
    """Whoever makes memory: the keeper's client."""

    def make(self, size: int) -> int:
        """A descriptor of new memory."""
        ...


class Parts(NamedTuple):
    """Where the parts of a memory begin, in bytes."""

    records: int
    capacity: int
    ring: int
    layout_at: int
    layout_bytes: int
    data: int

    @classmethod
    def of(cls, layout: bytes, capacity: int, ring: int) -> Parts:
        layout_at = PAGE + up(capacity, PAGE) * ring
        return cls(
            PAGE,
            up(capacity, PAGE) if ring else capacity,
            ring,
            layout_at,
            len(layout),
            layout_at + up(len(layout), PAGE),
        )


class Memory:
    """One memory, mapped. `kind` is LIVE, SNAPSHOT, MORE (tensors that a live state got later) or ON_DEVICE (the
    layout of what is in a GPU's memory; the capacity of its missing ring is the number of the GPU)."""

    def __init__(self, descriptor: int, kind: int, parts: Parts, layout: Layout, mapped: mmap.mmap) -> None:
        self.descriptor, self.kind, self.parts, self.layout = descriptor, kind, parts, layout
        self._map = mapped
        self._word = ctypes.c_uint64.from_buffer(mapped, _COMMIT_AT)

    @classmethod
    def create(
        cls, maker: Maker, kind: int, layout: Layout, capacity: int = 0, ring: int = 0, slots: int = 1
    ) -> Memory:
        """Have new memory made, and write its header. Raises what the maker raises."""
        text = layout.to_bytes()
        parts = Parts.of(text, capacity, ring)
        size = parts.data + slots * max(layout.size, PAGE)
        descriptor = maker.make(size)
        mapped = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        mapped[parts.layout_at : parts.layout_at + len(text)] = text
        _HEADER.pack_into(mapped, 0, MAGIC, FORMAT, kind, *parts)
        return cls(descriptor, kind, parts, layout, mapped)

    @classmethod
    def adopt(cls, descriptor: int, *kinds: int) -> Memory:
        """Map what another process has made. The descriptor is this object's from now on.

        Raises Damaged; the descriptor stays the caller's then.
        """
        size = os.fstat(descriptor).st_size
        if size < 2 * PAGE:
            raise Damaged(f"the memory has only {size} bytes")
        mapped = mmap.mmap(descriptor, size)
        magic, form, found, *rest = _HEADER.unpack_from(mapped, 0)
        parts = Parts(*rest)
        if magic != MAGIC or form != FORMAT or found not in kinds:
            raise Damaged("the memory is of another kind or of another version of slurm-ft")
        ends = (parts.records + parts.capacity * parts.ring, parts.layout_at + parts.layout_bytes, parts.data)
        if max(ends) > size:
            raise Damaged("the header is damaged")
        text = mapped[parts.layout_at : parts.layout_at + parts.layout_bytes]
        try:
            layout = Layout.from_bytes(text, 1 << 62 if found == ON_DEVICE else size - parts.data)
        except ValueError as error:
            raise Damaged(str(error)) from None
        return cls(descriptor, found, parts, layout, mapped)

    @property
    def size(self) -> int:
        return len(self._map)

    @property
    def slot_bytes(self) -> int:
        return max(self.layout.size, PAGE)

    # --- the commit word -------------------------------------------------------------------------------------

    @property
    def word(self) -> int:
        return int(self._word.value)

    @word.setter
    def word(self, value: int) -> None:
        self._word.value = value  # one store of 8 bytes, aligned

    # --- records ---------------------------------------------------------------------------------------------

    def fits(self, size: int) -> bool:
        """Is there room for a record of so many bytes?"""
        return _RECORD.size + size <= self.parts.capacity

    def write_record(self, number: int, data: bytes) -> None:
        """Into its place in the ring. The number is written last: a record with its number is whole."""
        at = self._record_at(number)
        self.forget_record(number)
        begin = at + _RECORD.size
        self._map[begin : begin + len(data)] = data
        _RECORD.pack_into(self._map, at, 0, len(data), zlib.crc32(data), 0)
        ctypes.c_uint64.from_buffer(self._map, at).value = number

    def forget_record(self, number: int) -> None:
        """What is in this number's place is no longer valid."""
        ctypes.c_uint64.from_buffer(self._map, self._record_at(number)).value = 0

    def read_record(self, number: int) -> Any:
        """Raises Damaged when the record is not there or not whole."""
        at = self._record_at(number)
        found, size, checksum, _ = _RECORD.unpack_from(self._map, at)
        if found != number or number == 0 or _RECORD.size + size > self.parts.capacity:
            raise Damaged(f"record {number} is not there")
        data = self._map[at + _RECORD.size : at + _RECORD.size + size]
        if zlib.crc32(data) != checksum:
            raise Damaged(f"record {number} is damaged")
        try:
            return decode(data)
        except ValueError as error:
            raise Damaged(f"record {number} is damaged: {error}") from None

    def _record_at(self, number: int) -> int:
        return self.parts.records + (number % self.parts.ring) * self.parts.capacity

    # --- tensors ---------------------------------------------------------------------------------------------

    def view(self, entry: Entry, slot: int = 0) -> torch.Tensor:
        """A tensor that is this part of the memory. It keeps the mapping alive, and has a storage of its own, so
        that who saves or sends it takes no more than it."""
        dtype = dtype_of(entry.dtype)
        if not entry.numel:
            return torch.empty(entry.shape, dtype=dtype)
        begin = self.parts.data + slot * self.slot_bytes + entry.offset
        flat = torch.frombuffer(self._map, dtype=dtype, count=entry.numel, offset=begin)
        return flat.as_strided(entry.shape, entry.stride)

    def slot(self, slot: int) -> memoryview:
        begin = self.parts.data + slot * self.slot_bytes
        return memoryview(self._map)[begin : begin + self.slot_bytes]

    def close(self) -> None:
        """Let go of the descriptor. The mapping lives as long as a view of it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
