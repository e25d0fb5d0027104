"""Faults on purpose in a real job: what only progress shows, what the whole run shares, and what Slurm knows of."""

from __future__ import annotations

from slurm_ft.controller import quorum_ids
from slurm_ft.events import Kind
from slurm_ft.testing.devcluster import DevCluster
from tests.cluster.conftest import wait_until
from tests.cluster.test_training import PROGRAMS, Job, submit  # noqa: F401

HANG_AFTER = "15"
"""Longer than the program's 10 s for a collective: who hangs may do so in one, and then its peers stand still for
these 10 s, and one that is rid of it a moment after another does not hang."""


def test_a_hang_the_lighthouse_and_a_stalled_log_are_survived_in_one_job(devcluster: DevCluster, submit) -> None:  # noqa: F811
    program = ("python", str(PROGRAMS / "user_localsgd.py"), "220")
    job: Job = submit("--replicas", "3", "--hang-after", HANG_AFTER, "--", *program)
    for replica in range(3):
        job.until(Kind.COMMIT, replica)

    job.slurm_ft("inject", str(job.run), "--kind", "lighthouse")
    for replica in range(3):  # in a quorum whose id is far beyond those that were seen
        job.until(Kind.COMMIT, replica, lambda e: e.data["quorum_id"] > quorum_ids.MARGIN and e.data["committed"])

    def noted(words: str) -> bool:
        texts = (event.data["text"] for event in job.events(Kind.NOTE))
        return any(words in text and "events waited in memory" in text for text in texts)

    for kind, words in (("slow-fs", "does not answer"), ("disk-full", "cannot be written")):
        job.slurm_ft("inject", str(job.run), "--kind", kind, "--seconds", "2")
        wait_until(lambda: noted(words), 60, f"a note after {kind}")  # noqa: B023

    job.slurm_ft("inject", str(job.run), "--replica", "1", "--kind", "gil-deadlock")
    failed = job.until(Kind.RANK_FAILED, 1)
    assert failed.data["hung"] is True
    assert job.until(Kind.RANKS_STARTED, 1, lambda e: e.data["attempt"] == 2).data["rung"] == "in place"
    job.until(Kind.COMMIT, 1, lambda e: e.data["attempt"] == 2 and e.data["committed"])
    assert "Current thread" in (job.run / "replicas/1/attempt_1/0.log").read_text(), "the stacks are in its log"

    job.finish(0)
    for replica in (0, 2):
        assert len(job.events(Kind.RANKS_STARTED, replica)) == 1
    assert not job.events(Kind.STEP_EXITED, 0)[0].data.get("code")
    quorums = [event.data["quorum_id"] for event in job.events(Kind.QUORUM, 0)]
    assert quorums == sorted(quorums), "no quorum id came twice"


def test_a_host_whose_processes_are_frozen_is_left_for_a_spare(devcluster: DevCluster, submit) -> None:  # noqa: F811
    """What a user may do to his own run, without root: no connection is reset, as when a host is gone."""
    job: Job = submit("--replicas", "2", "--spares", "1", "--", "python", str(PROGRAMS / "steps.py"), "500")
    job.until(Kind.PROGRESSED, 0)
    job.until(Kind.PROGRESSED, 1)
    job.slurm_ft("inject", str(job.run), "--replica", "1", "--kind", "host")
    assert "is silent" in job.until(Kind.AGENT_LOST, 1).data["what"]
    job.until(Kind.HOST_REPLACED, 1)
    job.until(Kind.PROGRESSED, 1, lambda e: e.data["attempt"] == 2)
    job.finish(0)
    assert len(job.events(Kind.RANKS_STARTED, 0)) == 1
    assert "agent lost" in job.slurm_ft("report", str(job.run))
