"""A rank that the kernel killed for lack of memory is told from one that somebody killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_ft.agent.oom import OomWatch


def tree(root: Path, version: int, kills: int, limit: str = "1073741824") -> Path:
    """A pretended system whose step has this many kills, in a job without a count of its own."""
    job = root / "sys/fs/cgroup" / ("memory" if version == 1 else "") / "slurm/job_7"
    step = job / "step_0"
    step.mkdir(parents=True, exist_ok=True)
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    prefix = "4:cpu:/x\n3:memory:" if version == 1 else "0::"
    (root / "proc/self/cgroup").write_text(f"{prefix}/slurm/job_7/step_0\n")
    (root / "proc/vmstat").write_text("pgfault 3\noom_kill 5\n")
    if version == 1:
        (step / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        (step / "memory.limit_in_bytes").write_text("9223372036854771712\n")
        (job / "memory.oom_control").write_text("oom_kill 0\n")
        (job / "memory.limit_in_bytes").write_text(limit)
    else:
        (step / "memory.events").write_text(f"low 0\noom 9\noom_kill {kills}\noom_group_kill 0\n")
        (step / "memory.max").write_text("max\n")
        (job / "memory.events").write_text("oom_kill 0\n")
        (job / "memory.max").write_text(limit)
    return root


@pytest.mark.parametrize("version", [1, 2])
def test_a_kill_by_the_groups_limit_is_told_with_the_limit(tmp_path: Path, version: int) -> None:
    watch = OomWatch(tree(tmp_path, version, 2))
    assert watch.words() == ""
    tree(tmp_path, version, 3)
    assert watch.words() == "for lack of memory (the limit is 1.0 GiB)"
    watch.begin()
    assert watch.words() == ""


def test_a_kill_somewhere_on_the_host_is_a_hint(tmp_path: Path) -> None:
    watch = OomWatch(tree(tmp_path, 2, 0))
    (tmp_path / "proc/vmstat").write_text("oom_kill 6\n")
    assert watch.words().startswith("perhaps for lack of memory")


def test_where_nothing_is_counted_nothing_is_said(tmp_path: Path) -> None:
    assert OomWatch(tmp_path).words() == ""


HOG = """
import subprocess, sys
from slurm_ft.agent.oom import OomWatch
watch = OomWatch()
kill = subprocess.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
print(kill.returncode, watch.words())
hog = subprocess.run([sys.executable, "-c", "x = bytearray(300 << 20)"])
print(hog.returncode, watch.words())
"""


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A real memory group of 64 MB."""
    own = next((line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line), "0::/")
    base = Path("/sys/fs/cgroup/memory" if ":memory:" in own else "/sys/fs/cgroup")
    place = base / own.split(":", 2)[2].strip("/") / f"slurm-ft-test-{os.getpid()}"
    try:
        place.mkdir()
        limit = place / ("memory.limit_in_bytes" if ":memory:" in own else "memory.max")
        limit.write_text(str(64 << 20))
    except OSError as error:
        if place.exists():
            place.rmdir()
        pytest.skip(f"no memory group can be made here: {error.strerror}")
    try:
        yield place
    finally:
        place.rmdir()


def test_a_real_kill_for_lack_of_memory_is_told_from_a_kill_by_somebody(small_group: Path) -> None:
    def join() -> None:
        (small_group / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run([sys.executable, "-c", HOG], preexec_fn=join, capture_output=True, text=True, timeout=60)
    killed, hogged = done.stdout.splitlines()
    assert killed == "-9 "
    assert hogged == "-9 for lack of memory (the limit is 64 MiB)", done.stderr
