"""How the devcluster knows its processes, and ends them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_ft.testing import devcluster_config as config
from slurm_ft.testing import devcluster_processes as processes
from slurm_ft.testing.devcluster import DevCluster


def test_a_process_that_closes_a_file_while_it_is_looked_at_is_known_by_its_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").mkdir()
    readlink, gone = os.readlink, []

    def one_has_gone(path: str) -> str:
        if not gone:
            gone.append(path)
            raise FileNotFoundError(path)
        return readlink(path)

    with open(tmp_path / "log" / "node3.log", "w"):
        monkeypatch.setattr(processes.os, "readlink", one_has_gone)
        assert processes._host_by_log(os.getpid(), tmp_path) == "node3"
    assert gone
    assert processes._host_by_log(os.getpid(), tmp_path) == ""


def test_a_process_that_has_ended_has_no_host(tmp_path: Path) -> None:
    assert processes._host_by_log(2**22 + 1, tmp_path) == ""


@pytest.fixture
def cluster() -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """The folder of a devcluster, in a place that is short enough, and the process of a job on it."""
    parent = Path(tempfile.mkdtemp(prefix="sft-", dir="/tmp"))
    folder = parent / "c"
    folder.mkdir()
    environment = {**os.environ, "SLURM_CONF": f"{folder}/slurm.conf", "SLURMD_NODENAME": "node1"}
    with subprocess.Popen(["sleep", "100"], env=environment) as job:
        yield folder, job
        job.kill()
    shutil.rmtree(parent)


def test_the_jobs_of_another_slurms_cluster_are_cancelled_by_its_own_scancel(
    cluster: tuple[Path, subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, job = cluster
    (tmp_path / "bin").mkdir()
    scancel = tmp_path / "bin" / "scancel"
    scancel.write_text(f"#!/bin/sh\necho $SLURM_CONF > {tmp_path}/asked\nkill {job.pid}\n")
    scancel.chmod(0o755)
    config.write_marker(folder, config.Shape(hosts=1, slurm_root=str(tmp_path)), [1, 2])
    monkeypatch.setattr(config, "SYSTEM_FOLDERS", ())
    monkeypatch.setenv("PATH", "/bin")
    DevCluster(folder=folder).down()
    assert (tmp_path / "asked").read_text().strip() == f"{folder}/slurm.conf"
    assert job.wait(10) == -signal.SIGTERM and not folder.exists()


@pytest.mark.parametrize("marker", ["{", '{"shape": {"hosts": 1, "slurm_root": "/gone"}, "ports": [1, 2]}'])
def test_a_cluster_whose_file_is_damaged_or_whose_slurm_is_gone_is_ended_all_the_same(
    cluster: tuple[Path, subprocess.Popen[bytes]], marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, job = cluster
    (folder / config.MARKER).write_text(marker)
    monkeypatch.setattr(config, "SYSTEM_FOLDERS", ())
    monkeypatch.setenv("PATH", "/nowhere")
    DevCluster(folder=folder).down()
    assert job.wait(10) == -signal.SIGKILL and not folder.exists()
