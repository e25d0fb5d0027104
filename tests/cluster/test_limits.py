"""Time limits on a real Slurm: the run saves, ends, and comes back by itself from where it saved."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from slurm_ft.events import Kind
from slurm_ft.testing.devcluster import DevCluster
from tests.cluster import test_training
from tests.cluster.conftest import wait_until
from tests.cluster.test_training import PROGRAMS, Job

submit = test_training.submit  # the fixture


def program(folder: Path, steps: int) -> tuple[str, ...]:
    return ("python", str(PROGRAMS / "saves.py"), str(folder / "ledger"), str(steps))


def warn(job: Job, job_id: str) -> None:
    """What Slurm does before the time limit, with `--signal=B:USR2@120`."""
    argv = ["scancel", "--signal=USR2", "--batch", job_id]
    subprocess.run(argv, env=job.environ, check=True, timeout=30)


def sessions(job: Job) -> list[str]:
    return [event.data["job_id"] for event in job.events(Kind.RUN_STARTED)]


def queue(cluster: DevCluster) -> list[str]:
    out = subprocess.run(
        ["squeue", "--noheader", "--format=%i"], env=cluster.environ, capture_output=True, text=True, timeout=30
    ).stdout
    return out.split()


def no_gap(folder: Path, steps: int) -> None:
    """Every step was trained, and a later session begins where the one before it had saved."""
    rows = [line.split() for line in (folder / "ledger").read_text().splitlines()]
    by_attempt = {a: [int(s) for _, n, s in rows if n == a] for a in dict.fromkeys(row[1] for row in rows)}
    assert sorted({step for group in by_attempt.values() for step in group}) == list(range(1, steps + 1))
    for group in by_attempt.values():
        assert group == list(range(group[0], group[0] + len(group)))


def test_before_its_time_limit_a_run_saves_is_requeued_and_goes_on_from_there(
    devcluster: DevCluster,
    submit,
    tmp_path: Path,
) -> None:
    """RW-18: the same job id begins again, and nothing of the first session is overwritten or run twice."""
    job = submit("--replicas", "1", "--", *program(tmp_path, 40))
    job.until(Kind.PROGRESSED, 0)
    job_id = sessions(job)[0]
    warn(job, job_id)
    wait_until(lambda: job.events(Kind.RUN_ENDED), 30)
    assert job.events(Kind.RUN_ENDED)[0].data["code"] == 75
    saved = job.events(Kind.SAVE_ENDED)[0].data
    assert saved["complete"]
    (tmp_path / "go").touch()
    out = job.finish(0)  # `submit` follows the run into its second session

    assert "the job is put back into the queue" in out
    assert sessions(job) == [job_id, job_id]
    assert [e.data["attempt"] for e in job.events(Kind.RANKS_STARTED)] == [1, 2]
    assert [e.data["restart"] for e in job.events(Kind.RUN_STARTED)] == [0, 1]
    assert job.events(Kind.RANKS_STARTED)[1].data["rung"] == ""  # no repair, and nothing taken from a budget
    assert not job.events(Kind.RANK_FAILED)
    second = [line.split()[2] for line in (tmp_path / "ledger").read_text().splitlines() if line.split()[1] == "2"]
    assert int(second[0]) == saved["step"] + 1 if second else saved["step"] == 40
    no_gap(tmp_path, 40)
    assert (job.run / "replicas/0/attempt_1/0.log").exists() and (job.run / "replicas/0/attempt_2/0.log").exists()


def test_a_chain_goes_on_in_its_next_link_and_a_finished_run_cancels_the_rest(
    devcluster: DevCluster,
    submit,
    tmp_path: Path,
) -> None:
    job = submit("--replicas", "1", "--chain", "3", "--", *program(tmp_path, 60))
    job.until(Kind.PROGRESSED, 0)
    wait_until((job.run / "chain.json").exists)
    links = json.loads((job.run / "chain.json").read_text())["links"]
    assert len(links) == 3 and set(links) <= set(queue(devcluster))
    warn(job, links[0])
    wait_until(lambda: len(sessions(job)) == 2, 60, "the next link")
    (tmp_path / "go").touch()
    out = job.finish(0)

    assert f"the run goes on in job {links[1]}, the next link of its chain" in out
    assert sessions(job) == links[:2]
    assert [event.data["code"] for event in job.events(Kind.RUN_ENDED)] == [75, 0]
    no_gap(tmp_path, 60)
    wait_until(lambda: not set(links) & set(queue(devcluster)), 30, "the third link is cancelled")
    assert "incidents: 0" in job.slurm_ft("report", str(job.run))


def test_a_stopped_run_takes_the_rest_of_its_chain_with_it(
    devcluster: DevCluster,
    submit,
    tmp_path: Path,
) -> None:
    job = submit("--replicas", "1", "--chain", "2", "--", *program(tmp_path, 60))
    job.until(Kind.PROGRESSED, 0)
    wait_until((job.run / "chain.json").exists)
    job.slurm_ft("stop", str(job.run))
    job.finish(143)
    assert job.events(Kind.SAVE_ENDED)[0].data["complete"]
    wait_until(lambda: not queue(devcluster), 30, "the second link is cancelled")


def test_without_a_spare_a_replica_waits_for_its_dead_host_and_the_run_goes_on_smaller(
    devcluster: DevCluster,
    submit,
    tmp_path: Path,
) -> None:
    """RW-46: Slurm takes the host out of the job, new steps on it are refused at once, and nothing hangs."""
    job = submit("--replicas", "2", "--min-replicas", "1", "--", "python", str(PROGRAMS / "steps.py"), "2000")
    job.until(Kind.PROGRESSED, 1)
    job.until(Kind.PROGRESSED, 0)
    dead = job.events(Kind.AGENT_JOINED, 1)[-1].data["host"]
    devcluster.kill_host(dead)
    try:
        parked = job.until(Kind.PARKED, 1)
        assert parked.data["hosts"] == [dead]
        job.until(Kind.PROGRESS, 0, lambda e: e.t > parked.t)
        words = f"it waits for {dead}, and the others go on"
        wait_until(lambda: words in job.slurm_ft("explain", str(job.run)), 10, "the state, a second old, says so")
        job.slurm_ft("stop", str(job.run))
        job.finish(143)
    finally:
        devcluster.revive_host(dead)
    assert len(job.events(Kind.RANKS_STARTED, 0)) == 1
