"""What a controller that begins learns from the log; and that it holds the lease while it learns it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_ft.controller import controller as controllers
from slurm_ft.controller.controller import Controller
from slurm_ft.controller.fold import fold
from slurm_ft.controller.history import History
from slurm_ft.controller.state import State
from slurm_ft.controller.tenure import Tenure
from slurm_ft.events import Event, EventLog, Follower, Kind
from slurm_ft.launch.local import LocalLauncher
from slurm_ft.lease import Claim, Lease, read, take
from slurm_ft.paths import RunPaths
from slurm_ft.spec import ReplicaSpec, RunSpec


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    paths.create()
    return paths


def session(name: str, epoch: int, attempt: int) -> list[Event]:
    about = {"session": name, "replicas": [["a"]], "ranks_per_host": 1}
    return [
        Event(1.0, Kind.RUN_STARTED, None, about, epoch),
        Event(1.0, Kind.STEP_LAUNCHED, 0, {"step": 1, "pid": 7}, epoch),
        Event(1.0, Kind.AGENT_JOINED, 0, {"step": 1, "index": 0, "port": 1, "n": 1}, epoch),
        Event(1.0, Kind.RANKS_STARTED, 0, {"attempt": attempt, "rung": ""}, epoch),
        Event(1.0, Kind.COMMIT, 0, {"attempt": attempt, "rank": 0, "committed": True, "step": 5, "n": 2}, epoch),
        Event(1.0, Kind.KEEPER, None, {"what": "started", "pid": attempt, "start": 1, "hosts": ["a"]}, epoch),
        Event(1.0, Kind.SAVE_ENDED, None, {"complete": True, "id": name}, epoch),
    ]


def test_it_is_the_last_sessions_but_for_the_saves(paths: RunPaths) -> None:
    log = EventLog(paths.events)
    for event in (*session("first", 1, 3), *(last := session("second", 2, 4))):
        log.append(event)
    log.close()
    history = History(1).read_on(Follower(paths.events))
    assert history.state == fold(last) and history.state.replicas[0].state is State.RUNNING
    assert history.started is not None and history.started.data["session"] == "second"
    assert history.epoch == 2 and [event.data["id"] for event in history.saves] == ["first", "second"]
    assert (history.book.page(0).committed, history.deliveries.last((0, 1, 0))) == (1, 2)
    assert [event.data["pid"] for event in history.keepers] == [4]


def test_a_run_without_a_log_has_no_history(paths: RunPaths) -> None:
    history = History(1).read_on(Follower(paths.events))
    assert (history.started, history.epoch, history.state.replicas) == (None, 0, ())


def test_what_a_deposed_controller_still_wrote_counts_until_our_first_event_and_not_after(paths: RunPaths) -> None:
    log, follower = EventLog(paths.events), Follower(paths.events)
    for event in session("only", 1, 3):
        log.append(event)
    history = History(1).read_on(follower)
    late = {"attempt": 3, "rank": 0, "committed": True}
    log.append(Event(2.0, Kind.COMMIT, 0, {**late, "step": 6}, 1))
    log.append(Event(2.0, Kind.HEAD_STARTED, None, {"host": "b"}, 2))
    log.append(Event(2.0, Kind.COMMIT, 0, {**late, "step": 7}, 1))
    log.close()
    history = history.read_on(follower)
    assert (history.state.replicas[0].committed, history.epoch) == (6, 2)


class Enough(Exception):
    pass


def test_the_lease_is_renewed_while_a_long_log_is_read(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = Claim(1, "a")
    assert take(paths.lease, claim)
    reading, seen = threading.Event(), list[int]()

    def slow(*_: Any) -> History:
        while not seen or (not seen[-1] and len(seen) < 3000):
            reading.wait(0.01)
            seen.append(read(paths.lease, 1).beat)
        raise Enough

    monkeypatch.setattr(controllers, "History", lambda _: SimpleNamespace(read_on=slow))
    spec = RunSpec("r", ReplicaSpec(("true",)), 1)

    async def story() -> None:
        tenure = Tenure(Lease(paths.lease, claim))
        one = Controller(paths, spec, LocalLauncher(), object(), "session", tenure)  # type: ignore[arg-type]
        await one.run(["a"], "L1", "a")

    with pytest.raises(Enough):
        asyncio.run(story())
    assert seen[-1] >= 1
