from dataclasses import replace

import pytest
from observe_histories import T0, TRACEBACK, History, failed_run, healed_run

from slurm_ft.controller.state import State
from slurm_ft.events import Event
from slurm_ft.observe import explain
from slurm_ft.observe.ledger import Ledger
from slurm_ft.observe.status import from_ledger
from slurm_ft.spec import Budget, Policy

USUAL = Policy()


def explained(events: list[Event], policy: Policy = USUAL, t: float = 100.0) -> list[explain.Explained]:
    ledger = Ledger(events)
    return explain.explain(from_ledger(ledger, T0 + t, policy), ledger, T0 + t, policy)


def training() -> History:
    return History(1).launch(0.1, 0).ranks(0.5, 0).progressed(1.0, 0)


def test_a_training_replica_says_how_its_next_failure_would_be_repaired() -> None:
    (found,) = explained(training().sorted())
    assert found.reason == "it trains since 99 s"
    assert found.next == "if a rank fails, its ranks are restarted in place (0 of 3 used in the last 600 s)"


def test_a_used_up_rung_leads_to_the_next_one_and_then_to_the_end() -> None:
    events = training().sorted()
    (found,) = explained(events, Policy(in_place=Budget(0, 600.0)))
    assert "its step is started again (0 of 2" in found.next
    (found,) = explained(events, Policy(in_place=Budget(0, 600.0), step=Budget(0, 600.0)))
    assert "given up" in found.next


@pytest.mark.parametrize(("unfit", "words"), [({}, "a spare takes the place"), ({"node9": "full disk"}, "given up")])
def test_a_fit_spare_comes_before_the_end(unfit: dict[str, str], words: str) -> None:
    ledger = Ledger(training().sorted())
    state = replace(ledger.state, spares=("node9",), unfit=unfit)
    none = Budget(0, 600.0)
    assert words in explain.what_next(T0, state.replicas[0], Policy(in_place=none, step=none), state)


def test_every_state_that_is_not_final_says_what_comes_next() -> None:
    ledger = Ledger(training().sorted())
    replica = ledger.state.replicas[0]
    for state in State:
        words = explain.what_next(T0, replica.to(state, T0), Policy(), ledger.state)
        assert bool(words) == (state not in (State.DONE, State.FAILED, State.STOPPED))


def test_an_ended_run_says_why_each_replica_ended_and_that_nothing_comes() -> None:
    reasons = [(item.state, item.reason, item.next) for item in explained(failed_run())]
    assert reasons == [
        ("STOPPED", "only 1 of 2 replicas are left", ""),
        ("FAILED", "rank 0 ended with exit code 1; 1 restarts are used up", ""),
    ]


def test_the_first_failure_is_told_with_its_log_and_traceback() -> None:
    ledger = Ledger(failed_run())
    snapshot = from_ledger(ledger, T0 + 20)
    lines = explain.lines(explain.explain(snapshot, ledger, T0 + 20, Policy()), snapshot, Policy())
    assert "first failure of replica 1: rank 0 ended with exit code 1 on node2, attempt 1" in lines
    assert "  log: replicas/1/attempt_1/0.log" in lines
    assert [line[2:] for line in lines if line.startswith("  ") and line[2:] in TRACEBACK][-1] == "ValueError: no"
    assert "exit code 1: the training failed" in lines


def test_a_long_traceback_keeps_its_end() -> None:
    h = training().killed(2.0, 0, traceback="".join(f"line {n}\n" for n in range(100)))
    (found,) = explained(h.sorted())
    assert found.failure is not None
    lines = explain.failure_lines(0, found.failure)
    assert lines[-1] == "  line 99"
    assert "  ... 60 lines are left out" in lines


def test_every_time_of_the_policy_is_told() -> None:
    text = "\n".join(explain.policy_lines(Policy()))
    assert all(name in text for name in ("min_replicas", "in_place", "step", *explain.TIMES))


def test_the_policy_table_knows_every_time_that_a_policy_has() -> None:
    times = {name for name, value in vars(Policy()).items() if isinstance(value, float)}
    assert times == set(explain.TIMES)


def test_a_run_that_was_left_says_so_and_promises_nothing() -> None:
    ledger = Ledger(healed_run()[:30])
    snapshot = from_ledger(ledger, T0 + 20)
    found = explain.explain(snapshot, ledger, T0 + 20, Policy(), alive=False)
    assert [item.next for item in found] == ["", "", ""]
    assert "nobody looks after this run" in explain.lines(found, snapshot, Policy(), alive=False)[0]


def test_a_run_that_waits_says_what_slurm_says() -> None:
    ledger = Ledger()
    lines = explain.lines([], from_ledger(ledger, T0), Policy(), None, "its job 12: waiting for nodes (Priority)")
    assert lines[0] == "the run has not started yet: its job 12: waiting for nodes (Priority)"
