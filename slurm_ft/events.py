"""The event log of a run: `events.jsonl`, append only, the single source for status and report.

Every line is one `Event`: a JSON object with the time `t` (seconds since the epoch, by the controller's
clock, which never runs backwards), the `event` and, where it speaks of one, the `replica`. What the
controller decided is an event like what it saw, so folding the log from its start gives the state of the
run again: that is how a restarted controller, `status` and `report` learn it.

Every event bears the `epoch` of the head that wrote it (slurm_ft/lease.py). What a deposed controller still
wrote after the first event of a higher epoch did not happen: all readers drop it (`Fence`). A new head reads on after
its first event is there, so it knows whatever its readers know.

A line is written with one `write` in append mode. A line cut off by a crash stays where it is; the next
writer starts a new line and readers pass over what is not JSON.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any


class Kind(StrEnum):
    """What can happen. The first group moves a replica; the others are facts for people and reports."""

    STEP_LAUNCHED = "step_launched"
    AGENT_JOINED = "agent_joined"
    RANKS_STARTED = "ranks_started"
    PROGRESSED = "progressed"
    RANK_FAILED = "rank_failed"
    RANK_DONE = "rank_done"
    CLEARING = "clearing"
    AGENT_CLEARED = "agent_cleared"
    AGENT_LOST = "agent_lost"
    STEP_ENDING = "step_ending"
    STEP_EXITED = "step_exited"
    HOST_REPLACED = "host_replaced"
    DELAYED = "delayed"
    PARKED = "parked"
    HOST_RETURNED = "host_returned"
    HOST_UNFIT = "host_unfit"
    HOST_FIT = "host_fit"

    HEAD_STARTED = "head_started"
    RUN_STARTED = "run_started"
    CONTROLLER_STARTED = "controller_started"
    ADOPTED = "adopted"
    STOP_REQUESTED = "stop_requested"
    RUN_ENDED = "run_ended"
    SAVE_REQUESTED = "save_requested"
    SAVE_ASKED = "save_asked"
    SAVED = "saved"
    SAVE_ENDED = "save_ended"

    PHASE = "phase"
    QUORUM = "quorum"
    COMMIT = "commit"
    PROGRESS = "progress"
    TORCHFT_ERROR = "torchft_error"
    MEMBER = "member"
    SURVIVORS_TOLD = "survivors_told"
    INJECTED = "injected"
    KEEPER = "keeper"
    NOTE = "note"


@dataclass(frozen=True)
class Event:
    """One thing that happened at time `t` (seconds since 1970), told by the head of an epoch."""

    t: float
    kind: Kind
    replica: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    epoch: int = 0

    def to_line(self) -> str:
        value: dict[str, Any] = {"t": round(self.t, 6), "event": str(self.kind)}
        if self.replica is not None:
            value["replica"] = self.replica
        if self.epoch:
            value["epoch"] = self.epoch
        return json.dumps(value | dict(self.data), separators=(",", ":")) + "\n"

    @staticmethod
    def from_line(line: str) -> Event | None:
        """The event on a line, or None for a line that is damaged or of a newer version's kind."""
        try:
            value = json.loads(line)
            kind = Kind(value.pop("event"))
            epoch = int(value.pop("epoch", 0))
            return Event(float(value.pop("t")), kind, value.pop("replica", None), value, epoch)
        except (ValueError, KeyError, AttributeError, TypeError):
            return None


class Fence:
    """Lets through what counts: nothing of an epoch after a higher one has begun."""

    def __init__(self) -> None:
        self.epoch = 0

    def admits(self, event: Event) -> bool:
        self.epoch = max(self.epoch, event.epoch)
        return event.epoch == self.epoch


class Clock:
    """Seconds since the epoch that never run backwards: the wall clock once, the monotonic one since."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset + time.monotonic()


class EventLog:
    """The one writer of an event log.

    What cannot be written is kept in memory and written later, in order. A write may block: the controller
    writes in a thread (controller/latelog.py).
    """

    def __init__(self, path: Path, on_trouble: Callable[[OSError], None] | None = None) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._waiting = b"" if self._ends_with_newline() else b"\n"
        self._on_trouble = on_trouble
        self.obstacle: Callable[[], None] = lambda: None

    def _ends_with_newline(self) -> bool:
        size = os.fstat(self._descriptor).st_size
        return size == 0 or os.pread(self._descriptor, 1, size - 1) == b"\n"

    def append(self, event: Event) -> None:
        self.extend([event.to_line()])

    def extend(self, lines: Iterable[str]) -> OSError | None:
        """Write these after what still waits; gives the error that kept some of it from being written."""
        self._waiting += "".join(lines).encode()
        return self.flush()

    @property
    def whole(self) -> bool:
        """Is everything written, to the end of the last line?"""
        return not self._waiting or self._waiting == b"\n"

    def flush(self) -> OSError | None:
        try:
            while self._waiting:
                self.obstacle()
                self._waiting = self._waiting[os.write(self._descriptor, self._waiting) :]
        except OSError as error:
            if self._on_trouble:
                self._on_trouble(error)
            return error
        return None

    def close(self) -> None:
        self.flush()
        os.close(self._descriptor)


def read(path: Path) -> Iterator[Event]:
    """The events of a log, in order. A missing file is an empty log."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            yield from parse(file)
    except FileNotFoundError:
        return


def parse(lines: Iterable[str], fence: Fence | None = None) -> Iterator[Event]:
    """The events on these lines that count. `fence` knows of the lines before them."""
    fence = fence or Fence()
    for line in lines:
        event = Event.from_line(line)
        if event is not None and fence.admits(event):
            yield event


def written(path: Path) -> int:
    """How many bytes of a log are there, 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


PIECE = 1 << 20
"""Bytes of a log that are read at once, about."""


class Follower:
    """Reads what was added to a growing log since the last call; keeps a half-written line for later."""

    def __init__(self, path: Path, position: int = 0) -> None:
        """`position` in bytes: what stands before it is passed over."""
        self._path = path
        self._position = position
        self._fence = Fence()

    @staticmethod
    def from_now(path: Path) -> Follower:
        """One that passes over what is there already. A log of days takes a minute to read."""
        return Follower(path, written(path))

    def news(self) -> list[Event]:
        return list(self.stream())

    def stream(self) -> Iterator[Event]:
        """The same, read in pieces: a log of days is not held in memory."""
        while lines := self._lines():
            yield from parse((line.decode("utf-8", errors="replace") for line in lines), self._fence)

    def _lines(self) -> list[bytes]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._position)
                lines = file.readlines(PIECE)
        except FileNotFoundError:
            return []
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        self._position += sum(map(len, lines))
        return lines
