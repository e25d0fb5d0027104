"""Saving when slurm-ft asks for it: before a time limit, a preemption or a stop, or because somebody wants it.

    from slurm_ft.train import on_save, last_save
    on_save(lambda step: write_checkpoint(step))      # called within the next report(step), in the same thread

or, in a loop of one's own,

    if save_requested():
        saved(step, path=write_checkpoint(step))

The ranks of one replica save in the same step. A request reaches them at different moments, so rank 0 alone
hears it: it writes into the replica's store (the one at MASTER_ADDR:MASTER_PORT) that all save two steps from
then, and the others look there once a step. That is enough where each step holds a collective of the replica: a
rank that is about to begin step n + 2 has seen rank 0 begin step n + 1. `save_requested` must therefore be
called in every step by every rank. In a replica of one rank, or without torch, there is no such look-up.

`saved.json` in the run folder names the complete saves; `last_save()` gives the newest one that is still there.
This file uses the standard library alone, as long as the program does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_ft.train import progress

STEPS_AHEAD = 2
"""How many steps after rank 0 has heard of it a replica of several ranks saves."""

ERROR_LETTERS = 2000
"""Of a failure's text, which may hold a traceback of each rank."""

Callback = Callable[[int], "str | os.PathLike[str] | None"]


@dataclass(frozen=True)
class LastSave:
    """A complete save of this run: the training step, where it is (if its writer said so), its time (epoch)."""

    step: int
    path: str
    t: float


class Saver:
    """The requests of this process, answered at most once each. `ranks` is the size of the replica."""

    def __init__(self, rank: int, ranks: int, store: Callable[[], Any] | None = None) -> None:
        self._rank, self._ranks, self._store_of = rank, ranks, store or _store
        self._heard = ""  # by the listening thread; the id of the newest request
        self._done: set[str] = set()
        self._current = ""
        self._polls = 0
        self._count = 0  # saves agreed upon with the other ranks
        self._target: tuple[str, int] | None = None
        self._store: Any = None
        self.callback: Callback | None = None

    def hear(self, command: Mapping[str, Any]) -> None:
        self._heard = str(command.get("id", ""))

    def due(self) -> bool:
        """Is it this rank's turn to save? To be asked once a step."""
        self._polls += 1
        self._current = self._agreed(self.waiting) if self._ranks > 1 else self.waiting
        return bool(self._current)

    def _agreed(self, heard: str) -> str:
        if self._store is None and self._store_of is not None:
            self._store = self._store_of()
        if self._store is None:
            return heard
        key = f"slurm_ft/save/{self._count}"
        try:
            if self._target is None and self._rank == 0 and heard:
                self._target = heard, self._polls + STEPS_AHEAD
                self._store.set(key, json.dumps(self._target))
            elif self._target is None and self._rank and self._store.check([key]):
                id, poll = json.loads(self._store.get(key))
                self._target = str(id), int(poll)
        except RuntimeError:  # torch's: the store went with rank 0, which has trained its last step
            return ""
        if self._target is None or self._polls < self._target[1]:
            return ""
        id, self._target, self._count = self._target[0], None, self._count + 1
        return id

    @property
    def waiting(self) -> str:
        """The request that has not been answered, or ''. For who agrees with the other ranks in a way of its own."""
        return self._heard if self._heard not in self._done else ""

    def take(self, id: str) -> None:
        """This rank is to answer this request now."""
        self._current = id

    def answer(self, step: int, path: str, wrote: bool, error: str) -> None:
        channel = progress.channel()
        if self._current and channel is not None:
            channel.send("saved", id=self._current, step=step, path=path, wrote=wrote, error=error[:ERROR_LETTERS])
        self._done.add(self._current)
        self._current = ""

    def at_step(self, step: int) -> None:
        """What `report(step)` does beyond reporting, once there is a callback."""
        if self.callback is None or not self.due():
            return
        try:
            path = self.callback(step)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as failure:  # torch's CheckpointException is no Exception
            traceback.print_exc()  # what cannot be saved must not end what can be trained
            self.answer(step, "", False, f"{type(failure).__name__}: {failure}")
            return
        self.answer(step, os.fspath(path) if isinstance(path, (str, os.PathLike)) else "", True, "")


def _store() -> Any:
    """A client of the replica's store, or None where the program has no torch."""
    torch = sys.modules.get("torch.distributed")
    if torch is None or not os.environ.get("MASTER_PORT"):
        return None
    with contextlib.suppress(Exception):
        return torch.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return None


_saver: Saver | None = None


def saver() -> Saver | None:
    """This rank's saver, known to the agent from now on; None outside a slurm-ft rank."""
    global _saver
    channel = progress.channel()
    if channel is None:
        return None
    if _saver is None:
        _saver = Saver(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
        progress.COMMANDS["save"] = _saver.hear
        channel.send("can_save")
    return _saver


def _forget_after_fork() -> None:
    global _saver
    _saver = None


os.register_at_fork(after_in_child=_forget_after_fork)  # a data loader's worker does not save


def on_save(save: Callback) -> None:
    """Have `save(step)` called when a save is asked for, within the next `report(step)` of this rank; so report a step
    when it has ended. It may give the path of what it wrote. An exception in it is reported as a failed save and does
    not end the training."""
    here = saver()
    if here is not None:
        here.callback = save
        progress.at_step = here.at_step


def save_requested() -> bool:
    """Is this rank to save now? Call it once in every step, in every rank; answer with `saved`."""
    here = saver()
    return here is not None and here.due()


def saved(step: int, path: str | os.PathLike[str] = "", wrote: bool = True, error: str = "") -> None:
    """Answer `save_requested`: this rank's part of step `step` is on disk. `wrote=False` says that another
    replica, which has the same state, writes it; `error` that it could not be written."""
    here = saver()
    if here is not None:
        here.answer(step, os.fspath(path), wrote, error)


def _part(item: Mapping[str, Any], replica: str) -> LastSave:
    """A save of `saved.json`: where replicas train each for itself, what this one saved."""
    step, path = item.get("parts", {}).get(replica) or (item["step"], item["path"])
    return LastSave(int(step), str(path), float(item["t"]))


def last_save(run: str | os.PathLike[str] | None = None) -> LastSave | None:
    """The newest complete save of the run (this rank's by default) whose path, if it has one, is still there."""
    folder = run or os.environ.get("SLURM_FT_RUN")
    if not folder:
        return None
    try:
        saves = json.loads((Path(folder) / "saved.json").read_text(encoding="utf-8"))["saves"]
        known = [_part(item, os.environ.get("SLURM_FT_REPLICA", "")) for item in saves]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    for save in reversed(known):
        if not save.path or os.path.exists(save.path):
            return save
        print(f"slurm-ft: the save of step {save.step} is not there any more: {save.path}", file=sys.stderr)
    return None
