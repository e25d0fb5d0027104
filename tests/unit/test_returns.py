"""No spare is left: the run shrinks, and grows again when the host is back."""

from __future__ import annotations

import asyncio
from typing import Any

from slurm_ft.controller.returns import INTERVAL, Returns
from slurm_ft.controller.state import Replica, RunState, State
from slurm_ft.events import Kind
from slurm_ft.slurm.client import Unreachable
from slurm_ft.spec import Budget, Policy
from tests.world import World

POLICY = Policy(min_replicas=1, in_place=Budget(1, 600.0), step=Budget(1, 1800.0), backoff=0.0)


def with_a_dead_host() -> World:
    """Replica 1 of 2 has lost its host; the step on it was tried again in vain."""
    world = World(replicas=2, policy=POLICY)
    world.up(0), world.up(1)
    world.silent(1)
    world.exit(1)
    world.exit(1, "srun exited with code 97")
    return world


def test_a_replica_whose_host_is_gone_waits_and_the_others_go_on() -> None:
    world = with_a_dead_host()
    assert world.replica(1).state is State.PARKED
    assert "it waits for node1, and the others go on" in world.supervisor.reasons[1]
    assert world.code is None
    world.restart()
    assert world.replica(1).state is State.PARKED


def test_it_grows_again_when_the_host_is_back_and_has_its_budgets_anew() -> None:
    world = with_a_dead_host()
    world.take(Kind.HOST_BACK, 1, host="node1")
    world.up(1)
    assert world.replica(1).state is State.TRAINING
    world.silent(1)
    world.exit(1)
    world.up(1)  # a step restart is there again


def test_when_the_others_have_finished_nobody_is_waited_for() -> None:
    world = with_a_dead_host()
    world.done(0)
    world.exit(0)
    world.settle()
    assert world.replica(1).state is State.FAILED


def test_when_too_few_are_left_nobody_waits_either() -> None:
    world = World(replicas=2, policy=Policy(min_replicas=2, step=Budget(1, 1800.0), backoff=0.0))
    world.up(0), world.up(1)
    world.silent(1)
    world.exit(1)
    world.exit(1, "srun exited with code 97")
    world.settle()
    assert world.replica(1).state is State.FAILED and world.code is not None


def test_a_program_that_fails_is_not_parked() -> None:
    world = World(replicas=2, policy=POLICY)
    world.up(0), world.up(1)
    for _ in range(2):
        world.fail(1)
        world.cleared(1)
    world.exit(1)
    world.join(1)
    world.fail(1)
    world.cleared(1)
    world.exit(1)
    assert world.replica(1).state is State.FAILED


class Client:
    def __init__(self, ours: Any, usable: Any) -> None:
        self.ours, self.found, self.asked = ours, usable, 0

    def hosts_of_job(self, job_id: str) -> Any:
        self.asked += 1
        return self.ours

    def usable(self, hosts: Any) -> Any:
        return self.found


def asked(client: Client, *times: float) -> list[list[tuple[int, str]]]:
    state = RunState((Replica(0, ("n1",), state=State.PARKED, suspects=("n1",)),))

    async def ask() -> list[list[tuple[int, str]]]:
        returns = Returns("7", client)  # type: ignore[arg-type]
        return [await returns.back(state, now) for now in times]

    return asyncio.run(ask())


def test_a_host_counts_as_back_when_slurm_reaches_it_and_it_is_in_the_job_still() -> None:
    """RW-46, RW-52: a host that Slurm has taken out of the job is not ours; no answer is no answer."""
    assert asked(Client(("n0", "n1"), frozenset({"n1"})), 0.0) == [[(0, "n1")]]
    assert asked(Client(("n0",), frozenset({"n1"})), 0.0) == [[]]
    assert asked(Client(("n0", "n1"), frozenset()), 0.0) == [[]]
    assert asked(Client(Unreachable("x"), frozenset({"n1"})), 0.0) == [[]]


def test_slurm_is_asked_once_a_minute_at_most() -> None:
    client = Client(("n0",), frozenset())
    asked(client, 0.0, 1.0, INTERVAL - 1, INTERVAL + 1)
    assert client.asked == 2
