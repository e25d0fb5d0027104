"""Hosts with a network of their own, on a real Slurm: one is cut off in mid-training, replaced, and healed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_ft import events
from slurm_ft.errors import UsageError
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


def answers(cluster: DevCluster, host: str) -> bool:
    """Does a port on the host that nobody listens on refuse a connection? It does when packets get there and back."""
    place = (cluster.network.address(cluster.shape.subnet, host), 1)
    try:
        socket.create_connection(place, timeout=0.5).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def test_a_host_has_a_name_and_an_address_of_its_own_and_can_be_cut_healed_and_slowed(cluster: DevCluster) -> None:
    script = "hostname; getent hosts node4; ip -o -4 addr show eth0"
    for host in ("node2", "node3"):
        argv = cluster.network.inside(host, ["sh", "-c", script])
        words = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True).stdout.split()
        assert words[:3] == [host, cluster.network.address(cluster.shape.subnet, "node4"), "node4"]
        assert f"{cluster.network.address(cluster.shape.subnet, host)}/24" in words
    assert answers(cluster, "node3")
    cluster.cut("node3")
    assert cluster.is_cut("node3") and not cluster.is_cut("node2")
    assert not answers(cluster, "node3")
    assert answers(cluster, "node2")
    cluster.heal("node3")
    assert answers(cluster, "node3")
    cluster.slow("node3", rate="10mbit")
    assert answers(cluster, "node3")
    try:
        cluster.slow("node3", delay="10ms")
    except UsageError as error:
        assert "netem" in error.message, "it says so where the kernel cannot"
    cluster.heal("node3")
    with pytest.raises(UsageError, match="how slow"):
        cluster.slow("node3")
    with pytest.raises(UsageError, match="no host 'node9' here"):
        cluster.cut("node9")


def test_what_a_cluster_left_behind_is_swept_up_and_a_living_one_is_left_alone(
    cluster: DevCluster, tmp_path: Path
) -> None:
    left = network.Network(tmp_path, ("node1",))
    left.make(left.choose_subnet())
    assert network.sweep(lambda folder: folder != tmp_path) == [left.id]
    names = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, timeout=20).stdout
    assert left.bridge not in names and cluster.network.bridge in names
    assert answers(cluster, "node1")


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


def test_a_head_that_was_cut_off_is_followed_by_another_and_harms_nothing_when_it_is_back(
    cluster: DevCluster, job: Job
) -> None:
    for replica in range(3):
        job.until(Kind.COMMIT, replica, lambda e: e.data["committed"])
    victim = job.events(Kind.RUN_STARTED)[0].data["head_host"]
    joined = {r: job.events(Kind.AGENT_JOINED, r)[-1].data["host"] for r in range(3)}
    others = [replica for replica, host in joined.items() if host != victim]
    cluster.cut(victim)
    job.until(Kind.HEAD_STARTED, None, lambda e: e.epoch == 2, 60)
    new = job.until(Kind.CONTROLLER_STARTED, None, lambda e: e.epoch == 2, 60)
    assert new.data["host"] != victim
    for replica in others:
        job.until(Kind.COMMIT, replica, lambda e: e.epoch == 2 and e.data["committed"], 60)

    def controllers() -> list[int]:
        return [p.pid for p in cluster.processes(victim) if b"slurm_ft.controller.main" in cmdline(p.pid)]

    # The run folder it still reaches, and finds there that it has been followed.
    wait_until(lambda: not controllers(), 30, "the old controller leaves")
    cluster.heal(victim)
    for replica in others:
        last = commits(job, replica)[-1]
        job.until(Kind.COMMIT, replica, lambda e, last=last: e.data["step"] > last.data["step"] + 5, 60)
        assert len(job.events(Kind.RANKS_STARTED, replica)) == 1
        steps = [event.data["step"] for event in commits(job, replica)]
        assert steps == sorted(set(steps))
    assert [event.epoch for event in job.events(Kind.HEAD_STARTED)] == [1, 2]
    job.slurm_ft("stop", str(job.run))
    job.until(Kind.RUN_ENDED, None, lambda e: e.epoch == 2, 60)
