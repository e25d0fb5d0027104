"""The event log, written by a thread of its own: the controller's loop never waits for the run folder.

`append` keeps the event in memory and returns. The thread writes what has come, in order and whole lines at a
time. While the file system is full, or does not answer, events wait in memory, without a bound: a night's
worth of them is smaller than one rank's buffers, and each may be what the state of the run hangs on.

A record still comes before its effect where it must. A step's launch waits (`settle`, bounded) until all that
was recorded before is on disk, so that a controller started after a crash knows of every step but the last,
and of that one it knows that it may be there. What agents are told may be ahead of the disk: they say again
what they were told and what they have done, and doing it twice does nothing. While the file system stalls no
step is launched at all; its agents would read the run folder too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from slurm_ft.events import Event, EventLog

STALLED_AFTER = 1.0
"""Seconds that a write may take before the file system is said to stall."""
SETTLE_WITHIN = 0.5
"""Seconds that who needs earlier events to be on disk waits for that; only once, then the file system has stalled."""
RETRY = 0.25
CLOSE_WITHIN = 5.0
NO_ANSWER = "the run folder's file system does not answer"


@dataclass(frozen=True)
class Trouble:
    """Why events wait: since when (monotonic seconds), how many, and in words."""

    since: float
    waiting: int
    what: str


class LateLog:
    """The one writer of a run's events. `log` does the writing, in this object's thread only."""

    def __init__(self, log: EventLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._changed = threading.Condition()
        self._waiting: list[str] = []
        self._writing = 0
        self._began: float | None = None
        self._since: float | None = None
        self._error = ""
        self._ended: Trouble | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def hinder(self, obstacle: Callable[[], None]) -> None:
        """A fault on purpose: called before each write from now on, it may hang or raise an OSError."""
        self._log.obstacle = obstacle

    def append(self, event: Event) -> None:
        line = event.to_line()  # here, so that an event that cannot be written fails where it was made
        with self._changed:
            self._waiting.append(line)
            self._changed.notify_all()

    @property
    def trouble(self) -> Trouble | None:
        """Why events wait, or None when they do not wait longer than a write takes."""
        with self._changed:
            count = len(self._waiting) + self._writing
            if self._since is not None:
                return Trouble(self._since, count, self._error)
            if self._began is not None and self._clock() - self._began > STALLED_AFTER:
                return Trouble(self._began, count, NO_ANSWER)
            return None

    def ended_trouble(self) -> Trouble | None:
        """A trouble that is over, told once; `waiting` is how many events were written late."""
        with self._changed:
            ended, self._ended = self._ended, None
            return ended

    @property
    def stalled(self) -> bool:
        """Does a write hang now?"""
        began = self._began
        return began is not None and self._clock() - began > STALLED_AFTER

    def settle(self, seconds: float) -> bool:
        """Wait until all is on disk; says whether it is. Returns at once when there is trouble already."""
        until = time.monotonic() + seconds
        with self._changed:
            while self._waiting or self._writing:
                left = until - time.monotonic()
                if left <= 0 or self._since is not None or self.stalled:
                    return False
                self._changed.wait(min(left, RETRY))
        return True

    def close(self, seconds: float = CLOSE_WITHIN) -> bool:
        """Write what waits, for so long at most; says whether all was written. A full disk is tried until then."""
        until = time.monotonic() + seconds
        with self._changed:
            while (self._waiting or self._writing) and time.monotonic() < until:
                self._changed.wait(0.05)
            done = not self._waiting and not self._writing
            self._closed = True
            self._changed.notify_all()
        if done:
            self._thread.join(1.0)
        return done

    def _run(self) -> None:
        while self._write_some():
            pass
        self._log.close()

    def _write_some(self) -> bool:
        """One round of the thread; False when the log is closed and nothing waits."""
        with self._changed:
            while not self._waiting and self._log.whole:
                if self._closed:
                    return False
                self._changed.wait()
            batch, self._waiting = self._waiting, []
            self._writing += len(batch)
            self._began = self._clock()
        error = self._log.extend(batch)
        with self._changed:
            began, self._began = self._began or self._clock(), None
            if error is None:
                stalled = self._clock() - began > STALLED_AFTER
                if self._since is not None or stalled:
                    since = began if self._since is None else self._since
                    self._ended = Trouble(since, self._writing, self._error or NO_ANSWER)
                self._writing, self._since, self._error = 0, None, ""
            else:
                self._since = self._since if self._since is not None else began
                self._error = f"the run folder cannot be written: {error.strerror}"
            self._changed.notify_all()
            if error is not None:
                if self._closed:
                    return False
                self._changed.wait(RETRY)
        return True
