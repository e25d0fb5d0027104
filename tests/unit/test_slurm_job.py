"""What `submit` and the submitit plugin hand to Slurm, with a pretended sbatch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_ft.errors import RunFolderError
from slurm_ft.spec import Policy, ReplicaSpec, RunSpec
from slurm_ft.submit.slurm_job import SLACK_SECONDS, JobRequest, submit


@pytest.fixture(autouse=True)
def pretended_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An sbatch that takes every job as 7; submitit looks for an srun."""
    for name in ("sbatch", "srun"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\necho Submitted batch job 7\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


def request(folder: Path) -> JobRequest:
    return JobRequest(RunSpec("x", ReplicaSpec(("true",)), replicas=2), f"{folder}/x-%j", folder / ".submitit")


@pytest.mark.parametrize("there", [False, True])
def test_what_holds_the_variables_given_with_env_is_its_owners_alone(tmp_path: Path, there: bool) -> None:
    asked = request(tmp_path / "runs")
    if there:  # by an earlier version
        asked.folder.mkdir(parents=True, mode=0o755)
    assert submit(asked) == "7"
    assert asked.folder.stat().st_mode & 0o777 == 0o700
    assert list(asked.folder.glob("*.pkl"))


def test_a_runs_folder_that_is_used_by_somebody_else_is_named_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(tmp_path / "runs")
    asked.folder.mkdir(parents=True)
    monkeypatch.setattr(os, "getuid", lambda: os.stat(asked.folder).st_uid + 1)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(RunFolderError, match=r"runs/\.submitit is somebody else's") as refused:
        submit(asked)
    assert refused.value.hint == "choose another with --runs"


@pytest.mark.parametrize(("delay", "within"), [({}, None), ({"slurm_signal_delay_s": 300}, 300)])
def test_a_submitit_job_has_as_much_time_to_save_as_its_signals_delay_gives(
    tmp_path: Path, delay: dict[str, int], within: int | None
) -> None:
    import submitit

    from slurm_ft.submitit_plugin.executor import DELAY

    executor = submitit.AutoExecutor(tmp_path / "jobs", cluster="slurm_ft")
    executor.update_parameters(nodes=2, **delay)
    job = executor.submit(len, "abc")
    script = job.paths.submission_file.read_text()
    seconds = within or DELAY
    assert f"#SBATCH --signal=B:USR2@{seconds}" in script
    saved = executor._executor._spec().policy.save_within
    assert saved == seconds - Policy().stop_grace - SLACK_SECONDS > 0
