"""RW-24: the same crash again and again is told from bad luck, and a bad host from a bad program."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_ft.controller.sameness import Mark, repeated, sign, worn_out
from slurm_ft.spec import Budget, Policy
from tests.world import World

NAN = """Traceback (most recent call last):
  File "/home/u/train.py", line 90, in <module>
    step(batch)
  File "/home/u/train.py", line 33, in step
    raise FloatingPointError(f"loss is NaN at step {n}")
FloatingPointError: loss is NaN at step 1290
"""


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"traceback": NAN, "code": 1}, "FloatingPointError at /home/u/train.py:33"),
        ({"traceback": "no Python here", "signal": "SIGSEGV", "code": -11}, "SIGSEGV"),
        ({"code": 3}, "exit code 3"),
        ({"hung": True, "code": 3}, "it stood still"),
        ({"traceback": NAN, "injected": True}, ""),
        ({}, ""),
    ],
)
def test_the_sign_of_a_failure_is_its_kind_and_its_place_not_its_words(data: dict[str, Any], expected: str) -> None:
    assert sign(data) == expected


def marks(*items: tuple[int, str, int | None]) -> list[Mark]:
    return [Mark(float(n), replica, f"n{replica}", what, step) for n, (replica, what, step) in enumerate(items)]


A, B = "A at x:1", "B at x:2"


@pytest.mark.parametrize(
    ("found", "replicas", "again"),
    [
        (marks(*[(0, A, 5)] * 3), [0], True),
        (marks(*[(0, A, 5)] * 2), [0], False),
        (marks((0, A, 5), (0, A, 6), (0, A, 7)), [0], False),
        (marks((0, A, 5), (0, B, 5), (0, A, 5)), [0], False),
        (marks(*[(0, A, 5)] * 3), [0, 1], False),
        (marks(*[(0, A, 5), (1, A, 5)] * 3), [0, 1, 2], True),
        (marks(*[(0, A, None)] * 3), [0], True),
        (marks(*[(0, A, 5)] * 3, (0, "", None)), [0], False),
    ],
    ids=["thrice", "twice", "it gets on", "another failure between", "one of two replicas", "two of three", "no step",
         "a lost host comes after"],
)  # fmt: skip
def test_only_the_same_failure_at_the_same_step_in_most_replicas_is_no_use(
    found: list[Mark], replicas: list[int], again: bool
) -> None:
    assert bool(repeated(found, replicas, 3)) is again
    assert not repeated(found, replicas, 0)


def test_a_host_is_worn_out_when_far_more_fails_there_than_elsewhere() -> None:
    here = [Mark(float(n), n % 2, "bad", A, n) for n in range(5)]
    assert worn_out(here, 10.0, Budget(4, 100.0)) == {"bad"}
    assert worn_out(here, 10.0, Budget(5, 100.0)) == frozenset()
    assert worn_out(here, 200.0, Budget(4, 100.0)) == frozenset()
    elsewhere = [Mark(float(n), 2, "other", A, n) for n in range(3)]
    assert worn_out([*here, *elsewhere], 10.0, Budget(4, 100.0)) == frozenset()


def crash(world: World, replica: int, step: int | None = 1290) -> None:
    attempt = world.replica(replica).attempt
    host = world.replica(replica).hosts[0]
    data = {"attempt": attempt, "rank": 0, "host": host, "traceback": NAN, "code": 1, "train_step": step}
    from slurm_ft.events import Kind

    world.take(Kind.RANK_FAILED, replica, what="rank 0 exited with code 1: FloatingPointError", **data)


def test_a_run_that_fails_at_the_same_step_in_all_replicas_ends_with_93_before_its_budgets_do() -> None:
    world = World(replicas=2, policy=Policy(in_place=Budget(100, 600.0), backoff=0.0))
    world.up(0), world.up(1)
    for _ in range(2):
        for replica in (0, 1):
            crash(world, replica)
            world.cleared(replica)
            world.progress(replica)
    crash(world, 0)
    assert world.code is None
    world.cleared(0)
    crash(world, 1)
    world.settle()
    assert world.code == 93
    why = world.recorded[-1].data["why"]
    assert why == "the same failure at step 1290 3 times in 2 of 2 replicas: FloatingPointError at /home/u/train.py:33"


def test_a_run_that_gets_further_each_time_goes_on() -> None:
    world = World(policy=Policy(in_place=Budget(100, 600.0), backoff=0.0))
    world.up(0)
    for step in range(10):
        crash(world, 0, step)
        world.cleared(0)
        world.progress(0)
    assert world.code is None


def test_a_host_that_wears_replicas_out_is_replaced_by_a_spare() -> None:
    policy = Policy(in_place=Budget(100, 600.0), host=Budget(2, 1800.0), backoff=0.0)
    world = World(replicas=2, spares=1, policy=policy)
    world.up(0), world.up(1)
    for step in range(3):
        crash(world, 1, step)
        world.cleared(1)
        if step < 2:
            world.progress(1)
    world.exit(1)
    world.up(1)
    assert world.replica(1).hosts == ("spare0",)


def test_a_pause_before_a_repair_is_an_event_with_a_due_time_and_survives_the_controller() -> None:
    world = World(policy=Policy(in_place=Budget(9, 600.0), backoff=8.0))
    world.up(0)
    for _ in range(2):
        crash(world, 0, None)
        world.cleared(0)
    delayed = [event for event in world.recorded if event.kind == "delayed"]
    assert len(delayed) == 1
    assert delayed[0].data["until"] == world.replica(0).due > world.now
    world.restart()
    world.wait(7.0)
    assert world.replica(0).attempt == 2
    world.wait(2.0)
    assert world.replica(0).attempt == 3
