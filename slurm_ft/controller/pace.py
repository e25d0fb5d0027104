"""Which replica hangs: judged by progress, against its own pace and its peers'. Pure; time is an argument.

A replica moves when its training step or its commits change. It hangs when it has not moved for longer than
FACTOR times its median step and longer than the policy's `hang_after`, while a peer has kept moving through the
newer half of that time: when all stand still, one a moment longer than another, they may be waiting for each other, for
data or for a checkpoint, and to restart those that only wait would lose what they hold. One of them is the first to go
on when the wait is over, and says nothing of the others until it has moved for as long as they had to wait. A replica
that is left alone, or whose peers have finished the training, has only its own pace, and more time.

Before it moves for the first time a replica has no pace. In a run whose peers train through torchft it hangs when it
has not even made its Manager within START_FLOOR and twice `hang_after`: what comes after that, the first quorum, it
may wait for as long as its peers train between two synchronisations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

FACTOR = 20.0
"""How many of its own steps a replica may stand still; far above the spread of healthy steps."""
ALONE = 10.0
"""A replica without moving peers, or without a known pace, has this many times `hang_after`: it may be saving."""
START_FLOOR = 120.0
"""Seconds that a program has for its imports, its data and its model, at least."""
REMEMBERED = 32


@dataclass
class Pace:
    """How one replica has moved since its attempt began; times in seconds on one clock."""

    moved_at: float
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def moved(self, now: float) -> None:
        self.steps.append(now - self.moved_at)
        self.moved_at = now

    @property
    def usual(self) -> list[float]:
        """Seconds between its moves. The first interval holds the start-up, and says nothing of a step."""
        return list(self.steps)[1:]

    def moves(self, now: float, span: float) -> bool:
        """Has it kept moving for so many seconds, with no pause as long as that? As far as its moves are remembered."""
        at = now
        for pause in (now - self.moved_at, *reversed(self.steps)):
            at -= pause
            if pause >= span or now - at >= span:
                return pause < span
        return len(self.steps) == REMEMBERED


def patience(pace: Pace, peers: Iterable[Pace], hang_after: float) -> float:
    """Seconds that a replica may stand still: by its own steps, or by its peers' when it has made too few."""
    usual = pace.usual or [seconds for peer in peers for seconds in peer.usual]
    return max(hang_after, FACTOR * median(usual)) if usual else ALONE * hang_after


def hanging(
    paces: Mapping[int, Pace],
    training: frozenset[int],
    standing: frozenset[int],
    alone: bool,
    now: float,
    hang_after: float,
) -> dict[int, float]:
    """The replicas that hang, with the seconds since each has moved.

    `training` are those that should move. Those of them that are `standing` have said that they do something in which
    no step ends, such as a checkpoint, and have as much time as one that is alone. `alone` says that no other replica
    trains or will come back.
    0 as `hang_after` turns this off.
    """
    if hang_after <= 0:
        return {}
    still = {replica: now - paces[replica].moved_at for replica in training if replica in paces}
    usual = {r: patience(paces[r], paces.values(), hang_after) for r in still}
    limits = {r: max(limit, ALONE * hang_after) if r in standing else limit for r, limit in usual.items()}
    found = {r: seconds for r, seconds in still.items() if seconds > limits[r]}
    if alone:
        return {r: seconds for r, seconds in found.items() if seconds > ALONE * hang_after}
    peers = [paces[r] for r in still if r not in found and r not in standing]
    return {r: seconds for r, seconds in found.items() if any(peer.moves(now, seconds / 2) for peer in peers)}


def stuck_at_start(
    started: Mapping[int, float], joined: Iterable[int], peers_train: bool, now: float, hang_after: float
) -> dict[int, float]:
    """The replicas that hang before they have begun, with the seconds since their ranks were started.

    `started` holds when, for those that have not moved yet; `joined` are those that have made their Manager.
    """
    if hang_after <= 0 or not peers_train:
        return {}
    limit = max(START_FLOOR, 2 * hang_after)
    return {r: now - t for r, t in started.items() if r not in set(joined) and now - t > limit}
