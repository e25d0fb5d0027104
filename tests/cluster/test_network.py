"""Hosts with a network of their own, on a real Slurm: one is cut off in mid-training, replaced, and healed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_ft import events
from slurm_ft.events import Kind
from slurm_ft.testing import devcluster_network as network
from slurm_ft.testing.devcluster import DevCluster
from tests.cluster.conftest import wait_until
from tests.cluster.test_training import PROGRAMS, Job

PATIENCE = "600,600,5"
"""Each replica's own time-out for a collective, in seconds: that of the survivors is longer than this test may take,
and the one that is cut off soon looks for a new quorum."""


@pytest.fixture(scope="module")
def cluster(slurm_programs: None) -> Iterator[DevCluster]:
    """Four hosts, each in a network of its own."""
    if why := network.obstacle():
        pytest.skip(why)
    parent = Path(tempfile.mkdtemp(prefix="sft-", dir="/tmp"))
    with DevCluster(hosts=4, node_timeout=60, folder=parent / "c", die_with=os.getpid(), netns=True) as cluster:
        yield cluster
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert network.cluster_id(cluster.folder) not in left
    shutil.rmtree(parent)


@pytest.fixture
def job(cluster: DevCluster, tmp_path: Path) -> Iterator[Job]:
    program = ("python", str(PROGRAMS / "user_steps.py"), "100000", PATIENCE, str(tmp_path))
    job = Job(cluster, tmp_path, "--replicas", "3", "--spares", "1", "--", *program)
    yield job
    for host in cluster.hosts:
        cluster.heal(host)
    subprocess.run(["scancel", "--full", "--user", "root"], env=job.environ, timeout=30)
    job.output()


def commits(job: Job, replica: int, attempt: int = 1) -> list[events.Event]:
    found = job.events(Kind.COMMIT, replica)
    return [event for event in found if event.data["committed"] and event.data["attempt"] == attempt]


def ranks_on(cluster: DevCluster, host: str) -> list[int]:
    """Training processes on a host."""
    return [p.pid for p in cluster.processes(host) if b"user_steps.py" in cmdline(p.pid)]


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_host_that_is_cut_off_is_replaced_and_does_not_disturb_the_run_when_it_is_back(
    cluster: DevCluster, job: Job, tmp_path: Path
) -> None:
    hold = tmp_path / "hold-2"
    for replica in range(3):
        job.until(Kind.COMMIT, replica, lambda e: e.data["committed"])
    # Everything goes by the fabric's addresses: with one host each, nothing on loopback reaches a peer.
    joined = {r: job.events(Kind.AGENT_JOINED, r)[-1].data for r in range(3)}
    assert len({about["address"] for about in joined.values()}) == 3
    assert all(about["address"].startswith(network.BLOCK) for about in joined.values())
    assert network.BLOCK in job.events(Kind.CONTROLLER_STARTED)[-1].data["endpoint"]

    victim = joined[2]["host"]
    assert ranks_on(cluster, victim)
    hold.touch()
    wait_until((tmp_path / "held").exists, 30, "its peers wait for it in their collective")
    cluster.cut(victim)
    hold.unlink()
    lost = job.until(Kind.AGENT_LOST, 2)
    told = job.until(Kind.SURVIVORS_TOLD, 2)
    assert told.data["told"] == [0, 1]
    assert commits(job, 0)[-1].t < lost.t - 5, "the survivors stood still until they were told"
    for replica in (0, 1):
        job.until(Kind.COMMIT, replica, lambda e: e.data["committed"] and e.t > told.t, 30)
    replaced = job.until(Kind.HOST_REPLACED, 2)
    assert replaced.data == {"bad": victim, "spare": job.events(Kind.RUN_STARTED)[0].data["spares"][0]}
    back = job.until(Kind.COMMIT, 2, lambda e: e.data["committed"] and e.data["attempt"] == 2, 60)

    assert ranks_on(cluster, victim), "its ranks live on, and nobody can reach them"
    cluster.heal(victim)
    wait_until(lambda: not ranks_on(cluster, victim), 30, "the stale agent was sent away, with its ranks")
    job.until(Kind.HOST_RETURNED, None, lambda e: e.data["host"] == victim)
    for replica, attempt in ((0, 1), (1, 1), (2, 2)):
        last = commits(job, replica, attempt)[-1]
        job.until(Kind.COMMIT, replica, lambda e, last=last: e.data["step"] > last.data["step"] + 5)
    # What the stale rank committed or asked for changes nothing, and no survivor was restarted.
    assert [e for e in job.events(Kind.COMMIT, 2) if e.t > lost.t and e.data["attempt"] == 1] == []
    assert not job.events(Kind.RANK_FAILED)
    assert {e.data["attempt"] for r in (0, 1) for e in job.events(Kind.RANKS_STARTED, r)} == {1}
    quorums = {e.data["quorum_id"] for e in job.events(Kind.QUORUM) if e.t > back.t + 1}
    assert quorums == set(), "the stale rank was in no quorum"
    for replica in range(3):
        steps = [e.data["step"] for e in job.events(Kind.COMMIT, replica) if e.data["committed"]]
        assert steps == sorted(set(steps))
    job.slurm_ft("stop", str(job.run))
    job.finish(143)
