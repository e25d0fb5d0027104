"""What `submit` and the submitit plugin hand to Slurm, with a pretended sbatch."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_ft import config
from slurm_ft.api import Cluster
from slurm_ft.cli import cli
from slurm_ft.cli import submit as command
from slurm_ft.errors import LaunchError, RunFolderError
from slurm_ft.paths import RunPaths, read_json
from slurm_ft.slurm.client import SlurmClient, Submitted, Unreachable
from slurm_ft.spec import Policy, ReplicaSpec, RunSpec
from slurm_ft.submit import chain, slurm_job
from slurm_ft.submit import request as requests
from slurm_ft.submit.slurm_job import SLACK_SECONDS, JobRequest, submit


@pytest.fixture(autouse=True)
def pretended_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An sbatch that takes every job as 7, on the cluster of the file `cluster`; submitit looks for an srun."""
    lines = [
        "#!/bin/sh",
        f"echo \"$@\" >> '{tmp_path}/calls'",
        f"cluster=$(cat '{tmp_path}/cluster' 2>/dev/null)",
        'case "$*" in',
        '  *--parsable*) echo "7${cluster:+;$cluster}" ;;',
        '  *) echo "Submitted batch job 7${cluster:+ on cluster $cluster}" ;;',
        "esac",
    ]
    for name in ("sbatch", "srun"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text("\n".join(lines) + "\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


def request(folder: Path) -> JobRequest:
    return JobRequest(RunSpec("x", ReplicaSpec(("true",)), replicas=2), f"{folder}/x-%j", folder / ".submitit")


@pytest.mark.parametrize("there", [False, True])
def test_what_holds_the_variables_given_with_env_is_its_owners_alone(tmp_path: Path, there: bool) -> None:
    asked = request(tmp_path / "runs")
    if there:  # by an earlier version
        asked.folder.mkdir(parents=True, mode=0o755)
    assert submit(asked) == Submitted("7")
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


# --- where the job is ------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Jobs get onto cluster b, whatever has chosen it, and nobody's settings say something else."""
    (tmp_path / "cluster").write_text("b")
    for name in (name for key in config.KEYS for name in key.variables):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SLURM_FT_SITE", "")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_from_python_is_watched_on_the_cluster_that_its_job_is_on(elsewhere: Path) -> None:
    run = Cluster("slurm", runs=elsewhere / "runs", shared=True, clusters="b").submit(
        RunSpec("x", ReplicaSpec(("true",)), replicas=2)
    )
    watch = run._gone()
    assert isinstance(watch, slurm_job.JobWatch)
    assert watch._slurm._commands.cluster == "b"


@pytest.mark.parametrize("words", [("--", "true"), ("mine.sbatch",)])
@pytest.mark.parametrize("links", [1, 2])
def test_submit_watches_the_cluster_that_its_job_is_on(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], links: int
) -> None:
    (elsewhere / "mine.sbatch").write_text("#!/bin/bash\n#SBATCH -N 2 -M b\nslurm-ft run -- true\n")
    watched = list[str]()

    def wait(paths: RunPaths, job_id: str, cluster: str, where: str, since: int) -> int:
        watched.append(where)
        return 0

    monkeypatch.setattr(command, "_wait", wait)
    result = CliRunner().invoke(cli, ["submit", "--local-run-dir", f"--chain={links}", *words])
    assert result.exit_code == 0, result.output
    assert watched == ["b"]


def test_links_of_a_chain_that_is_refused_and_that_slurm_does_not_cancel_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def link(number: int, first: str, after: tuple[str, ...]) -> Submitted:
        if number == 3:
            raise LaunchError("refused", "")
        return Submitted(str(10 + number))

    monkeypatch.setattr(SlurmClient, "cancel", lambda self, job_id: Unreachable("timed out"))
    with pytest.raises(LaunchError, match="refused; could not be cancelled: 12, 11"):
        chain.submit_links(3, link)


# --- a run folder that cannot be written -----------------------------------------------------------------------


@pytest.fixture
def nowhere(tmp_path: Path) -> str:
    """A place in which no folder can be made."""
    (tmp_path / "file").touch()
    return f"{tmp_path}/file/run"


@pytest.mark.parametrize("words", [("--", "true"), ("mine.sbatch",)])
@pytest.mark.parametrize("links", [1, 2])
def test_nothing_is_submitted_for_a_run_folder_that_cannot_be_written(
    elsewhere: Path, nowhere: str, words: tuple[str, ...], links: int
) -> None:
    (elsewhere / "mine.sbatch").write_text("#!/bin/bash\n#SBATCH -N 2\nslurm-ft run -- true\n")
    options = ["--local-run-dir", f"--run-dir={nowhere}", f"--chain={links}", "--no-wait"]
    result = CliRunner().invoke(cli, ["submit", *options, *words], standalone_mode=False)
    assert isinstance(result.exception, RunFolderError), result.output
    assert not (elsewhere / "calls").exists()


@pytest.mark.parametrize("links", [1, 2])
def test_a_request_that_slurm_refuses_leaves_nothing_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: int
) -> None:
    """With other options it is the same folder and another run."""

    def refuse(request: JobRequest) -> Submitted:
        raise LaunchError("refused", "")

    monkeypatch.setattr(slurm_job, "submit", refuse)
    asked = JobRequest(RunSpec("x", ReplicaSpec(("true",)), replicas=2), f"{tmp_path}/run", tmp_path / ".submitit")

    def submit() -> None:
        with pytest.raises(LaunchError):
            requests.to_slurm(asked, shared=True) if links == 1 else requests.to_chain(asked, links, shared=True)

    submit()
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "note").touch()
    submit()
    assert (tmp_path / "run" / "note").exists() and not RunPaths(tmp_path / "run").spec.exists()


@pytest.mark.parametrize(("links", "words"), [(1, "job 11 is submitted already"), (2, "jobs 11, 12 are submitted")])
def test_what_fails_after_a_submission_names_the_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: int, words: str
) -> None:
    numbers = count(11)
    monkeypatch.setattr(slurm_job, "submit", lambda request: Submitted(str(next(numbers))))
    (tmp_path / "file").touch()
    asked = JobRequest(RunSpec("x", ReplicaSpec(("true",)), replicas=2), f"{tmp_path}/file/%j", tmp_path / ".submitit")
    with pytest.raises(RunFolderError, match=words):
        requests.to_slurm(asked, shared=True) if links == 1 else requests.to_chain(asked, links, shared=True)


def test_a_chain_is_recorded_in_the_folder_of_its_first_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = count(11)
    monkeypatch.setattr(slurm_job, "submit", lambda request: Submitted(str(next(numbers)), "b"))
    asked = JobRequest(RunSpec("x", ReplicaSpec(("true",)), replicas=2), f"{tmp_path}/%j", tmp_path / ".submitit")
    found = requests.to_chain(asked, 2, shared=True)
    assert (found.job_id, found.cluster, found.paths.root) == ("11", "b", tmp_path / "11")
    assert read_json(found.paths.chain) == {"links": ["11", "12"]}
