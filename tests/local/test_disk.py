"""The run folder on a disk that is really full, and on one that does not answer: the training goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_ft.events import Kind
from slurm_ft.spec import Policy
from tests.local.running import PYTHON, Run, a_run
from tests.processes import stat
from tests.waiting import wait_until

TALKS = """
import os, time
from pathlib import Path
from slurm_ft.train import report

folder, step = Path(os.environ["RUN_TEST"]), 0
while not (folder / "finish").exists():
    step += 1
    report(step=step)
    (folder / f"alive-{os.environ['SLURM_FT_REPLICA']}").write_text(str(step))
    time.sleep(0.02)
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "slurm-ft-test", str(place)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def step_of(run: Run, replica: int) -> int:
    return int((run.folder / f"alive-{replica}").read_text() or 0)


def test_on_a_full_disk_the_training_goes_on_is_repaired_and_its_events_come_later(
    tmp_path: Path, small_disk: Path
) -> None:
    with a_run(tmp_path) as run:
        run.paths = type(run.paths)(small_disk / "run")
        run.program.write_text(TALKS)
        run.start("--replicas=2", command=(PYTHON, str(run.program)))
        for replica in (0, 1):
            run.until(Kind.PROGRESSED, replica)
        fill = small_disk / "fill"
        with pytest.raises(OSError, match="No space"), open(fill, "wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        agent = run.agent(1)
        size = run.paths.events.stat().st_size
        with open(run.paths.events, "ab") as events:  # the last block has room; empty lines are nothing to a reader
            events.write(b"\n" * (4096 - size % 4096))
        before = len(run.paths.events.read_bytes())
        rank = _rank_of(run, agent)
        os.kill(rank, signal.SIGKILL)
        wait_until(lambda: _rank_of(run, agent) not in (0, rank), 10.0, "the rank was started again on a full disk")
        there = step_of(run, 0), step_of(run, 1)
        wait_until(lambda: step_of(run, 0) > there[0] and step_of(run, 1) != there[1], 10.0, "both train")
        assert len(run.paths.events.read_bytes()) == before
        fill.unlink()
        run.noted("No space left on device")
        assert run.attempts(1) == [(1, ""), (2, "in place")]
        assert run.finished() == 0
        json.loads(run.paths.state.read_text())


def _rank_of(run: Run, agent: int) -> int:
    """The rank below an agent that writes this test's file."""
    for pid, _ in run.ours():
        try:
            state, parent = stat(pid)[:2]
            variables = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        is_rank = b"SLURM_FT_ATTEMPT=" in variables and b"SLURM_FT_ATTEMPT=0" not in variables
        if is_rank and int(parent) == agent and state not in "ZX":
            return pid
    return 0


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[Freezer]:
    freezer = Freezer(tmp_path)
    try:
        yield freezer
    finally:
        freezer.close()


class Freezer:
    """A real file system on a loop device that can be made to hang: writes to it wait until it is let go on."""

    def __init__(self, folder: Path) -> None:
        image, self.place = folder / "image", folder / "disk"
        self.place.mkdir()
        image.write_bytes(b"")
        os.truncate(image, 16 << 20)
        self._frozen = False
        for argv in (["mkfs.ext4", "-q", "-F", str(image)], ["mount", "-o", "loop", str(image), str(self.place)]):
            try:
                done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
            except FileNotFoundError:
                pytest.skip(f"there is no {argv[0]} here")
            if done.returncode:
                pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")

    def freeze(self) -> None:
        subprocess.run(["fsfreeze", "-f", str(self.place)], check=True, timeout=30)
        self._frozen = True

    def thaw(self) -> None:
        if self._frozen:
            subprocess.run(["fsfreeze", "-u", str(self.place)], check=True, timeout=30)
            self._frozen = False

    def close(self) -> None:
        self.thaw()
        subprocess.run(["umount", "-l", str(self.place)], check=True, timeout=30)


def test_while_the_file_system_hangs_the_training_goes_on_and_what_fails_is_repaired_after(
    tmp_path: Path, frozen: Freezer
) -> None:
    """The agents' signs of life and the controller's judgement need no disk: nobody is lost for the stall."""
    with a_run(tmp_path) as run:
        run.paths = type(run.paths)(frozen.place / "run")
        run.program.write_text(TALKS)
        try:
            run.start_with(Policy(agent_timeout=5.0), replicas=2, command=(PYTHON, str(run.program)))
            for replica in (0, 1):
                run.until(Kind.PROGRESSED, replica)
            agent = run.agent(1)
            frozen.freeze()
            os.kill(_rank_of(run, agent), signal.SIGKILL)
            there = step_of(run, 0)
            time.sleep(7.0)  # longer than an agent may be silent
            assert step_of(run, 0) > there + 50
        finally:
            frozen.thaw()
        run.noted("does not answer")
        wait_until(lambda: run.attempts(1) == [(1, ""), (2, "in place")], 10.0)
        assert not run.events(Kind.AGENT_LOST)
        assert len(run.events(Kind.STEP_LAUNCHED)) == 2
        assert run.finished() == 0
