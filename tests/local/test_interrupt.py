"""Ctrl-C in `slurm-ft submit`: on a terminal it asks, in a script it leaves the run to itself."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_ft import events
from slurm_ft.events import Kind
from tests.waiting import wait_until

SLURM_FT = str(Path(sys.executable).with_name("slurm-ft"))
PROGRAM = (
    "import time\nfrom slurm_ft.train.progress import report\nfor i in range(1, 2000):\n report(i); time.sleep(0.05)\n"
)


@pytest.fixture
def argv(tmp_path: Path) -> Iterator[list[str]]:
    (tmp_path / "program.py").write_text(PROGRAM)
    run = tmp_path / "run"
    yield [
        SLURM_FT,
        "submit",
        "--cluster",
        "local",
        "--run-dir",
        str(run),
        "--",
        sys.executable,
        f"{tmp_path}/program.py",
    ]
    (run / "stop").touch()
    wait_until(lambda: ended(tmp_path) is not None, 20, "the run is over")


def ended(folder: Path) -> int | None:
    codes = [e.data["code"] for e in events.read(folder / "run" / "events.jsonl") if e.kind is Kind.RUN_ENDED]
    return codes[-1] if codes else None


def trains(folder: Path) -> bool:
    return any(event.kind is Kind.PROGRESSED for event in events.read(folder / "run" / "events.jsonl"))


def can_be_interrupted() -> None:
    """In a child: a shell starts what runs in the background, and these tests with it, without Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_in_a_script_an_interrupt_leaves_the_run_to_itself(argv: list[str], tmp_path: Path) -> None:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    submit = subprocess.Popen(argv, preexec_fn=can_be_interrupted, **pipes)
    wait_until(lambda: trains(tmp_path), 60)
    submit.send_signal(signal.SIGINT)
    _, words = submit.communicate(timeout=20)
    assert submit.returncode == 130
    assert b"left the run to itself; come back with `slurm-ft status" in words
    assert ended(tmp_path) is None


def test_on_a_terminal_an_interrupt_asks_and_can_stop_the_run(argv: list[str], tmp_path: Path) -> None:
    child, terminal = pty.fork()
    if child == 0:
        can_be_interrupted()
        os.execv(argv[0], argv)
    shown = read_until(terminal, b"TRAINING")
    os.write(terminal, b"\x03")
    shown = read_until(terminal, b"watch on?")
    assert shown.count(b"stop the run, leave it alone") == 1
    os.write(terminal, b"stop\n")
    read_until(terminal, b"ended with exit code 143")
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 143


def read_until(terminal: int, words: bytes, seconds: float = 20.0) -> bytes:
    """What the terminal shows until these words appear."""
    shown, give_up = b"", time.monotonic() + seconds
    while words not in shown:
        if time.monotonic() > give_up:
            pytest.fail(f"{words!r} not within {seconds:g} s; shown: {shown[-2000:]!r}")
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 4096)
    return shown
