"""A campaign of faults against a run whose events are written by hand."""

from __future__ import annotations

from pathlib import Path

from observe_histories import History, write_run

from slurm_ft.events import Event, Kind
from slurm_ft.faults import Strike
from slurm_ft.observe import campaign
from slurm_ft.observe.campaign import Blow, Shape
from slurm_ft.observe.requests import Watch
from slurm_ft.paths import RunPaths


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def wait(self, seconds: float) -> None:
        self.now += max(seconds, 0.001)

    def __call__(self) -> float:
        return self.now


def two_training() -> History:
    h = History(2)
    for replica in range(2):
        h.launch(0.1, replica).ranks(0.5, replica).commit(2.0, replica, 1).progressed(2.0, replica)
    return h


def append(paths: RunPaths, *events: Event) -> None:
    with paths.events.open("a") as file:
        file.writelines(event.to_line() for event in events)


def blows(paths: RunPaths, *strikes: Strike, after: Event | None = None) -> list[Blow]:
    """What came of the strikes; each takes a rank down, as the run's own events say, `after` comes with the first."""
    clock, told = Clock(), list[Blow]()

    def striker(strike: Strike, replica: int | None, rank: int) -> str:
        if replica is not None:
            append(paths, History(2).killed(clock.now + 3, replica).events[-1])
        if after is not None:
            append(paths, after)
        return ""

    campaign.run(strikes, Watch(paths), Shape(1, 1), striker, told.append, clock.wait, clock)
    return told


def test_the_second_strike_spares_the_only_replica_that_is_left(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "r", two_training().sorted())
    first, second = blows(paths, Strike(1, "kill", 0.9, 0.0), Strike(2, "kill", 0.0, 0.0))
    assert (first.replica, first.why_not) == (1, "")
    assert second.why_not == "the last healthy replica is spared"


def test_a_fault_of_the_run_falls_whoever_is_healthy(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "r", two_training().killed(3, 0).killed(3, 1).sorted())
    (blow,) = blows(paths, Strike(1, "controller", 0.9, 0.0))
    assert (blow.replica, blow.why_not) == (None, "")


def test_a_campaign_ends_with_its_run(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "r", two_training().sorted())
    end = Event(9.0, Kind.RUN_ENDED, None, {"code": 0, "why": ""})
    assert len(blows(paths, Strike(1, "lighthouse", 0, 0), Strike(2, "lighthouse", 0, 0), after=end)) == 1
