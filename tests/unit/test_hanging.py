"""Who hangs in a run, from its state."""

from __future__ import annotations

import pytest

from slurm_ft.controller.book import Book
from slurm_ft.controller.hanging import HangWatch
from slurm_ft.controller.pace import ALONE
from slurm_ft.controller.state import Replica, RunState, State

HANG_AFTER = 10.0


def found(*states: State, min_replicas: int, still: float, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Those that hang when all that train have stood still for so many seconds."""
    monkeypatch.setattr("slurm_ft.controller.hanging.time.monotonic", lambda: 0.0)
    watch = HangWatch(HANG_AFTER, min_replicas)
    state = RunState(replicas=tuple(Replica(id=n, hosts=(f"h{n}",), state=one) for n, one in enumerate(states)))
    for replica in state.replicas:
        if replica.state is State.TRAINING:
            watch.moved(replica.id)
    return [number for number, _, _ in watch.find(state, Book(), still, still)]


@pytest.mark.parametrize("others", [State.PARKED, State.RUNNING, State.LAUNCHING, State.DONE])
def test_the_only_one_that_trains_is_found_in_the_end(monkeypatch: pytest.MonkeyPatch, others: State) -> None:
    late = ALONE * HANG_AFTER + 1
    assert found(State.TRAINING, others, min_replicas=1, still=late, monkeypatch=monkeypatch) == [0]
    assert found(State.TRAINING, others, min_replicas=1, still=late - 2, monkeypatch=monkeypatch) == []


def test_one_that_needs_a_peer_waits_for_it_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(State.TRAINING, State.PARKED, min_replicas=2, still=1e6, monkeypatch=monkeypatch) == []
    assert found(State.TRAINING, State.TRAINING, min_replicas=1, still=1e6, monkeypatch=monkeypatch) == []
