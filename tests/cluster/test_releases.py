"""The short list that every release of Slurm must pass: scripts/slurm_matrix runs it on each of them.

    pytest tests/cluster/test_releases.py --slurm-root DIR

Without --slurm-root it is the machine's own Slurm, as in every other test here.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_ft.events import Kind
from slurm_ft.testing.devcluster import DevCluster
from tests.cluster.conftest import wait_until
from tests.cluster.test_training import PROGRAMS, Job

Submit = Callable[..., Job]
STEPS = ("python", str(PROGRAMS / "steps.py"))


@pytest.fixture
def submit(devcluster: DevCluster, tmp_path: Path) -> Iterator[Submit]:
    jobs: list[Job] = []

    def start(*arguments: str) -> Job:
        jobs.append(Job(devcluster, tmp_path, *arguments))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            subprocess.run(["scancel", "--full", "--partition=dev"], env=job.environ, timeout=30)
            job.process.kill()
        job.process.communicate()
    wait_until(lambda: set(devcluster.states().values()) == {"idle"}, 30, "all hosts idle again")


def attempts(job: Job) -> list[int]:
    status = json.loads(job.slurm_ft("status", str(job.run), "--json"))
    return [row["attempt"] for row in status["replicas"]]


def test_boot_every_host_runs_a_step_with_the_users_own_python(devcluster: DevCluster) -> None:
    probe = "echo $SLURMD_NODENAME ${LD_LIBRARY_PATH:-none} $(python -c 'print(6 * 7)')"
    argv = ["srun", "-N4", "bash", "-c", probe]
    done = subprocess.run(argv, env=devcluster.environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"node{number} none 42" for number in range(1, 5)]


def test_a_run_whose_rank_is_killed_repairs_itself_and_all_commands_tell_of_it(submit: Submit, tmp_path: Path) -> None:
    end = tmp_path / "end"
    job = submit("--replicas", "2", "--", "python", str(PROGRAMS / "until.py"), str(end))
    job.until(Kind.PROGRESSED, 0)
    job.until(Kind.PROGRESSED, 1)
    job.kill_rank(1)
    job.until(Kind.PROGRESSED, 1, lambda event: event.data["attempt"] == 2)
    wait_until(lambda: attempts(job) == [1, 2], what="status tells of the second attempt")
    job.kill_agent(0)
    job.until(Kind.PROGRESSED, 0, lambda event: event.data["attempt"] == 2)
    end.touch()
    job.finish(0)
    assert [event.data["rung"] for event in job.events(Kind.RANKS_STARTED, 1)] == ["", "in place"]
    assert [event.data["step"] for event in job.events(Kind.STEP_LAUNCHED, 0)] == [1, 2]
    assert "incidents: 2" in job.slurm_ft("report", str(job.run))
    assert "DONE:0" in job.slurm_ft("list", "--runs", str(job.run.parent))


def test_a_cancelled_run_leaves_slurm(devcluster: DevCluster, submit: Submit) -> None:
    job = submit("--replicas", "1", "--", *STEPS, "6000")
    job.until(Kind.PROGRESSED, 0)
    job_id = job.events(Kind.RUN_STARTED)[0].data["job_id"]
    job.slurm_ft("cancel", str(job.run))
    job.output()
    assert job.process.returncode != 0

    def state() -> str:
        argv = ["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--Format=state:|"]
        return subprocess.run(argv, env=job.environ, capture_output=True, text=True, timeout=30).stdout.strip("|\n ")

    wait_until(lambda: state() in ("CANCELLED", "FAILED"), 30, "the job has ended")
