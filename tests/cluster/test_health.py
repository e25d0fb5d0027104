"""Health on a real Slurm: unfit hosts are replaced, unfit spares are not taken, and all hosts of a job are checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from slurm_ft.events import Kind
from slurm_ft.testing.devcluster import DevCluster
from tests.cluster.test_training import PROGRAMS, SLURM_FT, submit

__all__ = ["submit"]


def test_unfit_hosts_are_replaced_by_spares_that_are_fit(submit, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """A host that fails its check before the first attempt, a spare that fails it and is well again, and a host that
    fails it when a broken replica is to start again there: one run."""
    ill = tmp_path / "ill"
    ill.mkdir()
    for host in ("node2", "node3"):
        (ill / host).touch()
    check = f"test ! -e {ill}/$SLURMD_NODENAME || {{ echo ERROR: $SLURMD_NODENAME is ill; exit 1; }}"
    monkeypatch.setenv("SLURM_FT_SPARE_CHECK", "1")
    job = submit("--replicas", "2", "--spares", "2", "--health-check", check, "--",
                 "python", str(PROGRAMS / "steps.py"), "4000")  # fmt: skip
    unfit = job.until(Kind.HOST_UNFIT, 1)
    job.until(Kind.PROGRESSED, 1)
    job.until(Kind.PROGRESSED, 0)
    assert (unfit.data["host"], unfit.data["what"]) == ("node2", "node2 is ill")
    assert job.events(Kind.HOST_REPLACED, 1)[-1].data == {"bad": "node2", "spare": "node4"}
    assert [e.data["host"] for e in job.events(Kind.HOST_UNFIT) if e.replica is None] == ["node3"]

    (ill / "node3").unlink()
    job.until(Kind.HOST_FIT, None)
    (ill / "node1").touch()
    job.kill_rank(0)
    job.until(Kind.PROGRESSED, 0, lambda e: e.data["attempt"] == 2)
    assert job.events(Kind.HOST_REPLACED, 0)[-1].data == {"bad": "node1", "spare": "node3"}
    assert len(job.events(Kind.RANKS_STARTED, 1)) == 1
    drain = "scontrol update NodeName=node1 State=DRAIN Reason='slurm-ft: node1 is ill'"
    assert drain in job.slurm_ft("explain", str(job.run), "0")
    assert "node2 failed its check: node2 is ill" in job.slurm_ft("explain", str(job.run), "1")
    assert drain in job.slurm_ft("report", str(job.run))
    job.slurm_ft("stop", str(job.run))
    job.finish(143)


def check(cluster: DevCluster, folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`slurm-ft check --hosts` in a job of three hosts."""
    environ = {**cluster.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **variables}
    argv = ["salloc", "-Q", "-N3", "-w", "node[1-3]", SLURM_FT, "check", "--hosts", "--shared", str(folder), *options]
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=90)


def test_all_hosts_of_a_job_are_checked_by_one_step_with_a_line_for_each_fault(
    devcluster: DevCluster, tmp_path: Path
) -> None:
    well = check(devcluster, tmp_path, "--network", "--storage")
    assert (well.returncode, well.stdout, well.stderr) == (0, "", "")
    bad = check(devcluster, tmp_path, "--network", "--node", "--gpus", "64", NCCL_SOCKET_IFNAME="hsn7")
    words = ("0 of 64 GPUs are there", "there is no network interface `hsn7`, which NCCL_SOCKET_IFNAME names")
    expected = [f"ERROR: node{number}: {word}" for number in (1, 2, 3) for word in words]
    assert [line for line in bad.stdout.splitlines() if "left over" not in line] == expected
    assert bad.returncode == 1
    assert list(tmp_path.iterdir()) == []
