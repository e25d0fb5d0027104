"""The keeper on a real Slurm: a step of its own beside the replicas' steps."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from slurm_ft.events import Kind
from slurm_ft.keeper.place import socket_path
from slurm_ft.testing.devcluster import DevCluster
from tests.cluster.conftest import wait_until
from tests.cluster.test_training import PROGRAMS, Job, _processes_with, submit

__all__ = ["submit"]

WORDS = re.compile(r"keeper (\d+): goes on from step (\d+)")


def _steps(cluster: DevCluster) -> list[str]:
    argv = ["squeue", "--steps", "--noheader", "--format=%j %N"]
    return subprocess.run(argv, env=cluster.environ, capture_output=True, text=True, timeout=30).stdout.splitlines()


def _keeper(job: Job, replica: int, attempt: int) -> tuple[int, int]:
    """(process of its keeper, step that it went on from), as the rank has it."""
    log = job.run / "replicas" / str(replica) / f"attempt_{attempt}" / "0.log"
    wait_until(lambda: log.exists() and WORDS.search(log.read_text()), 30, f"{log} speaks of its keeper")
    found = WORDS.search(log.read_text())
    assert found is not None
    return int(found[1]), int(found[2])


def _trains(job: Job, replica: int, attempt: int) -> None:
    job.until(Kind.PROGRESSED, replica, lambda event: event.data["attempt"] == attempt, 30)


def test_the_keeper_is_its_own_step_and_a_step_that_was_queued_again_finds_its_memory(
    submit, devcluster: DevCluster, tmp_path: Path
) -> None:
    finish = tmp_path / "finish"
    program = ("--", "python", str(PROGRAMS / "kept_steps.py"), str(finish))
    job = submit("--replicas", "2", "--keeper", "live", *program)
    for replica in (0, 1):
        _trains(job, replica, 1)
    steps = [line.split()[0] for line in _steps(devcluster)]
    assert {"sft-keeper-1", "sft-r0-s1", "sft-r1-s1"} <= set(steps)
    before, first = _keeper(job, 1, 1)
    assert first == 0
    job.kill_agent(1)
    _trains(job, 1, 2)
    assert [event.data["step"] for event in job.events(Kind.STEP_LAUNCHED, 1)] == [1, 2]
    again, step = _keeper(job, 1, 2)
    assert again == before and step > 0
    assert Path(f"/proc/{before}/cgroup").exists()
    finish.touch()
    job.finish(0)
    assert [event.data["what"] for event in job.events(Kind.KEEPER)] == ["started"]
    _nothing_is_left(job)


def test_scancel_leaves_no_keeper(submit, devcluster: DevCluster, tmp_path: Path) -> None:
    job = submit("--replicas", "2", "--keeper", "live", "--", "python", str(PROGRAMS / "kept_steps.py"), "/never")
    _trains(job, 1, 1)
    keeper, _ = _keeper(job, 1, 1)
    (started,) = job.events(Kind.RUN_STARTED)
    subprocess.run(["scancel", started.data["job_id"]], env=devcluster.environ, check=True, timeout=30)
    job.output()
    wait_until(lambda: not os.path.exists(f"/proc/{keeper}"), 40, "the keeper has ended")
    _nothing_is_left(job)


def _nothing_is_left(job: Job) -> None:
    wait_until(lambda: not _processes_with(str(job.run)), 40, "no process of the run is left")
    folders = [socket_path(job.run, f"node{number}").parent for number in (1, 2, 3, 4)]
    assert not [folder for folder in folders if folder.exists()]
