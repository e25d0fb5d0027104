"""The event log of a run: `events.jsonl`, append only, the single source for status and report.

Every line is one `Event`: a JSON object with the time `t` (seconds since the epoch, by the controller's
clock, which never runs backwards), the `event` and, where it speaks of one, the `replica`. What the
controller decided is an event like what it saw, so folding the log from its start gives the state of the
run again: that is how a restarted controller, `status` and `report` learn it.

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

    RUN_STARTED = "run_started"
    CONTROLLER_STARTED = "controller_started"
    STOP_REQUESTED = "stop_requested"
    RUN_ENDED = "run_ended"

    PHASE = "phase"
    QUORUM = "quorum"
    COMMIT = "commit"
    PROGRESS = "progress"
    TORCHFT_ERROR = "torchft_error"
    INJECTED = "injected"
    KEEPER = "keeper"
    NOTE = "note"


@dataclass(frozen=True)
class Event:
    """One thing that happened at time `t` (seconds since the epoch)."""

    t: float
    kind: Kind
    replica: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_line(self) -> str:
        value: dict[str, Any] = {"t": round(self.t, 6), "event": str(self.kind)}
        if self.replica is not None:
            value["replica"] = self.replica
        return json.dumps(value | dict(self.data), separators=(",", ":")) + "\n"

    @staticmethod
    def from_line(line: str) -> Event | None:
        """The event on a line, or None for a line that is damaged or of a newer version's kind."""
        try:
            value = json.loads(line)
            kind = Kind(value.pop("event"))
            return Event(float(value.pop("t")), kind, value.pop("replica", None), value)
        except (ValueError, KeyError, AttributeError, TypeError):
            return None


class Clock:
    """Seconds since the epoch that never run backwards: the wall clock once, the monotonic one since."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset + time.monotonic()


class EventLog:
    """The one writer of an event log.

    A full or stalled file system must not stop the training: what cannot be written is kept in memory and
    written later, in order.
    """

    def __init__(self, path: Path, on_trouble: Callable[[OSError], None] | None = None) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._waiting = b"" if self._ends_with_newline() else b"\n"
        self._on_trouble = on_trouble

    def _ends_with_newline(self) -> bool:
        size = os.fstat(self._descriptor).st_size
        return size == 0 or os.pread(self._descriptor, 1, size - 1) == b"\n"

    def append(self, event: Event) -> None:
        self._waiting += event.to_line().encode()
        self.flush()

    def flush(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._descriptor, self._waiting) :]
        except OSError as error:
            if self._on_trouble:
                self._on_trouble(error)

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


def parse(lines: Iterable[str]) -> Iterator[Event]:
    for line in lines:
        event = Event.from_line(line)
        if event is not None:
            yield event


class Follower:
    """Reads what was added to a growing log since the last call; keeps a half-written line for later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def news(self) -> list[Event]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._position)
                block = file.read()
        except FileNotFoundError:
            return []
        whole = block[: block.rfind(b"\n") + 1]
        self._position += len(whole)
        return list(parse(whole.decode("utf-8", errors="replace").splitlines()))
