"""Where each tensor lies in a held memory: names, types, shapes, offsets. Pure arithmetic.

A layout is written into the memory that it describes, and its digest tells at a look whether a restarted rank has
the same model.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from slurm_ft.train.kept.record import dtype_of

ALIGNMENT = 64
"""Bytes: a cache line, and more than any type or vector instruction needs."""
PAGE = 4096


class Entry(NamedTuple):
    """One tensor. `offset` counts from where the tensors begin; `sharded` says that it is a DTensor's own shard."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    sharded: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        return self.numel * int(dtype_of(self.dtype).itemsize)

    @property
    def form(self) -> tuple[str, str, tuple[int, ...]]:
        return self.name, self.dtype, self.shape


class Layout(NamedTuple):
    """The tensors of one memory, in their order."""

    entries: tuple[Entry, ...]

    @property
    def size(self) -> int:
        return up(max((entry.offset + entry.size for entry in self.entries), default=0), PAGE)

    def to_bytes(self) -> bytes:
        return json.dumps([list(entry) for entry in self.entries], separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(data: bytes, room: int) -> Layout:
        """Raises ValueError for a layout that is damaged or does not lie within `room` bytes."""
        try:
            entries = tuple(
                Entry(str(n), str(d), tuple(map(int, s)), tuple(map(int, t)), int(o), bool(x))
                for n, d, s, t, o, x in json.loads(data)
            )
        except (ValueError, TypeError) as error:
            raise ValueError(f"the layout is damaged: {error}") from None
        for entry in entries:
            if entry.offset < 0 or entry.offset % ALIGNMENT or min((*entry.shape, *entry.stride), default=0) < 0:
                raise ValueError(f"the layout is damaged at {entry.name}")
            if entry.offset + entry.size > room or entry.stride != dense_stride(entry.shape, entry.stride):
                raise ValueError(f"the layout is damaged at {entry.name}")
        return Layout(entries)


def plan(tensors: Mapping[str, torch.Tensor], sharded: Iterable[str] = ()) -> Layout:
    """A place for each tensor, one after the other."""
    shards, entries, offset = set(sharded), [], 0
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        stride = dense_stride(shape, tuple(tensor.stride()))
        entry = Entry(name, str(tensor.dtype).removeprefix("torch."), shape, stride, offset, name in shards)
        entries.append(entry)
        offset = up(offset + entry.size, ALIGNMENT)
    return Layout(tuple(entries))


def digest(forms: Iterable[tuple[str, str, Sequence[int]]], also: str = "") -> str:
    """What two states must have in common for one to be put in the other's place."""
    text = json.dumps([[also], *([name, dtype, list(shape)] for name, dtype, shape in forms)])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def dense_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The strides, if the elements lie without gaps or overlaps in some order of the dimensions; those of a plain
    row-major tensor otherwise."""
    expected = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda pair: (pair[1], pair[0])):
        if size != 1:
            if step != expected:
                return _row_major(shape)
            expected *= size
    return tuple(stride) if expected == math.prod(shape) else _row_major(shape)


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))


def up(value: int, to: int) -> int:
    """The next multiple."""
    return -(-value // to) * to
