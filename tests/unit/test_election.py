"""Who becomes the next head: in turns, one at a time, only when both signs are there, and bounded."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_ft import lease
from slurm_ft.agent import successor
from slurm_ft.agent.election import MOST_STAGGER, MOST_TRIES, STAGGER, Election
from slurm_ft.agent.successor import Successor
from slurm_ft.controller.peers import Peer, Peers
from slurm_ft.lease import Claim
from slurm_ft.paths import RunPaths
from slurm_ft.spec import ReplicaSpec, RunSpec

TIMEOUT = 10.0
OLD = Claim(1, "node1", beat=7)


def stands_at(election: Election, seen: Claim | None = OLD, silent_from: float = 0.0, until: float = 60.0) -> float:
    """When the agent stands, looking twice a second; infinity for never."""
    now = 2.0
    while now <= until:
        if election.stands(now, now - silent_from, seen):
            return now
        now += 0.5
    return float("inf")


def test_agents_stand_in_turns_after_the_time_out() -> None:
    assert stands_at(Election(0, "node2", TIMEOUT)) == TIMEOUT
    assert stands_at(Election(3, "node5", TIMEOUT)) == TIMEOUT + 3 * STAGGER
    assert stands_at(Election(10_000, "node9", TIMEOUT)) == TIMEOUT + MOST_STAGGER


def test_the_lost_heads_own_host_comes_last() -> None:
    assert stands_at(Election(0, "node1", TIMEOUT)) == TIMEOUT + MOST_STAGGER


def test_nobody_stands_while_the_lease_is_renewed_or_cannot_be_read_or_the_run_is_over() -> None:
    election = Election(0, "node2", TIMEOUT)
    renewed = [election.stands(now, now, Claim(1, "node1", beat=now)) for now in range(1, 60)]
    assert not any(renewed)
    assert stands_at(Election(0, "node2", TIMEOUT), None) == float("inf")
    assert stands_at(Election(0, "node2", TIMEOUT), Claim(1, "node1", ended=0)) == float("inf")


def test_nobody_stands_while_a_controller_is_heard() -> None:
    election = Election(0, "node2", TIMEOUT)
    assert not any(election.stands(float(now), 1.0, OLD) for now in range(60))


def test_who_has_failed_twice_leaves_it_to_the_others() -> None:
    election = Election(0, "node2", TIMEOUT)
    election.tries = MOST_TRIES
    assert stands_at(election) == float("inf")


@settings(max_examples=60)
@given(
    heads=st.integers(2, 6),
    works=st.lists(st.booleans(), min_size=6, max_size=6),
    starts=st.lists(st.floats(0, 3), min_size=6, max_size=6),
)
def test_one_head_at_a_time_whoever_can_start_one(
    tmp_path_factory, heads: int, works: list[bool], starts: list[float]
) -> None:
    """Agents that notice at different times, some of which can start no head: every epoch has one owner, the run
    has a head as soon as one can, and then nobody stands any more."""
    folder: Path = tmp_path_factory.mktemp("run") / "lease"
    lease.take(folder, OLD)
    elections = [Election(place, f"node{place + 2}", TIMEOUT) for place in range(heads)]
    owners: dict[int, int] = {1: -1}
    head: int | None = None
    beat, now = 0, 0.0
    while now < 200.0:
        now += 0.5
        if head is not None:
            beat += 1
            newest = lease.newest_epoch(folder)
            (folder / str(newest)).write_bytes(Claim(newest, f"node{head + 2}", beat=beat).to_bytes())
        seen = {place: lease.newest(folder) for place in range(heads)}  # all look before anybody acts
        for place, election in enumerate(elections):
            there = seen[place]
            silence = 0.0 if head is not None else now - starts[place]
            if there is not None and election.stands(now, silence, there):
                epoch = there.epoch + 1
                if lease.take(folder, Claim(epoch, f"node{place + 2}", pid=1)):
                    assert epoch not in owners
                    owners[epoch] = place
                    election.tries += 1
                    if works[place]:
                        assert head is None, "two heads"
                        head = place
    assert (head is not None) == any(works[:heads])
    assert len(owners) <= 1 + MOST_TRIES * heads


def test_a_controller_that_hears_fewer_than_half_of_its_agents_may_be_the_one_that_is_cut_off() -> None:
    peers = Peers(None)  # type: ignore[arg-type]
    assert peers.most_are_heard(100.0, 4.0, "node1")
    for replica, heard in enumerate((99.0, 99.0, 50.0, 50.0)):
        peers.add(b"%d" % replica, Peer(replica, 1, 0, f"node{replica + 2}", heard))
    assert peers.most_are_heard(100.0, 4.0, "node1")
    peers.add(b"4", Peer(4, 1, 0, "node6", 50.0))
    assert not peers.most_are_heard(100.0, 4.0, "node1")
    assert peers.most_are_heard(100.0, 4.0, "node6")  # nobody cuts us off from our own host


def test_a_claim_is_renewed_while_its_head_starts_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.create()
    claim = lease.Claim(2, "node2", pid=os.getpid())
    assert lease.take(paths.lease, claim)
    beats = list[int]()

    class Starting:
        def poll(self) -> None:
            beats.append(lease.read(paths.lease, 2).beat)
            if len(beats) == 3:
                lease.Lease(paths.lease, dataclasses.replace(claim, pid=1)).renew()  # the head is there

    monkeypatch.setattr(lease, "RENEW", 0.0)
    monkeypatch.setattr(successor, "LOOK_AGAIN", 0.0)
    agent = Successor(paths, RunSpec("r", ReplicaSpec(("true",)), 1), 0, "node2", float, str, print)
    assert asyncio.run(agent._is_up(claim, Starting()))  # type: ignore[arg-type]
    assert beats == [0, 1, 2] and lease.read(paths.lease, 2).pid == 1
