"""Does the warning before the time limit kill the shell of the job's script? Asked of a real bash."""

from __future__ import annotations

import contextlib
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
        with contextlib.suppress(ProcessLookupError):  # it may have died before it had started its child
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def test_the_trap_of_the_documentation_hands_the_warning_on_and_keeps_the_exit_code(tmp_path: Path) -> None:
    """A trap runs only while bash waits, not while a child runs in the foreground."""
    page = (Path(__file__).parents[2] / "docs" / "saving.md").read_text()
    lines = page[page.index("    slurm-ft run -- python train.py &\n") : page.index("    exit $code\n")].splitlines()
    child = (
        "import signal, time; h = lambda *_: (time.sleep(0.2), exit(75)); signal.signal(signal.SIGUSR2, h); "
        f"open('{tmp_path}/begun', 'w'); time.sleep(30)"
    )
    text = "\n".join(line.strip() for line in lines).replace("slurm-ft run -- python train.py", f'python3 -c "{child}"')
    shell = subprocess.Popen(["bash", "-c", f"{text}\nexit $code"], stdout=subprocess.PIPE, start_new_session=True)
    try:
        wait_until((tmp_path / "begun").exists)
        os.kill(shell.pid, signal.SIGUSR2)
        out, _ = shell.communicate(timeout=10)
        assert (out, shell.returncode) == (b"slurm-ft has ended with 75\n", 75)
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.communicate()
