"""An existing submitit script on `cluster="slurm_ft"`: its tasks are repaired inside their job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import submitit

from slurm_ft.events import Kind, read
from slurm_ft.testing.devcluster import DevCluster
from tests.cluster.conftest import wait_until


def train(folder: str, fail_first: bool) -> tuple[int, int, str]:
    """A user's function: task 1 fails on its first attempt; task 0 waits to be killed once."""
    here = submitit.JobEnvironment()
    attempt = os.environ["SLURM_FT_ATTEMPT"]
    print(f"task {here.global_rank} of {here.num_tasks}, attempt {attempt}", flush=True)
    if fail_first and here.global_rank == 1 and attempt == "1":
        raise ValueError("a bad moment")
    Path(folder, f"pid-{here.global_rank}-{attempt}").write_text(str(os.getpid()))
    if here.global_rank == 0 and attempt == "1":
        signal.pause()
    return here.global_rank, here.num_tasks, attempt


def always_fails() -> None:
    raise LookupError("no such corpus")


@pytest.fixture
def executor(devcluster: DevCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in devcluster.settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    yield submitit.AutoExecutor(tmp_path / "submitit", cluster="slurm_ft")


def test_a_tasks_exception_or_death_is_repaired_in_the_job_and_the_result_is_the_last_ones(
    executor: Any, tmp_path: Path
) -> None:
    executor.update_parameters(nodes=2, timeout_min=5, slurm_partition="dev", slurm_ft_min_replicas=2)
    job = executor.submit(train, str(tmp_path), True)
    pid = tmp_path / "pid-0-1"
    wait_until(lambda: pid.exists() and pid.read_text(), 30, "task 0 runs")
    wait_until(lambda: len(_of(job, Kind.RANKS_STARTED)) >= 3, 30, "task 1 is started again")
    assert not job.done()
    os.kill(int(pid.read_text()), signal.SIGKILL)
    assert job.results() == [(0, 2, "2"), (1, 2, "2")]
    assert "task 1 of 2, attempt 2" in job.task(1).stdout()
    wait_until(lambda: job.run.exit_code is not None, 30, "the run has ended")
    assert job.run.exit_code == 0 and len(job.run.report().incidents) == 2
    assert {event.data["job_id"] for event in _of(job, Kind.RUN_STARTED)} == {job.job_id}
    assert job.state.startswith("DONE")


def test_a_function_that_always_fails_raises_with_its_traceback_and_is_not_waited_for(executor: Any) -> None:
    executor.update_parameters(nodes=1, timeout_min=5, slurm_ft_restarts_in_place=1, slurm_ft_restarts_by_step=0)
    job = executor.submit(always_fails)
    error = job.exception()
    assert "LookupError: no such corpus" in str(error)
    wait_until(lambda: job.run.exit_code is not None, 30)
    assert job.run.exit_code == 93


def test_a_misspelt_parameter_and_an_impossible_one_are_refused(executor: Any) -> None:
    with pytest.raises(ValueError, match="spare"):
        executor.update_parameters(slurm_ft_spare=1)
    with pytest.raises(Exception, match="min-replicas"):
        executor.update_parameters(nodes=2, slurm_ft_min_replicas=3)


def _of(job: Any, kind: Kind) -> list[Any]:
    return [event for event in read(job.run.paths.events) if event.kind is kind]


class Counts:
    """A checkpointable function: a session counts on from where the last one was warned."""

    def __init__(self, folder: str, start: int = 0) -> None:
        self.folder, self.at = folder, start

    def __call__(self) -> int:
        began = self.at
        while self.at < began + 5:
            self.at += 1
        if began == 0:
            Path(self.folder, "counts").touch()
            while True:
                signal.pause()  # the warning's handler leaves from here
        return self.at

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        return submitit.helpers.DelayedSubmission(Counts(self.folder, self.at))


def test_a_checkpointed_function_goes_on_after_a_preemption_in_the_same_job(
    executor: Any, devcluster: DevCluster, tmp_path: Path
) -> None:
    executor.update_parameters(nodes=1, timeout_min=60)
    job = executor.submit(Counts(str(tmp_path)))
    wait_until(lambda: (tmp_path / "counts").exists(), 30, "the first session runs")
    subprocess.run(["scancel", "--batch", "--signal=USR2", job.job_id], env=devcluster.environ, check=True, timeout=30)
    assert job.result() == 10
    assert len(_of(job, Kind.RUN_STARTED)) == 2


def test_one_that_cannot_be_checkpointed_and_has_had_its_time_is_not_put_back(
    executor: Any, devcluster: DevCluster, tmp_path: Path
) -> None:
    executor.update_parameters(nodes=1, timeout_min=1)  # submitit: a run of a minute has timed out from the start
    job = executor.submit(train, str(tmp_path), False)
    wait_until(lambda: (tmp_path / "pid-0-1").exists(), 30, "it runs")
    subprocess.run(["scancel", "--batch", "--signal=USR2", job.job_id], env=devcluster.environ, check=True, timeout=30)
    assert "timed-out and not checkpointable" in str(job.exception())
    assert len(_of(job, Kind.RUN_STARTED)) == 1
