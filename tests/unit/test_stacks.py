"""py-spy, or what stands for it, is asked for the stacks of ranks that hang."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from slurm_ft.agent import stacks


def stand_in(folder: Path, script: str) -> str:
    path = folder / "py-spy"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_the_stacks_of_each_process_are_appended_to_its_own_log(tmp_path: Path) -> None:
    program = stand_in(tmp_path, 'echo "stacks of $3 by $1"')
    logs = {11: tmp_path / "a.log", 12: tmp_path / "b.log"}
    logs[11].write_text("before\n")
    asyncio.run(stacks.by_pyspy(logs, program))
    assert logs[11].read_text() == "before\nstacks of 11 by dump\n"
    assert logs[12].read_text() == "stacks of 12 by dump\n"


def test_one_that_hangs_itself_is_ended_and_one_that_is_missing_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "WITHIN", 2.0)
    program = stand_in(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 60")
    began = time.monotonic()
    asyncio.run(stacks.by_pyspy({os.getpid(): tmp_path / "a.log"}, program))
    assert time.monotonic() - began < 30
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
    asyncio.run(stacks.by_pyspy({1: tmp_path / "a.log"}, str(tmp_path / "no such program")))
