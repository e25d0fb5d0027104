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
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from slurm_ft import env, native
from slurm_ft.errors import UsageError
from slurm_ft.keeper.client import Client
from slurm_ft.keeper.protocol import Refused
from slurm_ft.train.kept import agree
from slurm_ft.train.kept.agree import NONE, Offer
from slurm_ft.train.kept.keep_live import KeepLive
from slurm_ft.train.kept.keep_snapshots import KeepSnapshots
from slurm_ft.train.kept.layout import digest
from slurm_ft.train.kept.memory import Damaged
from slurm_ft.train.kept.pace import Pace
from slurm_ft.train.kept.record import Unkeepable
from slurm_ft.train.kept.state import Part, Sources
from slurm_ft.train.progress import report_phase

logger = logging.getLogger(__name__)

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
        from slurm_ft.train.kept.torchft_sync import SyncPart, in_flight, outer_optimizers, sync_tensors

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
    kept = Kept(sources, wanted if environ.get(env.KEEPER) else frozenset(), place, pace, environ, name)
    if sync is not None:
        kept.in_flight = functools.partial(in_flight, sync)
    if manager is not None and kept.active:
        kept.watch(manager)
    return kept


class Kept:
    """A training's state in held memory. Made by `keep`."""

    def __init__(
        self,
        sources: Sources,
        modes: frozenset[str],
        place: str,
        pace: Pace,
        environ: Mapping[str, str],
        name: str = "",
    ) -> None:
        self._sources, self._place, self._environ, self._name = sources, place, environ, name
        self.in_flight: Callable[[], bool] = bool
        """Is a reduction under way, whose result would be lost with the process?"""
        self._client: Client | None = None
        self._live: KeepLive | None = None
        self._snapshots: KeepSnapshots | None = None
        self._why: list[str] = []
        self._transport: Any = None
        self.count = 0
        """Whole steps so far, those before a checkpoint that the script has loaded among them."""
        if modes:
            _in_use.add(place)
            self._connect(modes, pace)

    def _connect(self, modes: frozenset[str], pace: Pace) -> None:
        path = self._environ[env.KEEPER]
        try:
            self._client = Client.connect(path)
        except OSError as error:
            self._give_up(f"the keeper does not answer at {path}: {error.strerror or error}")
            return
        about = (self._sources, digest(self._sources.forms()), self._why)
        if agree.LIVE in modes:
            self._live = KeepLive(self._client, f"{self._place}.{agree.LIVE}", *about)
        if agree.SNAPSHOT in modes:
            self._snapshots = KeepSnapshots(self._client, f"{self._place}.{agree.SNAPSHOT}", *about, pace)

    @property
    def active(self) -> bool:
        """Is anything kept at all?"""
        return self._live is not None or self._snapshots is not None

    def _give_up(self, why: str) -> None:
        """Go on without. Tensors that lie in held memory stay there, marked as being written for good: no successor
        may take them for whole."""
        logger.warning("slurm-ft: nothing is kept from now on: %s", why)
        self._why.append(why)
        live, self._live, self._snapshots = self._live, None, None
        if live is not None:
            with contextlib.suppress(*FAILURES):
                live.begin()

    def watch(self, manager: Any) -> None:
        """A torchft Manager writes the state too, when it heals: while it receives (in place, with our transport) and
        when it hands over what it has received."""
        self._transport = manager._checkpoint_transport
        for owner, name in ((self._transport, "recv_checkpoint"), (manager, "_apply_pending_state_dict")):
            setattr(owner, name, after(self.begin, getattr(owner, name)))

    # --- restore ---------------------------------------------------------------------------------------------

    def restore(self, newer_than: int = -1) -> Restored:
        """Go on from the newest state that all ranks of this replica have, if it is above step `newer_than`.

        The process before is waited for: memory never has two writers.
        """
        if not self.active and not self._why:
            self.count = max(newer_than, 0)
            return Restored(NONE, self.count)  # no rank of this run keeps anything
        offers = self._offers()
        chosen = agree.choose(agree.exchange(offers, self._environ, self._name), newer_than)
        restored = self._take(agree.mine(offers, chosen)) if chosen else self._nothing(offers, newer_than)
        self.count = restored.step
        if self._snapshots is not None:
            if restored.source == NONE:
                self._snapshots.pass_over()
            self._snapshots.forget()
        if self._live is not None and restored.source != agree.LIVE:
            try:
                self._live.move_in()
            except FAILURES as error:
                self._give_up(str(error))
        return restored

    def _offers(self) -> list[Offer]:
        offers: list[Offer] = []
        try:
            for holder in (self._live, self._snapshots):
                offers += holder.find() if holder is not None else []
        except FAILURES as error:
            self._give_up(str(error))
            return []
        return offers

    def _nothing(self, offers: list[Offer], newer_than: int) -> Restored:
        why = "; ".join(self._why) if self._why or not offers else "no state that all ranks have is newer"
        logger.info("slurm-ft: nothing is restored from memory: %s", why)
        return Restored(NONE, max(newer_than, 0), why=why)

    def _take(self, offer: Offer) -> Restored:
        holder = self._live if offer.source == agree.LIVE else self._snapshots
        assert holder is not None
        self._sources.load_record(holder.take(offer)["sources"])
        report_phase("healed", source=offer.source, step=offer.step)
        logger.info("slurm-ft: goes on from %s memory at step %d", offer.source, offer.step)
        return Restored(offer.source, offer.step, offer.mark == PENDING, "; ".join(self._why))

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
        for holder in (self._snapshots, self._live):
            if holder is not None:
                holder.begin()

    def commit(self, step: int, pending: bool = False, snapshot: bool = False) -> None:
        """The state is whole again and is that of `step`. Never raises for what the keeper does.

        With `snapshot` one is taken now, whether it is due or not. One that is half a peer's, because a transfer
        broke, is not whole; nor is one while a reduction is under way.
        """
        self.count = step
        if not self.active or getattr(self._transport, "torn", False) or self.in_flight():
            return
        try:
            tensors = self._sources.tensors()
            record = {"step": step, "mark": PENDING if pending else SETTLED, "sources": self._sources.record()}
            if self._live is not None:
                self._live.commit(tensors, record)
            if self._snapshots is not None and not pending:
                self._snapshots.commit(tensors, record, snapshot)
        except FAILURES as error:
            self._give_up(str(error))

    # --- end -------------------------------------------------------------------------------------------------

    def close(self, drop: bool = True) -> None:
        """The training has ended: let the keeper give the memory back. The tensors stay as they are."""
        holders = [holder for holder in (self._live, self._snapshots) if holder is not None]
        self._live = self._snapshots = None
        for holder in holders:
            try:
                holder.close()
                if drop:
                    holder.drop()
            except FAILURES as error:
                logger.info("slurm-ft: %s", error)
        if self._client is not None:
            self._client.close()
            self._client = None
        _in_use.discard(self._place)


def after(first: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls both, and gives what the second gives."""

    @functools.wraps(then)
    def both(*args: Any, **named: Any) -> Any:
        first()
        return then(*args, **named)

    return both
