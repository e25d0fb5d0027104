"""The live state: the very tensors that are trained are views of held memory, so a restart copies nothing.

The commit word of the first memory says what the tensors hold: twice the number of the last record, and 1 more
while they are being written. `begin` marks them so, `commit` writes the record (step, RNG, settings: record.py)
beside the one before and then says that all is whole, in one store. A process that is killed between the two has
left a state of which nothing can be known: it is not used.

Tensors that come up later (an optimizer makes its state in its first step) get a further memory; all memories of
a state are held under one name and replaced together.

On a GPU (device.py) the tensors are in its memory, and a word there, set in stream order, takes the place of the
commit word.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from slurm_ft.native import Library, NativeError
from slurm_ft.train.kept import device
from slurm_ft.train.kept.device import DeviceMemory
from slurm_ft.train.kept.layout import Entry, Layout, plan
from slurm_ft.train.kept.memory import LIVE, MORE, ON_DEVICE, Damaged, Maker, Memory
from slurm_ft.train.kept.record import encode

RING = 2

FindLibrary = Callable[[], Library]
"""Gives the native library of the GPU; asked only when there is something on a GPU."""


class Live:
    """The memories of one live state, first the one with the records.

    `devices` are in the order of the ON_DEVICE memories, which hold the layouts of what is on the GPU.
    """

    def __init__(self, memories: list[Memory], devices: list[DeviceMemory], exported: list[int]) -> None:
        self.memories, self.devices = memories, devices
        self._exported = exported
        self.views = {entry.name: m.view(entry) for m in memories if m.kind != ON_DEVICE for entry in m.layout.entries}
        self.views |= {entry.name: d.view(entry) for d in devices for entry in d.layout.entries}

    @classmethod
    def create(cls, maker: Maker, layout: Layout, capacity: int, on_gpu: bool = False) -> Live:
        """New memory, not valid yet."""
        memory = Memory.create(maker, LIVE, layout, capacity, device.RING if on_gpu else RING)
        memory.word = 1
        return cls([memory], [], [])

    @classmethod
    def adopt(cls, descriptors: list[int], library: FindLibrary | None = None) -> Live:
        """Map what was held. Takes the descriptors over. Raises Damaged; they stay the caller's then."""
        if not descriptors:
            raise Damaged("no memory is held")
        memories, devices, exported = [Memory.adopt(descriptors[0], LIVE)], [], []
        rest = descriptors[1:]
        while rest:
            memories.append(Memory.adopt(rest[0], MORE, ON_DEVICE))
            rest = rest[1:]
            if memories[-1].kind == ON_DEVICE:
                if not rest or library is None:
                    raise Damaged("the memory of a GPU is missing")
                devices.append(_adopt_device(library, rest[0], memories[-1]))
                exported.append(rest[0])
                rest = rest[1:]
        return cls(memories, devices, exported)

    @property
    def entries(self) -> list[Entry]:
        return [entry for memory in self.memories for entry in memory.layout.entries]

    @property
    def size(self) -> int:
        return sum(memory.size for memory in self.memories) + sum(d.memory.reserved for d in self.devices)

    @property
    def descriptors(self) -> list[int]:
        """In the order in which `adopt` takes them."""
        found, exported = [], iter(self._exported)
        for memory in self.memories:
            found.append(memory.descriptor)
            if memory.kind == ON_DEVICE:
                found.append(next(exported))
        return found

    @property
    def number(self) -> int:
        """Of the record that belongs to the tensors. Raises Damaged when a write was under way."""
        words = {self.memories[0].word} if not self.devices else {part.word for part in self.devices}
        word = max(words)
        if word & 1 or len(words) > 1:
            raise Damaged("its process was killed while an optimizer step was under way")
        return word >> 1

    def begin(self) -> None:
        """From now on the tensors are being written."""
        first = self.memories[0]
        first.word |= 1
        for part in self.devices:
            part.mark(first.word, _stream(part))

    def commit(self, record: dict[str, Any] | bytes) -> bool:
        """The tensors are whole again, and this is their record. False when the record does not fit."""
        first = self.memories[0]
        data = record if isinstance(record, bytes) else encode(record)
        if not first.fits(len(data)):
            return False
        number = (first.word >> 1) + 1
        first.write_record(number, data)
        first.word = number << 1
        for part in self.devices:
            part.mark(first.word, _stream(part))
        return True

    def record(self) -> dict[str, Any]:
        """The record of the state as it is. Raises Damaged when a write was under way, or never was finished."""
        found: dict[str, Any] = self.memories[0].read_record(self.number)
        return found

    def grow(self, maker: Maker, tensors: Mapping[str, torch.Tensor], sharded: set[str]) -> None:
        """Room for tensors that came up later."""
        memory = Memory.create(maker, MORE, plan(tensors, sharded))
        self.memories.append(memory)
        self.views |= {entry.name: memory.view(entry) for entry in memory.layout.entries}

    def grow_on_device(
        self, maker: Maker, library: Library, index: int, tensors: Mapping[str, torch.Tensor], sharded: set[str]
    ) -> None:
        """Room on GPU `index` for tensors that are there. Raises NativeError when it has none."""
        layout = plan(tensors, sharded)
        part = DeviceMemory.create(library, layout, index)
        self.memories.append(Memory.create(maker, ON_DEVICE, layout, capacity=index, slots=0))
        self.devices.append(part)
        self._exported.append(part.memory.export())
        self.views |= {entry.name: part.view(entry) for entry in layout.entries}

    def close(self) -> None:
        for memory in self.memories:
            memory.close()
        for descriptor in self._exported:
            os.close(descriptor)
        self._exported.clear()


def _adopt_device(library: FindLibrary, descriptor: int, memory: Memory) -> DeviceMemory:
    try:
        return DeviceMemory.adopt(library(), descriptor, memory.layout, memory.parts.capacity)
    except NativeError as error:
        raise Damaged(f"the memory of the GPU cannot be mapped: {error}") from None


def _stream(part: DeviceMemory) -> int:
    """The stream that the training uses now; 0 on the host."""
    if part.memory.library.platform == "host":
        return 0
    return int(torch.cuda.current_stream(part.memory.device).cuda_stream)
