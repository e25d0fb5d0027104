"""What the trainer's log says: when a replica was back, what its peers lost, how much of a run counted. Pure."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Line:
    """One line of the log; `t` is CLOCK_MONOTONIC in seconds."""

    t: float
    pid: int
    replica: int
    what: str
    step: int


def read(path: Path) -> list[Line]:
    """All whole lines so far, in the order of their times; none when there is no log yet."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    found: list[Line] = []
    for line in text.splitlines():
        try:
            found.append(Line(**json.loads(line)))
        except (ValueError, TypeError):
            continue  # being written
    return sorted(found, key=lambda line: line.t)


@dataclass(frozen=True)
class Recovery:
    """One failure, in seconds after the kill; None for what was not seen."""

    detected: float | None
    relaunched: float | None
    joined: float | None
    met: float | None
    averaged: float | None
    committed: float | None
    step: float | None
    """What a step took the killed replica before."""
    survivors_lost_s: float
    survivors_lost_steps: int


def recovery(lines: Sequence[Line], victim: int, killed: float, detected: float | None, window: int) -> Recovery:
    """`window`: the steps after the kill in which survivors are compared with their pace before it."""
    before = {line.pid for line in lines if line.t <= killed}

    def first(what: str) -> float | None:
        times = (x.t - killed for x in lines if x.replica == victim and x.what == what and x.pid not in before)
        return next(times, None)

    survivors = sorted({line.replica for line in lines} - {victim})
    losses = [survivor_loss(lines, replica, killed, window) for replica in survivors]
    relaunched = first("born")
    return Recovery(
        detected=detected,
        relaunched=None if relaunched is None else max(relaunched, 0.0),
        joined=first("joined"),
        met=first("met"),
        averaged=first("step"),
        committed=first("commit"),
        step=pace(line.t for line in lines if line.replica == victim and line.what == "step" and line.t <= killed),
        survivors_lost_s=max((seconds for seconds, _ in losses), default=0.0),
        survivors_lost_steps=max((steps for _, steps in losses), default=0),
    )


def pace(times: Iterable[float]) -> float | None:
    """The median time between two; None for fewer than two."""
    between = [b - a for a, b in itertools.pairwise(times)]
    return statistics.median(between) if between else None


def survivor_loss(lines: Sequence[Line], replica: int, killed: float, window: int) -> tuple[float, int]:
    """Seconds that this survivor was behind its own pace once it was `window` steps further, and the steps
    that it had to do again."""
    steps = [line for line in lines if line.replica == replica and line.what == "step"]
    reached: dict[int, float] = {}
    for line in steps:
        reached.setdefault(line.step, line.t)
    done = [line.step for line in steps if line.t <= killed]
    if len(done) < 3:
        return 0.0, 0
    last = max(done)
    times = [reached[step] for step in sorted(reached) if step <= last]
    own_pace = pace(times[-window - 1 :]) or 0.0
    target = min(last + window, max(reached))
    behind = reached[target] - reached[last] - (target - last) * own_pace
    after = [line.step for line in steps if line.t > killed and line.step <= target]
    again = len(after) - len({step for step in after if step > last})
    return max(behind, 0.0), again


def useful_steps(lines: Iterable[Line]) -> int:
    """Steps of all replicas whose work was committed: those between a process's commits, and those of the process
    before it up to where it went on by `restored`. A step that a replica commits again, after going back to a
    checkpoint, counts once. A commit with another number than the last step is that of a replica that was
    healed: it has its peers' state, and its own steps are lost."""
    done, open_steps, newest = set[tuple[int, int]](), dict[int, list[int]](), dict[int, int]()
    for line in lines:
        if line.what == "restored":
            before = open_steps.pop(newest.get(line.replica, line.pid), [])
            open_steps[line.pid] = [step for step in before if step <= line.step]
        elif line.what == "step":
            open_steps.setdefault(line.pid, []).append(line.step)
            newest[line.replica] = line.pid
        elif line.what == "commit":
            steps = open_steps.pop(line.pid, [])
            if steps and steps[-1] == line.step:
                done.update((line.replica, step) for step in steps)
    return len(done)


@dataclass(frozen=True)
class Whole:
    """A run to its end: seconds from the first step to the last end, the steps that counted, and the median
    seconds of a step of replica 0, which no fault hits."""

    seconds: float
    steps: int
    faults: int
    step: float | None

    @property
    def rate(self) -> float:
        return self.steps / self.seconds


def whole(lines: Sequence[Line], faults: int) -> Whole:
    """Raises ValueError when the run has no step or no end."""
    begin = next((line.t for line in lines if line.what == "step"), None)
    ends = [line.t for line in lines if line.what == "end"]
    if begin is None or not ends:
        raise ValueError("the run did not come to its end")
    step = pace(line.t for line in lines if line.replica == 0 and line.what == "step")
    return Whole(max(ends) - begin, useful_steps(lines), faults, step)


def middle(values: Iterable[Any]) -> tuple[float, float, float] | None:
    """Median, smallest and largest of what was seen."""
    seen = [float(value) for value in values if value is not None]
    return (statistics.median(seen), min(seen), max(seen)) if seen else None
