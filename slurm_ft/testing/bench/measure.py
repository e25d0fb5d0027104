"""Runs one way and measures it: a single failure, or a whole run with a failure every so many seconds."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slurm_ft.testing.bench import log
from slurm_ft.testing.bench.ways import Run, Setting, Way, World

START_SECONDS = 120.0
RECOVER_SECONDS = 120.0
VICTIM = 1
"""Not the replica on the head's host, whose end is another matter."""
WARM_COMMITS = {"ddp": 8, "diloco": 2}


class DidNotWork(RuntimeError):
    """This way did not do what was measured. The words say how far it came."""


def _wait(run: Run, what: Callable[[], object], seconds: float, words: str) -> None:
    give_up = time.monotonic() + seconds
    while not what():
        if run.over or time.monotonic() > give_up:
            state = "it ended" if run.over else f"not within {seconds:.0f} s"
            raise DidNotWork(f"{words}: {state}; its last words:\n{run.tail()}")
        time.sleep(0.05)


def _commits(lines: list[log.Line], replica: int, after: float = 0.0) -> int:
    return sum(line.what == "commit" and line.replica == replica and line.t > after for line in lines)


def _together(run: Run) -> bool:
    """All replicas train and commit."""
    lines, warm = run.lines(), WARM_COMMITS[run.setting.algorithm]
    return all(_commits(lines, replica) >= warm for replica in range(run.setting.replicas))


@contextmanager
def _under_way(way: Way, world: World, setting: Setting) -> Iterator[Run]:
    """A run of this way, which is ended, and the hosts it broke repaired, when the block ends.

    Whatever goes wrong with one run is DidNotWork: the figures of the hours before it, and of the ways behind it,
    stand."""
    run = None
    try:
        run = way.start(world, setting)
        try:
            yield run
        finally:
            try:
                run.end()
            finally:
                _revive(world)
    except DidNotWork:
        raise
    except Exception as error:
        words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if run is not None:
            words += f"; its last words:\n{run.tail()}"
        raise DidNotWork(words) from error


def one_failure(way: Way, world: World, setting: Setting, dice: random.Random) -> log.Recovery:
    """Kill replica 1 at a random moment of its steps. Raises DidNotWork."""
    window = setting.sync if setting.algorithm == "diloco" else 10
    with _under_way(way, world, setting) as run:
        _wait(run, lambda: _together(run), START_SECONDS, "the replicas train together")
        time.sleep(dice.uniform(0.0, 1.0))
        before = {line.pid for line in run.lines()}
        killed = time.monotonic()
        run.kill(VICTIM)

        def back() -> bool:
            lines = run.lines()
            new = [line for line in lines if line.replica == VICTIM and line.pid not in before]
            if not any(line.what == "commit" for line in new):
                return False
            return all(_far_enough(lines, replica, killed, window) for replica in range(setting.replicas))

        _wait(run, back, RECOVER_SECONDS, "the killed replica commits again")
        return log.recovery(run.lines(), VICTIM, killed, run.detected(VICTIM, killed), window)


def _far_enough(lines: list[log.Line], replica: int, killed: float, window: int) -> bool:
    steps = [line for line in lines if line.replica == replica and line.what == "step"]
    last = max((line.step for line in steps if line.t <= killed), default=0)
    return max((line.step for line in steps), default=0) >= last + window


def whole_run(way: Way, world: World, setting: Setting, every: float) -> log.Whole:
    """A run to its end with a kill every `every` seconds after all train together, round the replicas but
    the first; 0: none. Raises DidNotWork."""
    faults = 0
    with _under_way(way, world, setting) as run:
        _wait(run, lambda: _together(run), START_SECONDS, "the replicas train together")
        began = time.monotonic()
        limit = began + 10 * setting.steps * max(setting.pace, 0.01) + 120
        while not run.over:
            if time.monotonic() > limit:
                raise DidNotWork(f"the run does not end; its last words:\n{run.tail()}")
            if every and time.monotonic() >= began + every * (faults + 1):
                faults += _hit(run, 1 + faults % (setting.replicas - 1))
            if any(line.what == "end" for line in run.lines()):
                time.sleep(1.0)
                break
            time.sleep(0.1)
        return log.whole(run.lines(), faults)


def _hit(run: Run, first: int) -> int:
    """Kill the first replica from `first` on that has a process; 1, or 0 when none is there to be killed now."""
    for offset in range(run.setting.replicas - 1):
        replica = 1 + (first - 1 + offset) % (run.setting.replicas - 1)
        try:
            run.kill(replica)
            return 1
        except (LookupError, ProcessLookupError):
            continue
    return 0


def _revive(world: World) -> None:
    if world.cluster is None:
        return
    for host, state in world.cluster.states().items():
        if state != "idle" and not any(process.role == "slurmd" for process in world.cluster.processes(host)):
            world.cluster.revive_host(host)


def median_of(recoveries: list[log.Recovery], name: str) -> tuple[float, float, float] | None:
    """Median, smallest, largest of one column."""
    return log.middle(getattr(recovery, name) for recovery in recoveries)


def median_rate(runs: list[log.Whole]) -> float:
    return statistics.median(run.rate for run in runs)
