"""An agent that has heard no controller for long gives the run up only when nobody looks after it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from slurm_ft import events
from slurm_ft import lease as leases
from slurm_ft.agent import election
from slurm_ft.agent.successor import Successor
from slurm_ft.events import Kind
from slurm_ft.lease import Claim, Lease
from slurm_ft.paths import RunPaths
from slurm_ft.spec import Policy, ReplicaSpec, RunSpec

STALE = 0.3


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    monkeypatch.setattr(election, "RENEW", STALE / 3)
    paths = RunPaths(tmp_path / "run")
    paths.create()
    assert leases.take(paths.lease, Claim(4, "head", job_id="L1"))
    return paths


def successor(paths: RunPaths) -> Successor:
    spec = RunSpec("r", ReplicaSpec(("true",)), 1, cluster="local", policy=Policy(head_timeout=STALE))
    return Successor(paths, spec, 0, "here", lambda: 900.0, lambda: "127.0.0.1", lambda _: None)


def test_a_run_that_nobody_looks_after_is_given_up_once(paths: RunPaths) -> None:
    async def story() -> None:
        await asyncio.gather(successor(paths).give_up(), successor(paths).give_up())

    asyncio.run(story())
    claim = leases.newest(paths.lease)
    assert claim is not None and (claim.epoch, claim.ended) == (5, 75)
    assert [event.kind for event in events.read(paths.events)] == [Kind.HEAD_STARTED, Kind.RUN_ENDED]


def test_a_run_whose_lease_is_renewed_is_left_alone_by_an_agent_that_was_cut_off(paths: RunPaths) -> None:
    async def renew(lease: Lease) -> None:
        while True:
            lease.renew()
            await asyncio.sleep(STALE / 10)

    async def story() -> None:
        with contextlib.closing(Lease(paths.lease, leases.read(paths.lease, 4))) as lease:
            head = asyncio.ensure_future(renew(lease))
            await successor(paths).give_up()
            head.cancel()

    asyncio.run(story())
    claim = leases.newest(paths.lease)
    assert claim is not None and (claim.epoch, claim.ended) == (4, None)
    assert list(events.read(paths.events)) == []


def test_a_run_that_has_ended_is_not_ended_again(paths: RunPaths) -> None:
    with contextlib.closing(Lease(paths.lease, leases.read(paths.lease, 4))) as lease:
        lease.release(0)
    asyncio.run(successor(paths).give_up())
    claim = leases.newest(paths.lease)
    assert claim is not None and (claim.epoch, claim.ended) == (4, 0)
