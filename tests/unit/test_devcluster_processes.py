"""How the devcluster knows its processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_ft.testing import devcluster_processes as processes


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
