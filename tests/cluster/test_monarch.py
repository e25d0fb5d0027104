"""Monarch in one Slurm job: a host dies, a spare takes its place, the job and the other hosts go on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurm_ft.testing.devcluster import DevCluster
from tests.cluster.conftest import wait_until

PROGRAM = Path(__file__).with_name("programs") / "monarch_program.py"

pytestmark = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import monarch.actor, trustme"], capture_output=True).returncode != 0,
    reason="Monarch is not installed here (slurm-ft[monarch])",
)


def test_a_dead_hosts_worker_loop_is_replaced_on_a_spare_of_the_same_job(
    devcluster: DevCluster, tmp_path: Path
) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\ncd {tmp_path}\nexec {sys.executable} -u {PROGRAM} 3 1 wait\n")
    out = tmp_path / "out.txt"
    options = ["--nodes=4", "--no-kill", "--no-requeue", "--ntasks-per-node=1", f"--output={out}", "--time=5"]
    argv = ["sbatch", "--parsable", *options, str(script)]
    environ = {**devcluster.environ, "TMPDIR": str(tmp_path)}
    job = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    dead = ""
    try:
        wait_until(lambda: "kill the host" in _text(out), 60, "the program runs")
        dead = _text(out).partition("kill the host ")[2].split()[0]
        devcluster.kill_host(dead)
        wait_until(lambda: _text(out).count("all placed [") == 2, 60, "it is back on all hosts")
        wait_until(lambda: not _running(devcluster, job), 60, "the job has ended")
    finally:
        subprocess.run(["scancel", job], env=environ, timeout=30)
        if dead:
            devcluster.revive_host(dead)
    assert f"lost slot 1 on {dead}" in _text(out)
    last = _text(out).rpartition("all placed [")[2]
    assert dead not in last and last.count("node") == 3, _text(out)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _running(cluster: DevCluster, job: str) -> bool:
    argv = ["squeue", "--noheader", f"--jobs={job}", "--format=%T"]
    done = subprocess.run(argv, env=cluster.environ, capture_output=True, text=True, timeout=30)
    return done.stdout.strip() in ("RUNNING", "COMPLETING")
