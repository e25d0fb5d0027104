"""The replicas of this run that hang, by how all of them move (pace.py has the judgement).

What a replica has moved since its attempt began is known to this process only: after a restart of the controller
each has its time anew.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from slurm_ft.controller.book import Book
from slurm_ft.controller.pace import Pace, hanging, stuck_at_start
from slurm_ft.controller.state import CHECKPOINT, FINAL, RunState, State

STANDING_PHASES = frozenset({CHECKPOINT, "eval"})
"""Phases in which no step ends, so that a replica may stand still for longer."""


class HangWatch:
    """`hang_after` (seconds, 0 turns it off) and `min_replicas` are the policy's."""

    def __init__(self, hang_after: float, min_replicas: int) -> None:
        self._hang_after, self._min_replicas = hang_after, min_replicas
        self._paces: dict[int, Pace] = {}

    def started(self, replica: int) -> None:
        """A new attempt has no pace yet."""
        self._paces.pop(replica, None)

    def moved(self, replica: int) -> None:
        now = time.monotonic()
        if replica in self._paces:
            self._paces[replica].moved(now)
        else:
            self._paces[replica] = Pace(now)

    def adopted(self, replica: int) -> None:
        """It trains already, and counts as one that has moved just now."""
        self._paces[replica] = Pace(time.monotonic())

    def excuse_all(self, now: float) -> None:
        """That nobody was seen to move was our own doing."""
        for pace in self._paces.values():
            pace.moved_at = now

    def find(self, state: RunState, book: Book, now: float, wall: float) -> Iterator[tuple[int, float, str]]:
        """Each replica that hangs, since how many seconds, and how that shows. `now` is time.monotonic(), and `wall`
        the clock of the events."""
        replicas, collective = state.replicas, state.collective
        finished = collective and state.first_done is not None  # who is left may be writing the last checkpoint
        training = frozenset(r.id for r in replicas if r.state is State.TRAINING)
        standing = frozenset(r.id for r in replicas if not STANDING_PHASES.isdisjoint(r.phases.values()))
        # One that trains alone while others are parked or on their way has no peer to be judged by; but where more
        # are needed it waits for them.
        lonely = len(training) == 1 and self._min_replicas <= 1
        alone = finished or lonely or sum(r.state not in FINAL for r in replicas) == 1
        for number, seconds in hanging(self._paces, training, standing, alone, now, self._hang_after).items():
            step = book.page(number).step
            yield number, seconds, f"it has stood still for {seconds:.0f} s at step {step}"
        if collective and not finished:
            started = {r.id: r.since for r in replicas if r.state is State.RUNNING}
            stuck = stuck_at_start(started, book.members, bool(training), wall, self._hang_after)
            for number, seconds in stuck.items():
                yield number, seconds, f"it has not begun to train within {seconds:.0f} s"
