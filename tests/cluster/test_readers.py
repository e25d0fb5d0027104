"""One contract for all who ask Slurm: squeue as text, scontrol, squeue --json, and pyslurm where it fits.

A reader that cannot be had here says why in its skip.
"""

from __future__ import annotations

import dataclasses
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_ft.slurm.client import JobView, SlurmClient, Unknown, Unreachable
from slurm_ft.slurm.commands import Commands
from slurm_ft.slurm.readers import CommandReader, Reader, choose
from slurm_ft.slurm.units import NoTime
from slurm_ft.testing.devcluster import DevCluster
from tests.cluster.conftest import wait_until

Ask = Callable[[str], JobView | Unknown | Unreachable]
UGLY = b"d\xe9j\xe0|vu a\nb " + uuid.uuid4().hex[:6].encode()


def slurm(cluster: DevCluster, *command: str | bytes, text: str | None = None) -> str:
    done = subprocess.run(
        command, env=cluster.environ, input=text and text.encode(), capture_output=True, timeout=30, check=True
    )
    return done.stdout.decode().strip()


@pytest.fixture(scope="module")
def jobs(devcluster: DevCluster) -> Iterator[dict[str, str]]:
    """A job that runs on two hosts, and an array with an ugly name that waits."""
    sleeper = "#!/bin/bash\nexec sleep 300\n"
    common = ("sbatch", "--parsable", "--output=/dev/null")
    running = slurm(devcluster, *common, "-N2", "--time=0:30:00", "--no-kill", "--job-name=two", text=sleeper)
    waiting = slurm(devcluster, *common, "--array=0-3%2", "--hold", b"--job-name=" + UGLY, text=sleeper)
    client = SlurmClient(reader=CommandReader(commands(devcluster)))

    def runs() -> bool:
        view = client.job(running)
        return isinstance(view, JobView) and view.state.state.running

    wait_until(runs, what="the job runs")
    yield {"running": running, "waiting": waiting}
    slurm(devcluster, "scancel", running, waiting)
    wait_until(lambda: set(devcluster.states().values()) == {"idle"}, 30, "all hosts idle again")


def commands(cluster: DevCluster) -> Commands:
    return Commands(run=with_path(cluster), environ=cluster.environ)


def with_path(cluster: DevCluster) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """subprocess.run, with programs looked up on the cluster's PATH: env= does not change where argv[0] is sought."""

    def run(argv: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        program = next(
            (str(place) for folder in cluster.environ["PATH"].split(":") if (place := Path(folder, argv[0])).exists()),
            argv[0],
        )
        return subprocess.run([program, *argv[1:]], **options)  # type: ignore[call-overload,no-any-return]

    return run


@pytest.fixture(params=["commands", "scontrol", "json", "pyslurm"])
def reader(request: pytest.FixtureRequest, devcluster: DevCluster, monkeypatch: pytest.MonkeyPatch) -> Reader:
    asked = commands(devcluster)
    if request.param == "commands":
        return CommandReader(asked)
    if request.param != "pyslurm":
        own = CommandReader(asked)
        ask = own.by_scontrol if request.param == "scontrol" else own.by_json
        return Instead(asked, name=request.param, ask=ask)
    monkeypatch.setenv("SLURM_CONF", devcluster.environ["SLURM_CONF"])
    choice = choose(asked)
    if not choice.reader.name.startswith("pyslurm"):
        pytest.skip(choice.why)
    return choice.reader


@dataclasses.dataclass(frozen=True)
class Instead(CommandReader):
    """CommandReader as it is where squeue's text cannot be read."""

    ask: Ask = lambda job_id: Unreachable("nobody")

    def job(self, job_id: str) -> JobView | Unknown | Unreachable:
        return self.ask(job_id)


def test_a_running_job_is_described_the_same_by_all(reader: Reader, jobs: dict[str, str]) -> None:
    view = reader.job(jobs["running"])
    assert isinstance(view, JobView), view
    assert view.state.state.running
    assert (len(view.hosts), view.nodes, view.time_limit) == (2, 2, 1800)
    assert isinstance(view.time_left, int) and 1500 < view.time_left <= 1800
    assert (view.restarts, view.requeue, view.reason) == (0, True, "None")
    assert (view.job_id, view.array_id) == (jobs["running"], jobs["running"])


def test_an_array_that_waits_is_described_the_same_by_all(reader: Reader, jobs: dict[str, str]) -> None:
    view = reader.job(jobs["waiting"])
    assert isinstance(view, JobView), view
    assert view.state.state.pending
    assert (view.hosts, view.reason, view.time_limit) == ((), "JobHeldUser", NoTime.UNLIMITED)
    assert view.array_id.startswith(f"{jobs['waiting']}_[0-3")


def test_rw52_a_job_that_is_not_there_is_unknown_to_all(reader: Reader, jobs: dict[str, str]) -> None:
    assert reader.job("4711") == Unknown("4711")


def test_my_jobs_have_their_names_whatever_is_in_them(reader: Reader, jobs: dict[str, str]) -> None:
    found = reader.my_jobs()
    assert not isinstance(found, Unreachable)
    names = {view.job_id: view.name for view in found}
    assert names[jobs["running"]] == "two"
    # pyslurm cannot give a name that is not UTF-8.
    assert names[jobs["waiting"]] in (UGLY.decode("utf-8", "replace"), "")


def test_the_steps_of_a_job_are_listed_by_all(reader: Reader, jobs: dict[str, str]) -> None:
    found = reader.steps(jobs["running"])
    assert not isinstance(found, Unknown | Unreachable)
    assert [(step.step_id, step.name) for step in found] == [(f"{jobs['running']}.batch", "batch")]
    assert found[0].nodelist.startswith("node")
