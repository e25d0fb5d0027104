"""Does the warning before the time limit kill the shell of the job's script? Asked of a real bash."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from slurm_ft.submit.batch_shell import warning_would_kill
from tests.waiting import wait_until

JOB = {"SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("script", "kills"),
    [
        ("sleep 30; true", True),
        ("trap : USR2; sleep 30; true", False),
        ("trap '' USR2; sleep 30; true", False),
        ("exec sleep 30", False),
    ],
    ids=["plain", "trap", "ignored", "exec"],
)
def test_a_batch_script_without_exec_or_trap_would_die_of_the_warning(tmp_path: Path, script: str, kills: bool) -> None:
    file = tmp_path / "slurm_script"
    file.write_text(f"touch {tmp_path}/begun; {script}\n")
    shell = subprocess.Popen(["bash", str(file)], start_new_session=True)
    try:
        wait_until((tmp_path / "begun").exists)
        wait_until(lambda: warning_would_kill(JOB, parent=shell.pid) is kills, 5)
        assert not warning_would_kill({}, parent=shell.pid)
        assert not warning_would_kill(JOB | {"SLURM_STEP_ID": "0"}, parent=shell.pid)
        if kills:  # and it is true
            os.kill(shell.pid, signal.SIGUSR2)
            assert shell.wait(10) == -signal.SIGUSR2
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
