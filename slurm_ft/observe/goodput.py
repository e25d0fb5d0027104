"""Goodput: the share of the time the run could have trained in which it did work that lasts.

    goodput = useful / possible

`possible` is replicas x window, summed over the sessions. The window of the first session that trains opens
with the run's first progress; what lies before is start-up and is reported beside it. The window of a later
session opens with the session: bringing the run back is part of the price of what broke. A window closes with
the last progress of any replica where the run ended well or still goes on (what follows is shutting down, or
not over), else with the session's last event.

`useful` is the sum, over replicas, of the time between one commit and the next that was committed, begun with
the first progress of each attempt. Not in it, each counted apart, in replica-seconds:

    lost      steps that were not committed, what an attempt did after its last commit, and steps that had been
              committed before and were done again because the whole run fell back
    waiting   what a committed step took beyond twice the usual time: it hung on a peer, or saved
    finished  the replica had ended well and others had not
    away      no ranks, or ranks that had not made progress yet

The pieces of one replica never overlap and lie inside a window, so all add up to `possible` and goodput lies
between 0 and 100 %. It says nothing of how fast a step is: a slow network makes every step slow, and
that is the usual time then.

A run that never commits (no torchft in it) is measured by its progress reports in the same way; without even
those, only attempts that ended well, or that still run, count as useful.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median

from slurm_ft.observe.ledger import Attempt, Ledger, Session

WAITING_FACTOR = 2.0
FEWEST_PIECES = 5
"""With fewer pieces than this nothing can be called usual."""


@dataclass(frozen=True)
class Piece:
    """A stretch of one replica's training. `fresh` is the share of it that was new and lasts; `units` is how many
    steps it holds, 0 where that is unknown."""

    start: float
    end: float
    fresh: float
    units: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Goodput:
    """All times in replica-seconds but `startup` and `shutdown`, which are the run's. `basis` says what was
    measured: commits, progress or time."""

    basis: str
    possible: float
    useful: float
    waiting: float
    lost: float
    finished: float
    startup: float | None
    shutdown: float | None

    @property
    def away(self) -> float:
        return max(0.0, self.possible - self.useful - self.waiting - self.lost - self.finished)

    @property
    def percent(self) -> float | None:
        """None before the run has trained for any time."""
        return min(100.0, 100.0 * self.useful / self.possible) if self.possible > 0 else None


def measure(ledger: Ledger) -> Goodput:
    """The goodput of a run so far."""
    basis = _basis(ledger)
    possible, finished, pieces = 0.0, 0.0, list[Piece]()
    marks: dict[int, Mark] = {}
    for session, window in _windows(ledger):
        possible += session.replicas * (window[1] - window[0])
        finished += _finished(session, window)
        live = session.ended is None and session is ledger.sessions[-1]
        pieces.extend(_session_pieces(session, window, basis, marks, live))
    usual = _usual(pieces)
    waiting = sum(piece.fresh * _excess(piece, usual) for piece in pieces)
    fresh = sum(piece.fresh * piece.seconds for piece in pieces)
    total = sum(piece.seconds for piece in pieces)
    startup, shutdown = _edges(ledger)
    finished = min(finished, max(0.0, possible - total))  # late news may lie after an attempt's end
    return Goodput(
        basis, possible, max(0.0, fresh - waiting), waiting, max(0.0, total - fresh), finished, startup, shutdown
    )


def _finished(session: Session, window: tuple[float, float]) -> float:
    """The time in which replicas that had ended well waited for the window's end."""
    newest = {attempt.replica: attempt for attempt in sorted(session.attempts.values(), key=lambda a: a.number)}
    ends = (attempt.end for attempt in newest.values() if attempt.ended_well and attempt.end is not None)
    return sum(max(0.0, window[1] - max(end, window[0])) for end in ends)


def _basis(ledger: Ledger) -> str:
    attempts = [attempt for session in ledger.sessions for attempt in session.attempts.values()]
    if any(attempt.commits for attempt in attempts):
        return "commits"
    return "progress" if any(attempt.samples for attempt in attempts) else "time"


# --- the time that counts ------------------------------------------------------------------------------------


def _windows(ledger: Ledger) -> Iterator[tuple[Session, tuple[float, float]]]:
    """The sessions that count, each with its window."""
    begun, basis = False, _basis(ledger)
    for session in ledger.sessions:
        firsts = [_first(attempt, basis) for attempt in session.attempts.values()]
        start = session.started if begun else min((t for t in firsts if t is not None), default=None)
        if start is None:
            continue
        begun = True
        yield session, (start, max(start, _window_end(session, session is ledger.sessions[-1])))


def _window_end(session: Session, newest: bool) -> float:
    well = session.code == 0 if session.ended is not None else newest
    last = session.last_progress
    return last if well and last is not None else session.last


def _edges(ledger: Ledger) -> tuple[float | None, float | None]:
    """The run's start-up and shut-down in seconds, each None where it is not known. A run that ended badly has
    no shut-down: its window is open until its end."""
    windows = list(_windows(ledger))
    if not windows or ledger.began is None:
        return None, None
    startup = max(0.0, windows[0][1][0] - ledger.began)
    session, (_, end) = windows[-1]
    shutdown = max(0.0, session.ended - end) if session.ended is not None and session.code == 0 else None
    return startup, shutdown


# --- pieces --------------------------------------------------------------------------------------------------


@dataclass
class Mark:
    """How far a replica has come over all its attempts: committed manager steps, and the highest step reported."""

    committed: int = -1
    step: int = -1


def _session_pieces(
    session: Session, window: tuple[float, float], basis: str, marks: dict[int, Mark], live: bool
) -> Iterator[Piece]:
    """The pieces of a session, cut to its window and, replica by replica, to each other."""
    cursors: dict[int, float] = {}
    for attempt in sorted(session.attempts.values(), key=lambda a: (a.replica, a.number)):
        mark = marks.setdefault(attempt.replica, Mark())
        cursor = cursors.get(attempt.replica, window[0])
        for piece in _PIECES[basis](attempt, session, mark, live and attempt.end is None):
            start, end = max(piece.start, cursor), min(piece.end, window[1])
            if end > start:
                yield Piece(start, end, piece.fresh, piece.units)
                cursor = end
        cursors[attempt.replica] = cursor


def _from_commits(attempt: Attempt, session: Session, mark: Mark, running: bool) -> Iterator[Piece]:
    if attempt.first is None:
        return
    at = attempt.first
    commits = sorted(attempt.commits, key=lambda commit: commit.t)
    for commit, following in zip_longest(commits, commits[1:]):
        if following is not None and following.again:
            continue  # the same work is voted on once more, and that vote decides
        # torchft's step counter is restored from a peer or a checkpoint: a number seen before is work done again.
        new = commit.committed and commit.step > mark.committed
        yield Piece(at, commit.t, float(new), 1.0)
        at = max(at, commit.t)
        if new:
            mark.committed = commit.step
    # The step that a running attempt is at is not lost yet; what is beyond the usual time is waiting.
    yield Piece(at, _end(attempt, session), 1.0, 1.0) if running else Piece(at, _end(attempt, session), 0.0)


def _from_progress(attempt: Attempt, session: Session, mark: Mark, running: bool) -> Iterator[Piece]:
    if attempt.first is None:
        return
    at, step = attempt.first, None
    for t, reached in sorted(attempt.samples):
        before = mark.step if step is None else step
        gained = reached - before
        fresh = max(0, reached - max(before, mark.step)) / gained if gained > 0 else 0.0
        yield Piece(at, t, fresh, 0.0 if step is None else float(max(0, gained)))
        at, step = max(at, t), reached
        mark.step = max(mark.step, reached)
    yield Piece(at, _end(attempt, session), 0.0)


def _from_time(attempt: Attempt, session: Session, mark: Mark, running: bool) -> Iterator[Piece]:
    begun = _first(attempt, "time")
    assert begun is not None
    yield Piece(begun, _end(attempt, session), float(attempt.ended_well or running))


def _first(attempt: Attempt, basis: str) -> float | None:
    """When the attempt began to train: by its first progress, or by its start where the program reports none."""
    return attempt.started if basis == "time" and attempt.first is None else attempt.first


_PIECES = {"commits": _from_commits, "progress": _from_progress, "time": _from_time}


def _end(attempt: Attempt, session: Session) -> float:
    return session.last if attempt.end is None else attempt.end


def _usual(pieces: list[Piece]) -> float | None:
    """The usual seconds for one step, or None where too little was seen."""
    paces = [piece.seconds / piece.units for piece in pieces if piece.units and piece.fresh]
    return median(paces) if len(paces) >= FEWEST_PIECES else None


def _excess(piece: Piece, usual: float | None) -> float:
    if usual is None or not piece.units:
        return 0.0
    return max(0.0, piece.seconds - WAITING_FACTOR * usual * piece.units)
