"""The live state: the very tensors that are trained are views of held memory, so a restart copies nothing.

The commit word of the first memory says what the tensors hold: twice the number of the last record, and 1 more
while they are being written. `begin` marks them so, `commit` writes the record (step, RNG, settings: record.py)
beside the one before and then says that all is whole, in one store. A process that is killed between the two has
left a state of which nothing can be known: it is not used.

Tensors that come up later (an optimizer makes its state in its first step) get a further memory; all memories of
a state are held under one name and replaced together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slurm_ft.train.kept.layout import Entry, Layout, plan
from slurm_ft.train.kept.memory import LIVE, MORE, Damaged, Maker, Memory
from slurm_ft.train.kept.record import encode

RING = 2


class Live:
    """The memories of one live state, first the one with the records."""

    def __init__(self, memories: list[Memory]) -> None:
        self.memories = memories
        self.views = {entry.name: memory.view(entry) for memory in self.memories for entry in memory.layout.entries}

    @classmethod
    def create(cls, maker: Maker, layout: Layout, capacity: int) -> Live:
        """New memory, not valid yet."""
        memory = Memory.create(maker, LIVE, layout, capacity, RING)
        memory.word = 1
        return cls([memory])

    @classmethod
    def adopt(cls, descriptors: list[int]) -> Live:
        """Map what was held. Takes the descriptors over. Raises Damaged; they stay the caller's then."""
        if not descriptors:
            raise Damaged("no memory is held")
        kinds = [LIVE, *[MORE] * (len(descriptors) - 1)]
        return cls([Memory.adopt(descriptor, kind) for descriptor, kind in zip(descriptors, kinds, strict=True)])

    @property
    def entries(self) -> list[Entry]:
        return [entry for memory in self.memories for entry in memory.layout.entries]

    @property
    def size(self) -> int:
        return sum(memory.size for memory in self.memories)

    @property
    def descriptors(self) -> list[int]:
        return [memory.descriptor for memory in self.memories]

    @property
    def clean(self) -> bool:
        return self.memories[0].word & 1 == 0

    def begin(self) -> None:
        """From now on the tensors are being written."""
        self.memories[0].word |= 1

    def commit(self, record: dict[str, Any] | bytes) -> bool:
        """The tensors are whole again, and this is their record. False when the record does not fit."""
        first = self.memories[0]
        data = record if isinstance(record, bytes) else encode(record)
        if not first.fits(len(data)):
            return False
        number = (first.word >> 1) + 1
        first.write_record(number, data)
        first.word = number << 1
        return True

    def record(self) -> dict[str, Any]:
        """The record of the state as it is. Raises Damaged when a write was under way, or never was finished."""
        if not self.clean:
            raise Damaged("its process was killed while an optimizer step was under way")
        found: dict[str, Any] = self.memories[0].read_record(self.memories[0].word >> 1)
        return found

    def grow(self, maker: Maker, tensors: Mapping[str, torch.Tensor], sharded: set[str]) -> None:
        """Room for tensors that came up later."""
        memory = Memory.create(maker, MORE, plan(tensors, sharded))
        self.memories.append(memory)
        self.views |= {entry.name: memory.view(entry) for entry in memory.layout.entries}

    def close(self) -> None:
        for memory in self.memories:
            memory.close()
