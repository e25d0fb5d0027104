"""When a lost host is looked at again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slurm_ft.controller import returns
from slurm_ft.controller.fold import fold
from slurm_ft.controller.state import LostHost
from slurm_ft.events import Event, Kind
from slurm_ft.launch.probe import probe_argv


def test_the_first_look_comes_soon_and_each_one_in_vain_doubles_the_time_to_the_next() -> None:
    lost = {"a": 100.0}
    assert returns.due(lost, {}, 100.0 + returns.FIRST - 0.1) == []
    assert returns.due(lost, {}, 100.0 + returns.FIRST) == ["a"]
    assert returns.due(lost, {"a": (1, 110.0)}, 129.9) == []
    assert returns.due(lost, {"a": (1, 110.0)}, 130.0) == ["a"]
    assert returns.due(lost, {"a": (40, 110.0)}, 110.0 + returns.MOST) == ["a"]


def test_a_host_that_is_lost_again_is_looked_at_as_one_that_never_was() -> None:
    assert returns.due({"a": 500.0}, {"a": (9, 400.0)}, 500.0 + returns.FIRST) == ["a"]


@given(times=st.integers(0, 10_000))
def test_there_are_never_more_than_a_few_looks_in_an_hour(times: int) -> None:
    assert returns.FIRST <= returns._next(0.0, (times, 0.0)) <= returns.MOST


def test_a_replaced_host_is_remembered_with_time_and_reason_and_is_a_spare_when_it_returns() -> None:
    start = Event(1.0, Kind.RUN_STARTED, None, {"replicas": [["a"]], "ranks_per_host": 1, "spares": ["s"]})
    events = [
        start,
        Event(2.0, Kind.STEP_LAUNCHED, 0, {"step": 1, "pid": 9}),
        Event(3.0, Kind.AGENT_LOST, 0, {"step": 1, "host": "a", "what": "the agent on a is silent"}),
        Event(4.0, Kind.STEP_EXITED, 0, {"step": 1}),
        Event(5.0, Kind.HOST_REPLACED, 0, {"bad": "a", "spare": "s"}),
    ]
    state = fold(events)
    assert (state.lost, state.spares) == ({"a": LostHost(5.0, "the agent on a is silent")}, ())
    state = fold([*events, Event(6.0, Kind.HOST_RETURNED, None, {"host": "a"})])
    assert (state.lost, state.spares) == ({}, ("a",))
    assert fold([*events, Event(6.0, Kind.HOST_RETURNED, None, {"host": "b"})]).spares == ()


def test_a_host_that_answers_and_on_which_a_replica_keeps_failing_stays_lost() -> None:
    """Or a program that fails everywhere would never run out of spares."""
    state = fold(
        [
            Event(1.0, Kind.RUN_STARTED, None, {"replicas": [["a"]], "ranks_per_host": 1, "spares": ["s"]}),
            Event(2.0, Kind.STEP_LAUNCHED, 0, {"step": 1, "pid": 9}),
            Event(2.5, Kind.AGENT_JOINED, 0, {"step": 1, "index": 0, "port": 20000}),
            Event(3.0, Kind.STEP_EXITED, 0, {"step": 1, "what": "it crashed"}),
            Event(5.0, Kind.HOST_REPLACED, 0, {"bad": "a", "spare": "s"}),
        ]
    )
    assert state.lost["a"].away is False


def test_the_look_names_job_and_host_and_has_a_limit() -> None:
    argv = probe_argv("slurm", "7", "node3")
    assert argv[0] == "srun" and {"--jobid=7", "--nodelist=node3", "--time=1", "--overlap"} < set(argv)
    assert probe_argv("local", "", "node3")[1] == "-c"
