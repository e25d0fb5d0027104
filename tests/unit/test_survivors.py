"""Who is told that a replica is gone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_ft.controller.book import Book
from slurm_ft.controller.state import RANKS_RUN, Replica, RunState, State
from slurm_ft.controller.survivors import Gone, gone
from slurm_ft.events import Event, Kind

MEMBERS = {0: "r0:a", 1: "r1:b", 2: "r2:c"}


def run(*states: State, stop: str = "") -> RunState:
    return RunState(tuple(Replica(i, (f"node{i}",), state=state) for i, state in enumerate(states)), stop=stop)


@pytest.mark.parametrize("state", sorted(set(State) - RANKS_RUN - {State.FINISHED, State.DONE}))
def test_all_who_still_run_are_told_of_a_replica_whose_attempt_is_over(state: State) -> None:
    told = gone(run(State.TRAINING, state, State.RUNNING), MEMBERS)
    assert told == [Gone(1, "r1:b", (0, 2))]


def test_nobody_is_told_of_one_that_runs_that_has_finished_or_that_was_in_no_quorum() -> None:
    state = run(State.TRAINING, State.FINISHED, State.DONE, State.LOST)
    assert gone(state, MEMBERS) == []


def test_nobody_is_told_in_a_run_that_is_stopped() -> None:
    assert gone(run(State.TRAINING, State.ENDING, stop="a stop was asked for"), MEMBERS) == []


def _event(kind: Kind, **data: object) -> Event:
    return Event(1.0, kind, 0, data)


def test_a_restarted_controller_knows_the_members_and_whom_it_has_told() -> None:
    book = Book()
    started, member = _event(Kind.RANKS_STARTED, attempt=2), _event(Kind.MEMBER, attempt=2, id="r0:b")
    for event in [started, _event(Kind.MEMBER, attempt=1, id="r0:late"), member]:
        book.replay(event)
    assert book.members == {0: "r0:b"}
    for event in [_event(Kind.SURVIVORS_TOLD, member="r0:b", told=[1])]:
        book.replay(event)
    assert book.members == {}
    for event in [started, member, _event(Kind.RANKS_STARTED, attempt=3)]:
        book.replay(event)
    assert book.members == {}


def test_nobody_is_told_of_one_whose_step_is_being_ended_because_it_has_finished() -> None:
    state = run(State.TRAINING, State.ENDING)
    finished = replace(state.replicas[1], then=State.DONE)
    assert gone(state.with_replica(finished), MEMBERS) == []
    assert [item.replica for item in gone(state, MEMBERS)] == [1]
