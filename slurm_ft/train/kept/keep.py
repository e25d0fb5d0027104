"""`keep`: a training whose state outlives its process.

    kept = slurm_ft.train.keep(model=model, optimizer=optimizer)
    for step in range(kept.restore().step, steps):
        loss = ...; loss.backward()
        with kept.step():
            optimizer.step()
    kept.close()

Outside a run with a keeper all of it does nothing. `restore` gives the newest whole state that all ranks of the
replica have: the live tensors of the process before, or a snapshot. With neither, or with one that is not newer
than what the script has loaded from disk, it changes nothing and says why.

What is kept: parameters and buffers, optimizer states and settings, random states, and whatever `extra` holds
(objects with `state_dict` and `load_state_dict`: schedules, data loaders, counters). With torchft, `manager` and
`sync` (a DiLoCo or LocalSGD) belong to the state too: without them a restart between two synchronisations would
not be the same training.

Whoever writes parameters or optimizer states outside of `with kept.step()` must call `begin` before and `commit`
after. Buffers may be written at any time.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from slurm_ft import env, native
from slurm_ft.errors import UsageError
from slurm_ft.keeper.client import Client
from slurm_ft.keeper.protocol import Refused, close_all
from slurm_ft.train.kept import agree
from slurm_ft.train.kept.agree import NONE, Offer
from slurm_ft.train.kept.layout import Entry, digest, plan
from slurm_ft.train.kept.live import Live
from slurm_ft.train.kept.memory import FORMAT, SNAPSHOT, Damaged, Memory
from slurm_ft.train.kept.pace import Pace
from slurm_ft.train.kept.record import Unkeepable, encode
from slurm_ft.train.kept.snapshot import Kept as KeptSnapshot
from slurm_ft.train.kept.snapshot import Snapshots, copy, readable
from slurm_ft.train.kept.state import BUFFER, Part, Sources, is_under, local, put_under
from slurm_ft.train.progress import report_phase

logger = logging.getLogger(__name__)

CLAIM_WITHIN = 30.0
"""Seconds for which the process before is waited for. The agent starts a rank only when the one before is gone."""
ROOM = 64 * 1024
CARRIED = 1024
FAILURES = (OSError, Refused, Unkeepable, Damaged, native.NativeError)
"""What may go wrong with keeping; a training goes on without."""
SETTLED, PENDING = "settled", "pending"
_in_use: set[str] = set()


class Restored(NamedTuple):
    """What a training goes on from. `source` is `live`, `snapshot` or `none`; `step` counts whole steps.

    `pending` is True when the last thing done was an inner step whose synchronisation did not begin (only with
    `commit(..., pending=True)`). `why` says in words why there was nothing better.
    """

    source: str
    step: int
    pending: bool = False
    why: str = ""


def keep(
    model: torch.nn.Module | Iterable[torch.nn.Module],
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    extra: Mapping[str, Part] | None = None,
    tensors: Callable[[], Mapping[str, torch.Tensor]] = dict,
    manager: Any = None,
    sync: Any = None,
    mode: str | None = None,
    every: int | None = None,
    name: str = "",
    environ: Mapping[str, str] = os.environ,
) -> Kept:
    """A Kept for this training; see the module. The run's `--keeper` decides unless `mode` does.

    `every` is the number of steps between snapshots; by itself it is chosen so that they cost 2 % of the time.
    `tensors` gives further tensors by name. A process that keeps two trainings names them.
    Raises UsageError for a mode that is unknown, or for a name that is in use in this process.
    """
    modules = [model] if isinstance(model, torch.nn.Module) else list(model)
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    parts = dict(extra or {})
    if manager is not None:
        parts["torchft"] = manager
    if sync is not None:
        from slurm_ft.train.kept.torchft_sync import SyncPart, outer_optimizers, sync_tensors

        parts["sync"] = SyncPart(sync)
        optimizers += outer_optimizers(sync)
        tensors = sync_tensors(sync, tensors)
    chosen = (environ.get(env.KEEPER_MODE) or "off") if mode is None else mode
    wanted = env.KEEPER_MODES.get(chosen)
    if wanted is None:
        raise UsageError(f"the keeper's mode {chosen!r} is unknown", f"use {', '.join(env.KEEPER_MODES)}")
    replica, rank = environ.get(env.REPLICA, "0"), environ.get("RANK", "0")
    place = ".".join(filter(None, (f"{replica}-{rank}", name)))
    if place in _in_use:
        raise UsageError(f"two states of this process are kept as {place}", "give them names: keep(name=...)")
    sources = Sources(modules, optimizers, tensors, parts)
    pace = Pace(every, int(environ.get("WORLD_SIZE", "1")))
    return Kept(sources, wanted if environ.get(env.KEEPER) else frozenset(), place, pace, environ)


class Kept:
    """A training's state in held memory. Made by `keep`."""

    def __init__(
        self, sources: Sources, modes: frozenset[str], place: str, pace: Pace, environ: Mapping[str, str]
    ) -> None:
        self._sources, self._modes, self._place, self._pace, self._environ = sources, modes, place, pace, environ
        self._client: Client | None = None
        self._live: Live | None = None
        self._snapshots: Snapshots | None = None
        self._found: list[KeptSnapshot] = []
        self._why: list[str] = []
        self._held = False
        self.count = 0
        """Whole steps so far."""
        self._digest = digest(sources.forms()) if modes else ""
        self._uses_gpu = bool(modes) and any(on_gpu(tensor) for tensor in sources.given().values())
        if modes:
            _in_use.add(place)
            self._connect()

    @property
    def active(self) -> bool:
        """Is anything kept at all?"""
        return bool(self._modes)

    def _connect(self) -> None:
        path = self._environ[env.KEEPER]
        try:
            self._client = Client.connect(path)
        except OSError as error:
            self._give_up(f"the keeper does not answer at {path}: {error.strerror or error}")

    def _give_up(self, why: str) -> None:
        """Go on without. Tensors that lie in held memory stay there; they are as good as any."""
        logger.warning("slurm-ft: nothing is kept from now on: %s", why)
        self._why.append(why)
        self._modes = frozenset()
        self._live = self._snapshots = None

    # --- restore ---------------------------------------------------------------------------------------------

    def restore(self, newer_than: int = -1) -> Restored:
        """Go on from the newest state that all ranks of this replica have, if it is above step `newer_than`.

        The process before is waited for: memory never has two writers.
        """
        offers = self._offers() if self.active else []
        if not self.active and int(self._environ.get("WORLD_SIZE", "1")) > 1 and not self._why:
            return Restored(NONE, 0)  # no rank of this run keeps anything
        chosen = agree.choose(agree.exchange(offers, self._environ), newer_than)
        restored = self._apply(chosen, offers, newer_than)
        self._found = []
        if agree.LIVE in self._modes and restored.source != agree.LIVE:
            self._move_in()
        return restored

    def _move_in(self) -> None:
        """Put the tensors into held memory before the first forward pass: what remembers addresses sees no others."""
        try:
            tensors = self._sources.tensors()
            carried = carried_in_record(tensors) if self._uses_gpu else {}
            room = len(encode(self._sources.record())) + sum(200 + 2 * t.nbytes for t in carried.values())
            self._arrange({name: tensor for name, tensor in tensors.items() if name not in carried}, room)
        except FAILURES as error:
            self._give_up(str(error))

    def _apply(self, chosen: Offer | None, offers: list[Offer], newer_than: int) -> Restored:
        if chosen is None:
            why = "; ".join(self._why) if self._why or not offers else "no state that all ranks have is newer"
            if self.active and why:
                logger.info("slurm-ft: nothing is restored from memory: %s", why)
            return Restored(NONE, max(newer_than, 0), why=why)
        offer = agree.mine(offers, chosen)
        record = self._take_live() if offer.source == agree.LIVE else self._take_snapshot(offer)
        self._sources.load_record(record["sources"])
        self.count = offer.step
        report_phase("healed", source=offer.source, step=offer.step)
        logger.info("slurm-ft: goes on from %s memory at step %d", offer.source, offer.step)
        return Restored(offer.source, offer.step, offer.mark == PENDING, "; ".join(self._why))

    def _offers(self) -> list[Offer]:
        assert self._client is not None
        offers: list[Offer] = []
        try:
            if agree.LIVE in self._modes:
                offers += self._find_live()
            if agree.SNAPSHOT in self._modes:
                offers += self._find_snapshots()
        except (OSError, Refused) as error:
            self._give_up(str(error))
            return []
        return offers

    def _claim(self, source: str) -> list[int]:
        """The descriptors of what is held for us; none when there is nothing of use."""
        assert self._client is not None
        found = self._client.get(f"{self._place}.{source}", claim=True, wait=CLAIM_WITHIN)
        if found is None:
            self._why.append(f"no {source} state is held")
            return []
        wait_for_gpu_teardown(found.owner)
        if found.meta.get("format") == FORMAT and found.meta.get("digest") == self._digest:
            return found.descriptors
        close_all(found.descriptors)
        self._why.append(f"the {source} state that is held is of another model or another version of slurm-ft")
        self._client.drop(f"{self._place}.{source}")
        return []

    def _find_live(self) -> list[Offer]:
        descriptors = self._claim(agree.LIVE)
        if not descriptors:
            return []
        try:
            self._live = Live.adopt(descriptors, native.load)
        except Damaged as error:
            close_all(descriptors)
            self._why.append(f"live memory: {error}")
            return []
        self._held = True
        try:
            record = self._live.record()
        except Damaged as error:
            self._why.append(f"live memory: {error}")
            return []
        return [Offer(agree.LIVE, int(record["step"]), str(record["mark"]))]

    def _find_snapshots(self) -> list[Offer]:
        descriptors = self._claim(agree.SNAPSHOT)
        if not descriptors:
            return []
        try:
            memory = Memory.adopt(descriptors[0], SNAPSHOT)
        except Damaged as error:
            close_all(descriptors)
            self._why.append(f"snapshot: {error}")
            return []
        self._snapshots = Snapshots(memory)
        self._found = readable(memory)
        if not self._found:
            self._why.append("no snapshot is whole")
        return [Offer(agree.SNAPSHOT, int(s.record["step"]), str(s.record["mark"])) for s in self._found]

    def _take_live(self) -> dict[str, Any]:
        """Put the held memory under the tensors as it is."""
        assert self._live is not None
        record = self._live.record()
        own = self._sources.tensors()
        for entry in self._live.entries:
            view = self._live.views[entry.name]
            if entry.name.startswith(BUFFER):
                copy(local(own[entry.name]).detach(), view)
            elif entry.name in own:
                put_under(own[entry.name], view, copy=False)
            else:
                self._sources.make(entry, view)
        for name, value in record["carried"].items():
            if name in own:
                copy(local(own[name]).detach(), value)
            else:
                self._sources.make(Entry(name, "", (), (), 0, False), value)
        self._sources.moved()
        return record

    def _take_snapshot(self, offer: Offer) -> dict[str, Any]:
        chosen = next(s for s in self._found if (s.record["step"], s.record["mark"]) == (offer.step, offer.mark))
        own, kept = self._sources.tensors(), chosen.tensors()
        for entry in chosen.memory.layout.entries:
            if entry.name in own:
                copy(local(own[entry.name]).detach(), kept[entry.name])
            else:
                self._sources.make(entry, kept[entry.name].clone())
        return chosen.record

    # --- steps -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around whatever writes the state, such as `optimizer.step()`: one more whole step when it is left.

        When it is left by an exception the state is not whole, and is not used by a successor.
        """
        self.begin()
        yield
        self.commit(self.count + 1)

    def begin(self) -> None:
        """From now on the state is being written. May be called more than once."""
        if self._snapshots is not None:
            self._snapshots.wait_copied()
        if self._live is not None:
            self._live.begin()

    def commit(self, step: int, pending: bool = False, snapshot: bool = False) -> None:
        """The state is whole again and is that of `step`. Never raises for what the keeper does.

        With `snapshot` one is taken now, whether it is due or not.
        """
        self.count = step
        if not self.active:
            return
        record = {"step": step, "mark": PENDING if pending else SETTLED}
        try:
            tensors = self._sources.tensors()
            record["sources"] = self._sources.record()
            if agree.LIVE in self._modes:
                self._commit_live(tensors, record)
            self._pace.stepped(time.monotonic())
            due = snapshot or self._pace.due(step) or self._snapshots is None
            if agree.SNAPSHOT in self._modes and due and not pending:
                self._take(tensors, record)
        except FAILURES as error:
            self._give_up(str(error))

    def _commit_live(self, tensors: Mapping[str, torch.Tensor], record: dict[str, Any]) -> None:
        carried = carried_in_record(tensors) if self._uses_gpu else {}
        tensors = {name: tensor for name, tensor in tensors.items() if name not in carried}
        data = encode(record | {"carried": {name: local(tensor) for name, tensor in carried.items()}})
        live = self._arrange(tensors, len(data))
        for name, tensor in tensors.items():
            if name.startswith(BUFFER):
                copy(live.views[name], local(tensor))
        live.commit(data)

    def _arrange(self, tensors: Mapping[str, torch.Tensor], room: int) -> Live:
        """See to it that the tensors lie in held memory, and that it is held. Leaves it marked as being written."""
        assert self._client is not None
        if self._live is None or not self._live.memories[0].fits(room):
            self._live, self._held = self._new_live(tensors, room), False
        live = self._live
        live.begin()
        new = {name: tensor for name, tensor in tensors.items() if name not in live.views}
        if new:
            self._grow(live, new)
            self._held = False
        away = {name: tensor for name, tensor in tensors.items() if not name.startswith(BUFFER)}
        away = {name: tensor for name, tensor in away.items() if not is_under(tensor, live.views[name])}
        for name, tensor in away.items():
            put_under(tensor, live.views[name], copy=True)
        if away:
            self._sources.moved()
            for name, tensor in away.items():
                if not is_under(tensor, live.views[name]):
                    raise Damaged(f"{name} does not stay in held memory (FSDP pads it): use --keeper snapshot")
        if not self._held:
            self._client.put(f"{self._place}.{agree.LIVE}", self._meta(), live.descriptors)
            self._held = True
        return live

    def _grow(self, live: Live, new: Mapping[str, torch.Tensor]) -> None:
        assert self._client is not None
        plain = {name: local(tensor) for name, tensor in new.items()}
        places = {tensor.get_device() if on_gpu(tensor) else -1 for tensor in plain.values()}
        for place in sorted(places):
            there = {n: t for n, t in plain.items() if (t.get_device() if on_gpu(t) else -1) == place}
            shards = sharded(new) & there.keys()
            if place < 0:
                live.grow(self._client, there, shards)
            else:
                live.grow_on_device(self._client, native.load(), place, there, shards)

    def _new_live(self, tensors: Mapping[str, torch.Tensor], room: int) -> Live:
        assert self._client is not None
        if shared := overlapping(tensors):
            raise Damaged(f"{shared[0]} and {shared[1]} share memory: use --keeper snapshot")
        if self._live is not None:
            self._client.drop(f"{self._place}.{agree.LIVE}")
        here = {name: tensor for name, tensor in tensors.items() if not on_gpu(tensor)}
        layout = plan({name: local(tensor) for name, tensor in here.items()}, sharded(here))
        return Live.create(self._client, layout, 2 * room + ROOM, on_gpu=len(here) < len(tensors))

    def _take(self, tensors: Mapping[str, torch.Tensor], record: dict[str, Any]) -> None:
        """Begin a snapshot. The first one, and one of a state that has changed its form, is waited for."""
        assert self._client is not None
        plain = {
            name: local(tensor).clone() if name.startswith(BUFFER) else local(tensor)
            for name, tensor in tensors.items()
        }
        if self._snapshots is not None:
            self._snapshots.finish()
            self._pace.cost(self._snapshots.seconds)
            entries = self._snapshots.memory.layout.entries
            if [entry.form for entry in entries] == [entry.form for entry in plan(plain).entries]:
                self._snapshots.take(plain, record)
                return
        layout = plan(plain, sharded(tensors))
        self._snapshots = Snapshots.create(self._client, layout, 2 * len(encode(record)) + ROOM)
        self._snapshots.take(plain, record, wait=True)
        self._client.put(f"{self._place}.{agree.SNAPSHOT}", self._meta(), [self._snapshots.memory.descriptor])

    def _meta(self) -> dict[str, Any]:
        return {"format": FORMAT, "digest": self._digest}

    # --- end -------------------------------------------------------------------------------------------------

    def close(self, drop: bool = True) -> None:
        """The training has ended: let the keeper give the memory back. The tensors stay as they are."""
        try:
            if self._snapshots is not None:
                self._snapshots.finish()
            if self._client is not None and drop:
                for source in self._modes:
                    with contextlib.suppress(Refused):
                        self._client.drop(f"{self._place}.{source}")
        except (OSError, Damaged) as error:
            logger.info("slurm-ft: %s", error)
        finally:
            if self._client is not None:
                self._client.close()
            for held in (self._live, self._snapshots.memory if self._snapshots else None):
                if held is not None:
                    held.close()
            self._client = self._live = self._snapshots = None
            self._modes = frozenset()
            _in_use.discard(self._place)


def on_gpu(tensor: torch.Tensor) -> bool:
    return bool(local(tensor).device.type == "cuda")


def carried_in_record(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of a training on a GPU, the small tensors that are on the host: the host is ahead of the GPU, so they must be
    kept once for each step. Large ones (DiLoCo's parameters of the last synchronisation) change only when both wait
    for each other, and are kept as they are."""
    return {
        n: t for n, t in tensors.items() if not on_gpu(t) and local(t).nbytes <= CARRIED and not n.startswith(BUFFER)
    }


def sharded(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    return {name for name, tensor in tensors.items() if isinstance(tensor, DTensor)}


def overlapping(tensors: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
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


def wait_for_gpu_teardown(pid: int, within: float = 10.0) -> None:
    """On ROCm: until the kernel has taken the queues of a process that ended from the GPU, which it does by itself
    some time after. Until then work of the dead process may still write. Unproven on hardware."""
    deadline = time.monotonic() + within
    while os.path.exists(f"/sys/class/kfd/kfd/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.01)
