"""Slurm's accounting, really kept by slurmdbd and MariaDB, beside what a run knows of itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_ft.errors import EXIT_USAGE, LaunchError
from slurm_ft.events import Kind
from slurm_ft.testing import devcluster_accounting as accounting
from slurm_ft.testing.devcluster import DevCluster
from tests.cluster.conftest import wait_until
from tests.cluster.test_training import PROGRAMS, SLURM_FT, Job


@pytest.fixture(scope="module")
def accounted(slurm_programs: None, slurm_root: str) -> Iterator[DevCluster]:
    """Two hosts and their accounting."""
    try:
        accounting.find_programs(slurm_root)
    except LaunchError as error:
        pytest.skip(f"{error.message} ({error.hint})")
    parent = Path(tempfile.mkdtemp(prefix="sft-", dir="/tmp"))
    with DevCluster(
        hosts=2, folder=parent / "c", die_with=os.getpid(), slurm_root=slurm_root, accounting=True
    ) as cluster:
        yield cluster
        daemons = [process for process in cluster.processes() if process.role in ("slurmdbd", "mariadbd")]
        assert len(daemons) == 2
    assert not cluster.processes()
    shutil.rmtree(parent)


def test_a_run_that_repaired_itself_is_reconciled_with_slurms_rows_and_its_derived_exit_code_explained(
    accounted: DevCluster, tmp_path: Path
) -> None:
    end = tmp_path / "end"
    job = Job(accounted, tmp_path, "--replicas", "2", "--", "python", str(PROGRAMS / "until.py"), str(end))
    job.until(Kind.PROGRESSED, 0)
    job.until(Kind.PROGRESSED, 1)
    job.kill_rank(0)
    job.until(Kind.PROGRESSED, 0, lambda event: event.data["attempt"] == 2)
    job.kill_agent(1)
    job.until(Kind.PROGRESSED, 1, lambda event: event.data["attempt"] == 2)
    end.touch()
    job.finish(0)
    job_id = job.events(Kind.RUN_STARTED)[0].data["job_id"]

    def told() -> bool:
        argv = ["sacct", "--noheader", "--parsable2", f"--jobs={job_id}", "--format=state"]
        said = subprocess.run(argv, env=job.environ, capture_output=True, text=True, timeout=30).stdout.split()
        return len(said) >= 5 and "RUNNING" not in said

    wait_until(told, 30, "the accounting has the end of all steps")
    found = json.loads(job.slurm_ft("report", str(job.run), "--sacct", "--json"))["accounting"]
    assert [(row["id"], row["state"], row["exit_code"]) for row in found["jobs"]] == [(job_id, "COMPLETED", "0:0")]
    steps = {step["name"]: step["slurm"] for step in found["steps"]}
    assert set(steps) == {"sft-r0-s1", "sft-r1-s1", "sft-r1-s2"}
    assert steps["sft-r0-s1"]["exit_code"] == steps["sft-r1-s2"]["exit_code"] == "0:0"
    assert steps["sft-r1-s1"]["exit_code"] == "0:9"
    assert steps["sft-r1-s1"]["nodelist"] == steps["sft-r1-s2"]["nodelist"]
    derived = found["jobs"][0]["derived_exit_code"]
    assert derived == "0:9"
    [note] = [note for note in found["notes"] if "derived exit code" in note]
    assert f"step {steps['sft-r1-s1']['id']} (sft-r1-s1)" in note and "the run ended with 0" in note
    assert any("repaired in place" in note for note in found["notes"])
    text = job.slurm_ft("report", str(job.run), "--sacct")
    assert "sft-r1-s2 COMPLETED" in text and "note: " in text


def test_without_accounting_one_sentence_says_so(devcluster: DevCluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    started = {"t": 1.0, "event": "run_started", "job_id": "1", "replicas": 1}
    (run / "events.jsonl").write_text(json.dumps(started) + "\n")
    (run / "run.json").write_text("{}")
    environ = {**devcluster.environ}
    done = subprocess.run(
        [SLURM_FT, "report", str(run), "--sacct"], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == EXIT_USAGE, done.stderr
    assert "error: this cluster keeps no accounting: Slurm accounting storage is disabled" in done.stderr
    assert done.stdout == ""
