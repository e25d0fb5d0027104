"""The table, the decisions and the verdict by themselves; whole histories are in tests/stories."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft.controller.controller import _missed
from slurm_ft.controller.fold import fold, observe
from slurm_ft.controller.requests import STOP_WORDS
from slurm_ft.controller.state import BY_STEP, FINAL, IN_PLACE, Failure, Replica, RunState, State
from slurm_ft.controller.supervise import (
    ClearRanks,
    EndRun,
    EndStep,
    LaunchStep,
    StartRanks,
    TakeSpare,
    decide,
    due,
    used,
)
from slurm_ft.controller.transitions import TRANSITIONS
from slurm_ft.errors import EXIT_DONE, EXIT_FAILED
from slurm_ft.events import Event, Kind
from slurm_ft.spec import Budget, Policy

S, K = State, Kind
POLICY = Policy()
CRASH = Failure(100.0, "rank 0 was killed by SIGKILL", rank=0, attempt=3)

DATA: dict[Kind, dict[str, Any]] = {
    K.STEP_LAUNCHED: {"step": 3, "pid": 99},
    K.AGENT_JOINED: {"step": 2, "index": 0, "port": 20000, "address": "10.0.0.1", "step_id": "7.2"},
    K.RANKS_STARTED: {"attempt": 4, "rung": ""},
    K.PROGRESSED: {"attempt": 3},
    K.RANK_FAILED: {"attempt": 3, "rank": 0, "what": "rank 0 was killed by SIGKILL"},
    K.RANK_DONE: {"attempt": 3, "rank": 0},
    K.CLEARING: {"attempt": 3},
    K.AGENT_CLEARED: {"attempt": 3, "index": 0, "port": 20001},
    K.AGENT_LOST: {"step": 2, "index": 0, "what": "silent"},
    K.STEP_ENDING: {"step": 2, "then": "STOPPED", "why": "because"},
    K.STEP_EXITED: {"step": 2, "code": 1, "what": "the step exited with code 1"},
    K.HOST_UNFIT: {"step": 2, "index": 0, "host": "a", "what": "0 of 8 GPUs are there"},
    K.HOST_FIT: {"host": "a"},
    K.HOST_REPLACED: {"bad": "a", "spare": "s"},
    K.COMMIT: {"attempt": 3, "committed": True},
    K.PHASE: {"attempt": 3, "rank": 0, "phase": "checkpoint"},
    K.RUN_ENDED: {"code": 0},
    K.STOP_REQUESTED: {"why": "stop", "code": 143},
    K.RUN_STARTED: {"replicas": [["a"]], "ranks_per_host": 1},
}

TABLE = {
    S.PENDING: {
        K.STEP_LAUNCHED: S.LAUNCHING, K.HOST_REPLACED: S.PENDING, K.DELAYED: S.PENDING, K.STEP_ENDING: S.STOPPED,
        K.PARKED: S.PARKED,
    },
    S.PARKED: {K.HOST_REPLACED: S.PENDING, K.STEP_ENDING: S.STOPPED},
    S.LAUNCHING: {
        K.AGENT_JOINED: S.READY, K.AGENT_LOST: S.LOST, K.STEP_EXITED: S.PENDING, K.STEP_ENDING: S.ENDING,
        K.HOST_UNFIT: S.LOST,
    },
    S.READY: {
        K.RANKS_STARTED: S.RUNNING, K.AGENT_LOST: S.LOST, K.STEP_EXITED: S.PENDING, K.STEP_ENDING: S.ENDING,
        K.DELAYED: S.READY,
    },
    S.RUNNING: {
        K.PROGRESSED: S.TRAINING, K.RANK_FAILED: S.BROKEN, K.RANK_DONE: S.FINISHED, K.AGENT_LOST: S.LOST,
        K.STEP_EXITED: S.PENDING, K.STEP_ENDING: S.ENDING,
    },
    S.TRAINING: {
        K.RANK_FAILED: S.BROKEN, K.RANK_DONE: S.FINISHED, K.AGENT_LOST: S.LOST, K.STEP_EXITED: S.PENDING,
        K.STEP_ENDING: S.ENDING,
    },
    S.BROKEN: {
        K.CLEARING: S.CLEARING, K.AGENT_LOST: S.LOST, K.STEP_EXITED: S.PENDING, K.STEP_ENDING: S.ENDING,
        K.AGENT_CLEARED: S.READY,  # told to a controller that died before it could write it down
    },
    S.CLEARING: {
        K.AGENT_CLEARED: S.READY, K.AGENT_LOST: S.LOST, K.STEP_EXITED: S.PENDING, K.STEP_ENDING: S.ENDING,
        K.HOST_UNFIT: S.LOST,
    },
    S.LOST: {K.STEP_EXITED: S.PENDING, K.AGENT_LOST: S.LOST, K.STEP_ENDING: S.ENDING},
    S.FINISHED: {K.STEP_EXITED: S.DONE, K.STEP_ENDING: S.ENDING},
    S.ENDING: {K.STEP_EXITED: S.FAILED, K.AGENT_LOST: S.ENDING, K.STEP_ENDING: S.ENDING},
    S.DONE: {},
    S.FAILED: {},
    S.STOPPED: {},
}  # fmt: skip


def in_state(state: State, **changes: Any) -> Replica:
    """A replica of one host and one rank in its third attempt and second step, as it would be in this state."""
    exists = state not in FINAL | {S.PENDING, S.PARKED}
    known: dict[str, Any] = {"agents": {}, "addresses": {}}
    if exists and state is not S.LAUNCHING:
        known["addresses"] = {0: "10.0.0.1"}
    if state in (S.READY, S.RUNNING, S.TRAINING, S.FINISHED):
        known["agents"] = {0: 20000}
    known |= {"then": S.FAILED if state is S.ENDING else S.PENDING, "pid": 42 if exists else None}
    return Replica(0, ("a",), 1, state, 100.0, attempt=3, step=2, **(known | changes))


def after(replica: Replica, kind: Kind, **data: Any) -> Replica:
    state = RunState((replica,), started=1.0)
    return observe(state, Event(200.0, kind, 0, {**DATA.get(kind, {}), **data})).replicas[0]


# --- the table ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("state", State)
def test_every_event_in_every_state_leads_where_the_table_says_or_changes_nothing(state: State, kind: Kind) -> None:
    if kind is K.RUN_STARTED:  # it begins everything anew
        return
    before = in_state(state)
    now = after(before, kind)
    if kind in TABLE[state]:
        assert now.state is TABLE[state][kind]
    else:
        assert replace(now, committed=before.committed, phases=before.phases) == before


def test_the_code_has_no_transition_that_this_table_does_not_know() -> None:
    assert {s: set(kinds) for s, kinds in TRANSITIONS.items()} == {s: set(kinds) for s, kinds in TABLE.items()}


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("state", State)
def test_attempts_and_steps_never_go_down_and_a_failure_that_was_first_stays_first(state: State, kind: Kind) -> None:
    if kind is K.RUN_STARTED:
        return
    before = in_state(state, first_failure=CRASH)
    now = after(before, kind)
    assert now.attempt >= before.attempt
    assert now.step >= before.step
    assert now.first_failure == CRASH


@pytest.mark.parametrize("kind", [K.PROGRESSED, K.RANK_FAILED, K.RANK_DONE, K.AGENT_CLEARED, K.COMMIT, K.PHASE])
@pytest.mark.parametrize("state", State)
def test_news_of_an_older_attempt_changes_nothing(state: State, kind: Kind) -> None:
    before = in_state(state)
    assert after(before, kind, attempt=2) == before


@pytest.mark.parametrize("kind", [K.AGENT_JOINED, K.AGENT_LOST, K.STEP_EXITED])
@pytest.mark.parametrize("state", State)
def test_news_of_an_older_step_changes_nothing(state: State, kind: Kind) -> None:
    before = in_state(state)
    assert after(before, kind, step=1) == before


@pytest.mark.parametrize("replica", [None, -1, 1, 99])
@pytest.mark.parametrize("kind", Kind)
def test_news_of_a_replica_that_the_run_does_not_have_moves_no_replica(kind: Kind, replica: int | None) -> None:
    if kind is K.RUN_STARTED:
        return
    state = RunState((in_state(S.RUNNING),))
    assert observe(state, Event(1.0, kind, replica, DATA.get(kind, {}))).replicas == state.replicas


def test_only_the_first_stop_counts() -> None:
    state = fold(
        [
            Event(1.0, K.RUN_STARTED, None, DATA[K.RUN_STARTED]),
            Event(2.0, K.STOP_REQUESTED, None, {"why": "time limit", "code": 75}),
            Event(3.0, K.STOP_REQUESTED, None, {"why": "SIGTERM", "code": 143}),
        ]
    )
    assert (state.stop, state.stop_code) == ("time limit", 75)


def test_a_stop_that_somebody_asks_for_while_the_time_limit_ends_the_run_is_a_stop() -> None:
    state = RunState((in_state(S.TRAINING),))
    for why, code in (("the time limit is near", 75), (STOP_WORDS, 143), ("it got SIGTERM", 143)):
        state = observe(state, Event(1.0, K.STOP_REQUESTED, None, {"why": why, "code": code}))
    assert (state.stop, state.stop_code) == (STOP_WORDS, 143)


def test_a_host_whose_agent_reports_has_passed_its_check() -> None:
    state = RunState((in_state(S.LAUNCHING),), unfit={"a": "no GPU", "b": "no GPU"})
    joined = {"step": state.replicas[0].step, "index": 0, "host": "a", "port": 1, "address": ""}
    assert observe(state, Event(1.0, K.AGENT_JOINED, 0, joined)).unfit == {"b": "no GPU"}


def test_a_new_session_begins_with_new_replicas() -> None:
    ended = RunState((in_state(S.FAILED),), stop="x", ended=1, collective=True, first_done=3.0)
    state = observe(ended, Event(9.0, K.RUN_STARTED, None, DATA[K.RUN_STARTED]))
    assert state == RunState((Replica(0, ("a",), since=9.0),), started=9.0)


def test_progress_forgives_earlier_failures() -> None:
    now = after(in_state(S.RUNNING, streak=4), K.PROGRESSED)
    assert (now.streak, now.ever_joined) == (0, True)


def test_a_step_that_is_ended_because_it_never_came_up_is_a_failure() -> None:
    now = after(in_state(S.LAUNCHING), K.STEP_ENDING, then="PENDING", why="1 agents did not report within 120 s")
    assert now.failure is not None and now.failure.launch
    assert now.streak == 1


# --- decisions ---------------------------------------------------------------------------------------------------


def choice(replica: Replica, now: float = 200.0, policy: Policy = POLICY, **run: Any) -> tuple[Any, str]:
    actions, reasons = decide(now, RunState((replica,), **run), policy)
    return (actions[0] if actions else None), reasons[0]


def test_nothing_is_decided_for_a_run_that_is_over_or_has_not_begun() -> None:
    assert decide(1.0, RunState((in_state(S.RUNNING),), ended=0), POLICY) == ([], {})
    assert decide(1.0, RunState(), POLICY) == ([], {})


@pytest.mark.parametrize(
    ("state", "action"),
    [
        (S.PENDING, LaunchStep(0)),
        (S.LAUNCHING, None),
        (S.READY, StartRanks(0, 4, "")),
        (S.RUNNING, None),
        (S.TRAINING, None),
        (S.BROKEN, ClearRanks(0)),
        (S.CLEARING, None),
        (S.FINISHED, EndStep(0, S.DONE, "all its ranks ended well", 30.0)),
        (S.ENDING, None),
    ],
)
def test_what_is_done_in_each_state_when_nothing_has_failed(state: State, action: object) -> None:
    assert choice(in_state(state), now=101.0)[0] == action


@pytest.mark.parametrize("state", State)
def test_every_state_has_a_reason_in_words(state: State) -> None:
    assert choice(in_state(state, failure=CRASH), now=101.0)[1]


@pytest.mark.parametrize("state", set(State) - FINAL)
def test_a_stop_ends_every_replica_whatever_it_is_doing(state: State) -> None:
    action, reason = choice(in_state(state, failure=CRASH), stop="it got SIGTERM")
    if state is S.ENDING:
        assert action is None
    elif state is S.FINISHED:
        assert action == EndStep(0, S.DONE, "all its ranks ended well", 30.0)
    else:
        assert (action.then, action.why, reason) == (S.STOPPED, "it got SIGTERM", "it got SIGTERM")
        assert action.grace == (30.0 if state in (S.RUNNING, S.TRAINING) else 5.0)


@pytest.mark.parametrize(
    ("streak", "seconds"), [(0, 0.0), (1, 0.0), (2, 1.0), (3, 2.0), (4, 4.0), (6, 16.0), (7, 30.0), (5000, 30.0)]
)
def test_a_repair_waits_longer_with_each_failure_that_follows_without_progress(streak: int, seconds: float) -> None:
    assert due(in_state(S.READY, failure=CRASH, streak=streak), POLICY) == 100.0 + seconds


def test_a_repair_is_not_due_before_the_replica_is_there() -> None:
    assert due(replace(in_state(S.READY, failure=CRASH, streak=2), since=140.0), POLICY) == 140.0


@given(st.lists(st.floats(0, 1000)), st.floats(0, 1000), st.floats(1, 1000))
def test_a_budget_counts_the_repairs_of_its_rung_within_its_time(times: list[float], ago: float, window: float) -> None:
    now = 1000.0 + ago
    restarts = tuple((t, rung) for t in times for rung in (IN_PLACE, BY_STEP))
    count = used(in_state(S.READY, restarts=restarts, progressed=now), IN_PLACE, Budget(3, window), now)
    assert count == len([t for t in times if t > now - window or now - t < window])


@given(st.lists(st.floats(0, 1000)), st.floats(0, 1000))
def test_repairs_since_the_last_progress_count_however_long_ago(times: list[float], progressed: float) -> None:
    restarts = tuple((t, IN_PLACE) for t in times)
    count = used(in_state(S.READY, restarts=restarts, progressed=progressed), IN_PLACE, Budget(3, 1.0), 1e6)
    assert count == len([t for t in times if t > progressed])


def test_the_ladder_climbs_from_in_place_to_by_step_to_giving_up() -> None:
    policy = Policy(in_place=Budget(2, 600.0), step=Budget(1, 600.0), backoff=0.0)
    replica = in_state(S.READY, failure=CRASH, streak=1)
    assert choice(replica, policy=policy)[0] == StartRanks(0, 4, IN_PLACE)
    replica = replace(replica, restarts=((90.0, IN_PLACE), (95.0, IN_PLACE)))
    assert choice(replica, policy=policy)[0] == EndStep(0, S.PENDING, CRASH.what, 5.0)
    pending = replace(replica, state=S.PENDING, pid=None, agents={})
    assert choice(pending, policy=policy)[0] == LaunchStep(0)
    replica = replace(replica, restarts=(*replica.restarts, (99.0, BY_STEP)))
    action, reason = choice(replica, policy=policy)
    assert action == EndStep(0, S.FAILED, f"{CRASH.what}; 3 restarts are used up", 5.0)
    assert reason == action.why


def test_ranks_in_a_new_step_after_a_failure_are_not_a_repair_in_place() -> None:
    replica = in_state(S.READY, failure=CRASH, restarts=((150.0, BY_STEP),), streak=1)
    assert choice(replica)[0] == StartRanks(0, 4, "")


def test_a_rung_with_a_budget_of_none_is_passed_over() -> None:
    policy = Policy(in_place=Budget(0, 600.0), step=Budget(0, 600.0))
    action, _ = choice(in_state(S.READY, failure=CRASH, streak=1), policy=policy)
    assert (action.then, action.grace) == (S.FAILED, 5.0)


@pytest.mark.parametrize(("passed", "ended"), [(119.9, False), (120.0, True)])
def test_a_step_has_launch_timeout_to_come_up(passed: float, ended: bool) -> None:
    action, reason = choice(in_state(S.LAUNCHING), now=100.0 + passed)
    assert (action == EndStep(0, S.PENDING, "1 agents did not report within 120 s", 5.0)) is ended
    assert ended or reason == "its step was started, 1 of 1 agents have not reported"


def failed_and_others(left: int, failed: int) -> RunState:
    replicas = [in_state(S.FAILED)] * failed + [in_state(S.TRAINING)] * left
    return RunState(tuple(replace(replica, id=number) for number, replica in enumerate(replicas)))


@pytest.mark.parametrize(("left", "failed", "fewest"), [(3, 0, 3), (2, 1, 2), (1, 3, 1)])
def test_the_run_goes_on_while_enough_replicas_are_left(left: int, failed: int, fewest: int) -> None:
    assert decide(1.0, failed_and_others(left, failed), Policy(min_replicas=fewest))[0] == []


@pytest.mark.parametrize(("left", "failed", "fewest"), [(2, 1, 3), (1, 3, 2)])
def test_with_fewer_than_min_replicas_the_others_are_stopped(left: int, failed: int, fewest: int) -> None:
    actions, _ = decide(1.0, failed_and_others(left, failed), Policy(min_replicas=fewest))
    why = f"only {left} of {left + failed} replicas are left and --min-replicas is {fewest}"
    assert actions == [EndStep(failed + i, S.STOPPED, why, 30.0) for i in range(left)]


def test_a_replica_that_is_being_given_up_counts_as_lost_already() -> None:
    giving_up = in_state(S.ENDING, then=S.FAILED)
    state = RunState((giving_up, replace(in_state(S.TRAINING), id=1)))
    actions, _ = decide(1.0, state, Policy(min_replicas=2))
    assert [action.replica for action in actions if isinstance(action, EndStep)] == [1]


# --- the end of a run that trains one model together -------------------------------------------------------------


@pytest.mark.parametrize("state", set(State) - FINAL - {S.RUNNING, S.TRAINING, S.FINISHED, S.ENDING, S.PARKED})
def test_a_replica_that_does_not_train_is_not_waited_for_when_its_peers_are_done(state: State) -> None:
    action, _ = choice(in_state(state, failure=CRASH), collective=True, first_done=199.0)
    assert (action.then, action.why) == (S.STOPPED, "the training was finished by its peers")


@pytest.mark.parametrize(
    ("attempt", "committed", "passed", "ended"),
    [
        (1, None, 59.0, False),
        (1, None, 60.0, True),
        (2, 99, 59.0, False),
        (2, 98, 600.0, False),  # it has a part in what was finished, and may be writing the last checkpoint
        (2, None, 0.0, True),  # it has nothing to heal from any more
        (2, 3, 0.0, True),  # it came when its peers were about to leave, and trains from nothing, alone
    ],
)
def test_one_that_trains_has_finish_grace(attempt: int, committed: int | None, passed: float, ended: bool) -> None:
    replica = replace(in_state(S.TRAINING), attempt=attempt, committed=committed)
    finished = replace(in_state(S.DONE), id=1, committed=99)
    state = RunState((replica, finished), started=0.0, collective=True, first_done=200.0)
    actions, _ = decide(200.0 + passed, state, Policy())
    assert bool(actions) is ended


News = tuple[Kind, dict[str, Any]]
COMMITTED: News = (K.COMMIT, {"attempt": 3, "step": 99, "committed": True})
WRITES: News = (K.PHASE, {"attempt": 3, "phase": "checkpoint"})
GOES_ON: News = (K.PHASE, {"attempt": 3, "phase": "train"})
FAILS: News = (K.RANK_FAILED, {"attempt": 3})
ENDS: News = (K.STEP_ENDING, {"then": "STOPPED", "why": "it is late"})
GIVEN_UP: tuple[News, ...] = (ENDS, (K.STEP_EXITED, {}))


def ended_after_its_peer(*news: News) -> EndRun:
    """How a run ends in which one replica finished at step 99 and another had this news."""
    finished = replace(in_state(S.DONE), id=1, committed=99)
    state = RunState((in_state(S.TRAINING), finished), started=0.0, collective=True, first_done=200.0)
    for kind, data in news:
        state = observe(state, Event(250.0, kind, 0, data))
    (end,), _ = decide(300.0, state, Policy())
    assert isinstance(end, EndRun)
    return end


@pytest.mark.parametrize("failure", [FAILS, (K.AGENT_LOST, {"host": "a"}), (K.STEP_EXITED, {"code": 1})])
def test_a_run_whose_last_checkpoint_broke_off_does_not_end_well(failure: News) -> None:
    end = ended_after_its_peer(COMMITTED, WRITES, failure, *GIVEN_UP)
    assert end.code == EXIT_FAILED
    assert end.why == "1 of 2 replicas finished, but replica 0 did not write the last checkpoint to its end"


def test_nor_when_the_replica_was_started_again_and_found_nothing_left_to_train() -> None:
    again = ((K.CLEARING, {}), (K.AGENT_CLEARED, {"index": 0, "port": 1}), (K.RANKS_STARTED, {"attempt": 4}))
    end = ended_after_its_peer(COMMITTED, WRITES, FAILS, *again, (K.RANK_DONE, {"rank": 0}), (K.STEP_EXITED, {}))
    assert (end.code, end.why[:24]) == (EXIT_FAILED, "2 of 2 replicas finished")


@pytest.mark.parametrize(
    "news",
    [
        (COMMITTED, FAILS),  # it wrote nothing
        (COMMITTED, WRITES, GOES_ON, FAILS),
        (COMMITTED, WRITES, ENDS, GOES_ON),  # it was told to end, and wrote on to the end
        (COMMITTED, WRITES, (K.RANK_DONE, {"attempt": 3, "rank": 0})),  # it said no more, and ended well
        ((K.COMMIT, {"step": 50, "committed": True}), WRITES, FAILS),  # its peers went on, and wrote others
    ],
)
def test_a_run_ends_well_when_no_last_checkpoint_was_lost(news: tuple[News, ...]) -> None:
    assert ended_after_its_peer(*news, *GIVEN_UP).code == EXIT_DONE


def test_a_stop_that_falls_into_the_last_checkpoint_is_a_stop() -> None:
    stop = (K.STOP_REQUESTED, {"why": "the time limit is near", "code": 75})
    assert ended_after_its_peer(COMMITTED, WRITES, stop, *GIVEN_UP).code == 75


def test_one_that_commits_further_has_written() -> None:
    further = (K.COMMIT, {"attempt": 3, "step": 100, "committed": True})
    assert ended_after_its_peer(COMMITTED, WRITES, further, FAILS, *GIVEN_UP).code == EXIT_DONE


def test_a_launch_that_fails_later_does_not_break_the_checkpoint_off_once_more() -> None:
    state = RunState((in_state(S.TRAINING), replace(in_state(S.TRAINING), id=1)))
    state = fold_on(state, (0, COMMITTED), (0, WRITES), (0, (K.STEP_EXITED, {"code": 1})), (1, WRITES), (1, GOES_ON))
    launched = (K.STEP_LAUNCHED, {"step": 3, "pid": 5})
    assert fold_on(state, (0, launched), (0, (K.STEP_EXITED, {"step": 3, "code": 1}))).broken_off is None


def test_a_checkpoint_that_broke_off_is_forgotten_when_one_is_written_to_its_end() -> None:
    state = RunState((replace(in_state(S.TRAINING), ranks_per_host=2), replace(in_state(S.TRAINING), id=1)))
    state = fold_on(state, (1, WRITES), (1, COMMITTED), (1, FAILS))
    assert state.broken_off == (1, 99)
    other_rank = (K.PHASE, {**WRITES[1], "rank": 1})
    state = fold_on(state, (1, GOES_ON), (0, WRITES), (0, other_rank), (0, GOES_ON))
    assert state.broken_off == (1, 99)  # late news of the dead, and one of two ranks
    assert fold_on(state, (0, (K.PHASE, {**GOES_ON[1], "rank": 1}))).broken_off is None


def fold_on(state: RunState, *news: tuple[int, News]) -> RunState:
    for replica, (kind, data) in news:
        state = observe(state, Event(250.0, kind, replica, data))
    return state


def test_a_replica_that_waits_for_two_hosts_goes_on_when_it_has_both() -> None:
    missing = replace(in_state(S.PENDING, suspects=("a", "b"), failure=CRASH), hosts=("a", "b", "c"))
    state = RunState((missing, replace(in_state(S.TRAINING), id=1, hosts=("d",))))
    state = observe(state, Event(1.0, K.PARKED, 0, {"why": "x"}))
    for host, then in (("b", S.PARKED), ("a", S.PENDING)):
        state = observe(state, Event(2.0, K.HOST_RETURNED, None, {"host": host}))
        (take,) = [action for action in decide(3.0, state, Policy())[0] if isinstance(action, TakeSpare)]
        assert (take.bad, take.spare) == (host, host)
        state = observe(state, Event(4.0, K.HOST_REPLACED, 0, {"bad": take.bad, "spare": take.spare}))
        assert (state.replicas[0].state, state.replicas[0].hosts, state.spares) == (then, ("a", "b", "c"), ())


def test_without_a_quorum_nobody_is_left_behind() -> None:
    assert choice(in_state(S.TRAINING), now=1e6, collective=False, first_done=1.0)[0] is None


# --- the verdict -------------------------------------------------------------------------------------------------

NEVER_UP = in_state(S.FAILED, failure=replace(CRASH, launch=True))
NO_PROGRESS = in_state(S.FAILED, failure=CRASH)
HAD_TRAINED = in_state(S.FAILED, failure=CRASH, ever_joined=True)
COULD_NOT_COME_BACK = in_state(S.FAILED, failure=replace(CRASH, launch=True), ever_joined=True)
DONE, STOPPED = in_state(S.DONE), in_state(S.STOPPED)


@pytest.mark.parametrize(
    ("replicas", "fewest", "stop", "code"),
    [
        ([DONE, DONE], 2, 0, 0),
        ([DONE, HAD_TRAINED], 1, 0, 1),  # they trained each for itself, and one failed
        ([DONE, STOPPED], 2, 0, 1),  # it waited for a host, in vain
        ([STOPPED, STOPPED], 2, 0, 1),  # both did
        ([DONE, HAD_TRAINED], 2, 0, 1),
        ([HAD_TRAINED, NO_PROGRESS], 1, 0, 1),
        ([HAD_TRAINED, STOPPED], 2, 0, 1),
        ([NO_PROGRESS], 1, 0, 93),
        ([NO_PROGRESS, NEVER_UP], 1, 0, 93),
        ([NEVER_UP, NEVER_UP], 1, 0, 97),
        ([NEVER_UP, HAD_TRAINED], 1, 0, 1),
        ([COULD_NOT_COME_BACK], 1, 0, 1),  # it had trained, and then its host died
        ([STOPPED, STOPPED], 1, 143, 143),
        ([STOPPED, NO_PROGRESS], 1, 75, 75),
        ([DONE, DONE], 2, 143, 0),
    ],
)
def test_the_exit_code_of_the_run(replicas: list[Replica], fewest: int, stop: int, code: int) -> None:
    numbered = tuple(replace(replica, id=number) for number, replica in enumerate(replicas))
    state = RunState(numbered, stop="a stop was asked for" if stop else "", stop_code=stop)
    actions, _ = decide(1.0, state, Policy(min_replicas=fewest))
    assert [action.code for action in actions if isinstance(action, EndRun)] == [code]


# --- messages that get lost ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "says", "missed"),
    [
        (S.RUNNING, {"attempt": 3, "told": 7}, False),
        (S.RUNNING, {"attempt": 2, "told": 7}, True),  # the word to start was lost
        (S.TRAINING, {"attempt": 3, "told": 8}, True),  # a rank's end, or a commit, was lost
        (S.CLEARING, {"attempt": 3, "told": 8}, True),  # that it has cleared was lost
        (S.CLEARING, {"attempt": 2, "told": 7}, False),  # it is still at it
    ],
)
def test_an_agents_sign_of_life_shows_what_was_lost(state: State, says: dict[str, Any], missed: bool) -> None:
    assert _missed(in_state(state), says, 7) is missed


# --- any log whatever --------------------------------------------------------------------------------------------


def events_of(kind: Kind) -> st.SearchStrategy[Event]:
    small = st.integers(0, 3)
    fields: dict[str, st.SearchStrategy[Any]] = {
        name: small for name in ("attempt", "step", "index", "rank", "pid", "age") if name in DATA.get(kind, {})
    }
    fixed = {name: st.just(value) for name, value in DATA.get(kind, {}).items() if name not in fields}
    return st.builds(Event, st.floats(0, 1e6), st.just(kind), st.none() | small, st.fixed_dictionaries(fixed | fields))


START = Event(0.0, K.RUN_STARTED, None, {"replicas": [["a", "b"], ["c", "d"]], "ranks_per_host": 1})


@given(st.lists(st.sampled_from(Kind).flatmap(events_of), max_size=40), st.floats(0, 2e6))
def test_no_log_whatever_makes_observe_or_decide_raise_and_final_states_are_final(log: list[Event], t: float) -> None:
    state = observe(RunState(), START)
    for event in log:
        before, state = state, observe(state, event)
        decide(t, state, POLICY)
        if event.kind is K.RUN_STARTED:
            continue
        for old, new in zip(before.replicas, state.replicas, strict=True):
            assert new.attempt >= old.attempt or event.kind is K.RANKS_STARTED
            assert old.state not in FINAL or new == replace(old, committed=new.committed)
