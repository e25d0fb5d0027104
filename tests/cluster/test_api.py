"""The Python API on a real Slurm."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import slurm_ft
from slurm_ft import ReplicaSpec, RunSpec
from slurm_ft.errors import UsageError
from slurm_ft.events import Kind, read
from slurm_ft.testing.devcluster import DevCluster

STEPS = str(Path(__file__).with_name("programs") / "steps.py")


@pytest.fixture
def slurm(devcluster: DevCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in devcluster.settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def test_a_run_in_a_job_is_submitted_awaited_and_attached_by_its_job_id(slurm: None, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with slurm_ft.Cluster(runs=runs, shared=True, partition="dev", time=5, exclusive=True) as cluster:
        run = cluster.submit(RunSpec("api", ReplicaSpec((sys.executable, STEPS, "5")), 2))
    assert run.exit_code == 0
    again = slurm_ft.Run.attach(run.job_id, runs)
    assert again.paths.root == run.paths.root
    assert {event.data["job_id"] for event in read(again.paths.events) if event.kind is Kind.RUN_STARTED} == {
        run.job_id
    }
    script = (runs / ".submitit" / f"{run.job_id}_submission.sh").read_text()
    assert "#SBATCH --partition=dev" in script and "#SBATCH --exclusive" in script


def test_what_slurm_refuses_is_said_in_its_words(slurm: None, tmp_path: Path) -> None:
    cluster = slurm_ft.Cluster("slurm", runs=tmp_path, shared=True, partition="none-such")
    with pytest.raises(UsageError, match=r"[Pp]artition"):
        cluster.submit(RunSpec("api", ReplicaSpec(("true",))))
