"""Keeps copies of a training's state at the keeper, as often as they are due."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from slurm_ft.keeper.client import Client
from slurm_ft.keeper.protocol import close_all
from slurm_ft.train.kept.agree import SNAPSHOT, Offer
from slurm_ft.train.kept.holder import ROOM, Holder, sharded
from slurm_ft.train.kept.layout import plan
from slurm_ft.train.kept.memory import SNAPSHOT as KIND
from slurm_ft.train.kept.memory import Damaged, Memory
from slurm_ft.train.kept.pace import Pace
from slurm_ft.train.kept.record import encode
from slurm_ft.train.kept.snapshot import Kept, Snapshots, copy, readable
from slurm_ft.train.kept.state import BUFFER, Sources, local


class KeepSnapshots(Holder):
    """The holder of the snapshots."""

    def __init__(self, client: Client, name: str, sources: Sources, digest: str, why: list[str], pace: Pace) -> None:
        super().__init__(client, name, sources, digest, why)
        self.pace = pace
        self.snapshots: Snapshots | None = None
        self._found: list[Kept] = []

    def find(self) -> list[Offer]:
        """The whole snapshots that the process before has left."""
        descriptors = self.claim()
        if not descriptors:
            return []
        try:
            memory = Memory.adopt(descriptors[0], KIND)
        except Damaged as error:
            close_all(descriptors)
            self.why.append(f"snapshot: {error}")
            return []
        self.snapshots = Snapshots(memory)
        self._found = readable(memory, newest_only=self.pace.alone)  # ranks that must agree want a choice
        if not self._found:
            self.why.append("no snapshot is whole")
        return [Offer(SNAPSHOT, int(s.record["step"]), str(s.record["mark"])) for s in self._found]

    def take(self, offer: Offer) -> dict[str, Any]:
        """Copy this snapshot into the tensors, and forget one that is newer; gives its record."""
        chosen = next(s for s in self._found if (s.record["step"], s.record["mark"]) == (offer.step, offer.mark))
        own, kept = self.sources.tensors(), chosen.tensors()
        for entry in chosen.memory.layout.entries:
            if entry.name in own:
                copy(local(own[entry.name]).detach(), kept[entry.name])
            else:
                self.sources.make(entry, kept[entry.name].clone(), to_device=True)
        # The steps of a newer one are done again, and other ranks will have them as they were the second time. By this
        # one store nothing finds it any more, and the next snapshot goes where it is.
        chosen.memory.word = chosen.number
        return chosen.record

    def pass_over(self) -> None:
        """The training goes on from something else: what was found is of steps that may be done again by all ranks."""
        if self.snapshots is not None:
            self.snapshots.memory.word = 0

    def forget(self) -> None:
        """The list of what was found is no longer needed."""
        self._found = []

    def begin(self) -> None:
        """The tensors are about to be written: wait until they are copied."""
        if self.snapshots is not None:
            self.snapshots.wait_copied()

    def commit(self, tensors: Mapping[str, torch.Tensor], record: dict[str, Any], now: bool) -> None:
        """The tensors are whole: begin a snapshot if one is due, or asked for by `now`."""
        self.pace.stepped(time.monotonic())
        if now or self.pace.due(record["step"]) or self.snapshots is None:
            self._begin(tensors, record)

    def _begin(self, tensors: Mapping[str, torch.Tensor], record: dict[str, Any]) -> None:
        """The first one, and one of a state that has changed its form, is waited for."""
        plain = {n: local(t).clone() if n.startswith(BUFFER) else local(t) for n, t in tensors.items()}
        layout = plan(plain, sharded(tensors))
        if self.snapshots is not None:
            self.snapshots.finish()
            self.pace.cost(self.snapshots.seconds)
            if [e.form for e in self.snapshots.memory.layout.entries] == [e.form for e in layout.entries]:
                self.snapshots.take(plain, record)
                return
        old, self.snapshots = self.snapshots, Snapshots.create(self.client, layout, 2 * len(encode(record)) + ROOM)
        self.snapshots.take(plain, record, wait=True)
        self.put([self.snapshots.memory.descriptor])
        if old is not None:
            old.memory.close()

    def close(self) -> None:
        """Let go of it, once the snapshot under way is done."""
        if self.snapshots is not None:
            snapshots, self.snapshots = self.snapshots, None
            try:
                snapshots.finish()
            finally:
                snapshots.memory.close()
