"""Keeps a training's tensors where they are trained, in a Live state at the keeper."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from slurm_ft import native
from slurm_ft.keeper.protocol import close_all
from slurm_ft.train.kept.agree import LIVE, Offer
from slurm_ft.train.kept.holder import ROOM, Holder, on_gpu, sharded
from slurm_ft.train.kept.layout import Entry, plan
from slurm_ft.train.kept.live import Live
from slurm_ft.train.kept.memory import Damaged
from slurm_ft.train.kept.record import encode
from slurm_ft.train.kept.snapshot import copy
from slurm_ft.train.kept.state import BUFFER, is_under, local, put_under

CARRIED = 1024
Tensors = Mapping[str, torch.Tensor]


class KeepLive(Holder):
    """The holder of the live state."""

    _live: Live | None = None
    _held = False
    _uses_gpu: bool | None = None

    def find(self) -> list[Offer]:
        """The state that the process before has left, if it is whole. Its memory is used again in any case."""
        descriptors = self.claim()
        if not descriptors:
            return []
        try:
            self._live = Live.adopt(descriptors, native.load)
        except Damaged as error:
            close_all(descriptors)
            self.why.append(f"live memory: {error}")
            return []
        self._held = True
        try:
            record = self._live.record()
        except Damaged as error:
            self.why.append(f"live memory: {error}")
            return []
        return [Offer(LIVE, int(record["step"]), str(record["mark"]))]

    def take(self, offer: Offer) -> dict[str, Any]:
        """Put the held memory under the tensors as it is; gives its record."""
        assert self._live is not None
        record = self._live.record()
        own = self.sources.tensors()
        for entry in self._live.entries:
            if entry.name in record["absent"]:
                continue
            view = self._live.views[entry.name]
            if entry.name.startswith(BUFFER):
                copy(local(own[entry.name]).detach(), view)
            elif entry.name in own:
                put_under(own[entry.name], view, copy=False)
            else:
                self.sources.make(entry, view)
        for name, value in record["carried"].items():
            if name in own:
                copy(local(own[name]).detach(), value)
            else:
                self.sources.make(Entry(name, "", (), (), 0, False), value)
        self.sources.moved()
        return record

    def move_in(self) -> None:
        """Put the tensors into held memory before the first forward pass: what remembers addresses sees no others."""
        tensors, carried = self._split(self.sources.tensors())
        room = len(encode(self.sources.record())) + sum(200 + 2 * tensor.nbytes for tensor in carried.values())
        self._arrange(tensors, room)

    def begin(self) -> None:
        """The tensors are being written from now on."""
        if self._live is not None:
            self._live.begin()

    def commit(self, tensors: Tensors, record: dict[str, Any]) -> None:
        """The tensors are whole, and this is their record."""
        tensors, carried = self._split(tensors)
        # Memory that is used again may hold what an earlier process had made and this one has not, or not yet.
        absent = sorted(self._live.views.keys() - tensors.keys()) if self._live is not None else []
        small = {"carried": {name: local(tensor) for name, tensor in carried.items()}, "absent": absent}
        data = encode(record | small)
        live = self._arrange(tensors, len(data))
        for name, tensor in tensors.items():
            if name.startswith(BUFFER):
                copy(live.views[name], local(tensor))
        live.commit(data)

    def close(self) -> None:
        """Let go of it. The tensors stay as they are."""
        if self._live is not None:
            self._live.close()
            self._live = None

    def _split(self, tensors: Tensors) -> tuple[Tensors, Tensors]:
        """(those that lie in held memory, those that go into the record). Of a training on a GPU, small tensors on
        the host are in the record: the host is ahead of the GPU, so they must be kept once for each step. Large
        ones (DiLoCo's parameters of the last synchronisation) change only when both wait for each other."""
        if self._uses_gpu is None:
            self._uses_gpu = any(on_gpu(tensor) for tensor in tensors.values())
        if not self._uses_gpu:
            return tensors, {}
        carried = {
            name: tensor
            for name, tensor in tensors.items()
            if not on_gpu(tensor) and local(tensor).nbytes <= CARRIED and not name.startswith(BUFFER)
        }
        return {name: tensor for name, tensor in tensors.items() if name not in carried}, carried

    def _arrange(self, tensors: Tensors, room: int) -> Live:
        """See to it that the tensors lie in held memory, and that it is held. Leaves it marked as being written."""
        if self._live is None or not self._live.memories[0].fits(room):
            old, self._live, self._held = self._live, self._new(tensors, room), False
            if old is not None:
                old.close()  # what lies in it stays until it has moved
        live = self._live
        live.begin()
        new = {name: tensor for name, tensor in tensors.items() if name not in live.views}
        if new:
            self._grow(live, new)
            self._held = False
        views = live.views
        away = [n for n, t in tensors.items() if not n.startswith(BUFFER) and not is_under(t, views[n])]
        for name in away:
            put_under(tensors[name], views[name], copy=True)
        if away:
            self.sources.moved()
            for name in away:
                if not is_under(tensors[name], views[name]):
                    raise Damaged(f"{name} does not stay in held memory (FSDP pads it): use --keeper snapshot")
        if not self._held:
            self.put(live.descriptors)
            self._held = True
        return live

    def _new(self, tensors: Tensors, room: int) -> Live:
        if shared := overlapping(tensors):
            raise Damaged(f"{shared[0]} and {shared[1]} share memory: use --keeper snapshot")
        if self._live is not None:
            self.drop()
        here = {name: tensor for name, tensor in tensors.items() if not on_gpu(tensor)}
        layout = plan({name: local(tensor) for name, tensor in here.items()}, sharded(here))
        return Live.create(self.client, layout, 2 * room + ROOM, on_gpu=len(here) < len(tensors))

    def _grow(self, live: Live, new: Tensors) -> None:
        """Room for more tensors: one memory on the host, and one on each GPU that has some."""
        plain = {name: local(tensor) for name, tensor in new.items()}
        places: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in plain.items():
            places.setdefault(tensor.get_device() if on_gpu(tensor) else -1, {})[name] = tensor
        for place, there in sorted(places.items()):
            shards = sharded(new) & there.keys()
            if place < 0:
                live.grow(self.client, there, shards)
            else:
                live.grow_on_device(self.client, native.load(), place, there, shards)


def overlapping(tensors: Tensors) -> tuple[str, str] | None:
    """Two tensors that share memory: put into held memory one by one they would be torn apart."""
    spans = []
    for name, tensor in tensors.items():
        own = local(tensor)
        if own.numel():
            last = sum((size - 1) * step for size, step in zip(own.shape, own.stride(), strict=True))
            spans.append((own.data_ptr(), own.data_ptr() + (last + 1) * own.element_size(), name))
    spans.sort()
    for (_, end, first), (begin, _, second) in itertools.pairwise(spans):
        if begin < end:
            return first, second
    return None
