"""The Python API on this machine: real runs, held, awaited, re-attached."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import slurm_ft
from slurm_ft import ReplicaSpec, Run, RunSpec
from slurm_ft.api.cluster import _sbatch_words
from slurm_ft.errors import Permanent, RunFolderError, SpecError, UsageError
from slurm_ft.events import Kind
from slurm_ft.spec import Budget, Policy
from tests.waiting import wait_until

TRAINS = """
import sys, time
from slurm_ft.train.progress import report
for step in range(1, int(sys.argv[1]) + 1):
    report(step, loss=1 / step)
    time.sleep(0.02)
print("trained")
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[slurm_ft.Cluster]:
    """A cluster whose runs are ended after the test, whatever became of it."""
    made = slurm_ft.Cluster("local", runs=tmp_path / "runs", partition="passed over here")
    yield made
    for folder in (tmp_path / "runs").iterdir() if (tmp_path / "runs").exists() else ():
        run = Run(folder)
        if run.exit_code is None:
            run.stop()
            run.wait(30)


def trains(steps: int, replicas: int = 1) -> RunSpec:
    return RunSpec("api", ReplicaSpec((sys.executable, "-c", TRAINS, str(steps))), replicas)


def test_a_run_is_submitted_awaited_and_read(cluster: slurm_ft.Cluster) -> None:
    run = cluster.submit(trains(5, replicas=2))
    report = run.result(60)
    assert run.exit_code == 0 and report.incidents == ()
    assert run.logs(1).endswith("trained\n")
    assert run.status().replicas[1].step == 5
    assert repr(run).startswith(f"<Run api-{run.job_id}: DONE")
    assert "<td>DONE</td>" in run._repr_html_()
    with pytest.raises(RunFolderError, match="replica 7"):
        run.logs(7)


def test_a_run_that_has_ended_is_not_waited_for(cluster: slurm_ft.Cluster) -> None:
    run = cluster.submit(trains(1))
    assert run.wait(60) == run.wait(0) == 0


def test_a_run_that_fails_raises_what_its_exit_code_means_with_the_first_traceback(cluster: slurm_ft.Cluster) -> None:
    spec = RunSpec("bad", ReplicaSpec((sys.executable, "-c", "open('/no/such/corpus')")),
                   policy=Policy(in_place=Budget(0, 60), step=Budget(0, 60)))  # fmt: skip
    with pytest.raises(Permanent, match=r"FileNotFoundError(.|\n)*/no/such/corpus"):
        cluster.submit(spec).result(60)


def test_another_process_attaches_to_a_run_and_sees_all_its_events(cluster: slurm_ft.Cluster, tmp_path: Path) -> None:
    run = cluster.submit(trains(40))
    script = (
        "import sys, asyncio, slurm_ft\n"
        "async def kinds(run): return [str(event.kind) async for event in run.events()]\n"
        "run = slurm_ft.Run.attach(sys.argv[1], sys.argv[2])\n"
        "found = asyncio.run(kinds(run))\n"
        "print(found[0], found[-1], run.wait(), run.spec.name)\n"
    )
    argv = [sys.executable, "-c", script, run.job_id, str(tmp_path / "runs")]
    out = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert out.stdout.split() == ["head_started", "run_ended", "0", "api"], out.stderr


def test_events_come_while_the_run_goes_on(cluster: slurm_ft.Cluster) -> None:
    run = cluster.submit(trains(2000))

    async def first_progress() -> None:
        async for event in run.events():
            if event.kind is Kind.PROGRESSED:
                run.stop()
            if event.kind is Kind.STOP_REQUESTED:
                return

    asyncio.run(asyncio.wait_for(first_progress(), 60))
    assert run.wait(60) == 143


def test_a_block_that_is_left_by_an_exception_stops_its_runs_and_one_that_ends_waits_for_them(
    cluster: slurm_ft.Cluster,
) -> None:
    with pytest.raises(ZeroDivisionError), cluster:
        run = cluster.submit(trains(10_000))
        wait_until(lambda: run.status().step, 60)
        raise ZeroDivisionError
    assert run.exit_code == 143
    with cluster:
        run = cluster.submit(trains(3))
    assert run.exit_code == 0


def test_waiting_can_be_bounded_and_the_run_goes_on(cluster: slurm_ft.Cluster) -> None:
    run = cluster.submit(trains(10_000))
    with pytest.raises(TimeoutError):
        run.wait(0.3)
    assert run.exit_code is None
    assert "TERM" in run.cancel()
    assert run.wait(60) == 143
    assert "ended already" in run.cancel()


def test_what_is_wrong_is_refused_before_anything_starts(cluster: slurm_ft.Cluster, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="--min-replicas"):
        cluster.submit(RunSpec("x", ReplicaSpec(("true",)), 1, policy=Policy(min_replicas=2)))
    with pytest.raises(UsageError, match="no kind of cluster"):
        slurm_ft.Cluster("slum")
    with pytest.raises(RunFolderError, match="no run"):
        Run.attach("last", tmp_path / "none")


def test_a_value_of_zero_is_one_and_a_flag_that_is_off_is_none() -> None:
    assert _sbatch_words({"mem": 0, "exclusive": False, "nice": None, "requeue": True}) == ({"mem": 0}, ["--requeue"])


def test_importing_the_package_imports_nothing_heavy() -> None:
    script = (
        "import sys, slurm_ft; slurm_ft.__version__; "
        "print([n for n in ('torch', 'zmq', 'submitit', 'click') if n in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30).stdout
    assert out.strip() == "[]"
