"""What is done about a lost process or host: the ladder, its budgets, and what handlers may answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft.mesh.supervision import Action, Decision, Loss, Repair, decide, follow
from slurm_ft.spec import Budget, Policy

POLICY = Policy(in_place=Budget(2, 100.0), step=Budget(1, 1000.0), backoff=1.0, backoff_max=8.0)
PROCESS, HOST, SILENT = Loss(0, 3), Loss(0), Loss(0, None, silent=True)


def climb(loss: Loss, policy: Policy, spares: int, seconds: float = 1.0) -> list[Action]:
    """What is done about a thing that is lost again and again, every so many seconds, until nothing is."""
    repairs: list[Repair] = []
    done: list[Action] = []
    now = 0.0
    while not done or done[-1] is not Action.PROPAGATE:
        decision = decide(now, loss, repairs, policy, spares)
        done.append(decision.action)
        repairs.append(Repair(now, decision.action, loss.slot, loss.index))
        spares -= decision.action is Action.REPLACE
        now += seconds
    return done


def test_a_process_climbs_from_its_place_to_the_step_to_the_spares_to_its_user() -> None:
    restart, host, spare, user = Action.RESTART, Action.RESTART_HOST, Action.REPLACE, Action.PROPAGATE
    assert climb(PROCESS, POLICY, 2) == [restart, restart, host, spare, spare, user]
    assert climb(HOST, POLICY, 0) == [host, user]
    assert climb(SILENT, POLICY, 1) == [spare, host, user]


def test_another_process_and_another_host_have_budgets_of_their_own() -> None:
    used = [Repair(0.0, Action.RESTART, 0, 3)] * 2 + [Repair(0.0, Action.RESTART_HOST, 1)]
    assert decide(1.0, PROCESS, used, POLICY, 0).action is Action.RESTART_HOST
    assert decide(1.0, Loss(0, 4), used, POLICY, 0).action is Action.RESTART
    assert decide(1.0, HOST, used, POLICY, 0).action is Action.RESTART_HOST
    assert decide(1.0, Loss(1), used, POLICY, 0).action is Action.PROPAGATE


def test_a_budget_comes_back_with_time() -> None:
    used = [Repair(0.0, Action.RESTART, 0, 3)] * 2
    assert decide(99.0, PROCESS, used, POLICY, 0).action is Action.RESTART_HOST
    assert decide(100.0, PROCESS, used, POLICY, 0).action is Action.RESTART


def test_the_first_repair_comes_at_once_and_the_next_ones_wait() -> None:
    policy = Policy(in_place=Budget(50, 600.0), backoff=1.0, backoff_max=8.0)
    delays = [
        decide(1.0, PROCESS, [Repair(0.0, Action.RESTART, 0, 3)] * n, policy, 0).delay for n in (0, 1, 2, 3, 4, 5)
    ]
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 8.0]
    assert decide(70.0, PROCESS, [Repair(0.0, Action.RESTART, 0, 3)] * 4, policy, 0).delay == 0.0


@pytest.mark.parametrize("answer", [None, False, 0, ""])
def test_a_falsy_answer_leaves_the_failure_to_the_next(answer: object) -> None:
    assert follow(answer, 0.0, PROCESS, [], POLICY, 1) is None


@pytest.mark.parametrize("answer", [True, 1, "done", object()])
def test_any_other_answer_means_handled(answer: object) -> None:
    assert follow(answer, 0.0, PROCESS, [], POLICY, 1) == Decision(Action.LEAVE, 0.0, "handled by the mesh's owner")


def test_an_action_is_done_even_without_budget_but_not_without_a_spare() -> None:
    used = [Repair(0.0, Action.RESTART, 0, 3)] * 5

    def action(answer: Action, loss: Loss, spares: int) -> Action | None:
        found = follow(answer, 1.0, loss, used, POLICY, spares)
        return found.action if found is not None else None

    assert action(Action.RESTART, PROCESS, 0) is Action.RESTART
    assert action(Action.RESTART, HOST, 0) is Action.RESTART_HOST
    assert action(Action.REPLACE, PROCESS, 1) is Action.REPLACE
    assert action(Action.REPLACE, PROCESS, 0) is None
    assert [action(a, PROCESS, 0) for a in (Action.SHRINK, Action.PROPAGATE)] == [Action.SHRINK, Action.PROPAGATE]


@given(
    st.integers(0, 5), st.integers(0, 5), st.integers(0, 4), st.sampled_from([PROCESS, HOST, SILENT]),
    st.floats(0.0, 20.0),
)  # fmt: skip
def test_the_ladder_always_ends_within_its_budgets(
    in_place: int, step: int, spares: int, loss: Loss, seconds: float
) -> None:
    policy = Policy(in_place=Budget(in_place, 1e6), step=Budget(step, 1e6))
    done = climb(loss, policy, spares, seconds)
    assert done.count(Action.RESTART) == (in_place if loss.index is not None else 0)
    assert done.count(Action.RESTART_HOST) == step and done.count(Action.REPLACE) == spares
    assert done[-1] is Action.PROPAGATE
