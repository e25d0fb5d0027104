"""Faults on purpose: real processes that are frozen, hung or held."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_ft.agent import hurt
from slurm_ft.agent.freeze import main as freeze
from tests.processes import state
from tests.waiting import wait_until

SUFFER = """
import sys, threading, time
from slurm_ft.train.injected import suffer
beats = [0]
def beat():
    while True:
        beats[0] += 1; time.sleep(0.01); print("beat", flush=True)
threading.Thread(target=beat, daemon=True).start()
threading.Thread(target=lambda: (time.sleep(0.1), suffer({"type": sys.argv[1]})), daemon=True).start()
for i in range(10**9):
    time.sleep(0.01); print("main", flush=True)
"""


def _last_words(kind: str) -> tuple[set[str], subprocess.Popen[str]]:
    """What a program still says once the fault has had time to strike: the words of 20 quiet reads."""
    process = subprocess.Popen([sys.executable, "-c", SUFFER, kind], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    seen: list[str] = []
    while len(seen) < 60:
        # A new Python takes its time; one that talks every 10 ms has no reason to be silent for a second.
        ready, _, _ = select.select([process.stdout], [], [], 1.0 if seen else 30.0)
        if not ready:
            break
        seen.append(process.stdout.readline().strip())
    if not seen:
        process.kill()
        process.communicate()
        pytest.fail("it never said a word")
    return set(seen[-20:]) if len(seen) >= 60 else set(), process


@pytest.mark.parametrize(("kind", "goes_on"), [("hang", {"beat"}), ("gil-deadlock", set())])
def test_a_hang_stops_the_main_thread_and_a_deadlock_with_the_lock_stops_all(kind: str, goes_on: set[str]) -> None:
    said, process = _last_words(kind)
    try:
        assert said == goes_on
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_a_frozen_host_is_found_with_all_below_it_and_thaws() -> None:
    script = "sleep 60 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True, process_group=0) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            assert hurt.descendants(parent.pid) == [child]
            freeze(0.0, [parent.pid, child])
            wait_until(lambda: (state(parent.pid), state(child)) == ("T", "T"))
            freeze(0.01, [parent.pid, child])
            wait_until(lambda: (state(parent.pid), state(child)) == ("S", "S"))
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("cgroup", "files", "limit"),
    [
        ("0::/a/b", {"a/memory.max": "1000", "a/b/memory.max": "max"}, 1000),
        ("0::/a", {"a/memory.max": "max"}, None),
        ("5:cpu,memory:/j", {"memory/j/memory.limit_in_bytes": "77"}, 77),
        ("5:memory:/j", {"memory/j/memory.limit_in_bytes": str(2**63 - 4096)}, None),
        ("0::/", {}, None),
    ],
)
def test_the_memory_limit_is_the_tightest_one_above(
    tmp_path: Path, cgroup: str, files: dict[str, str], limit: int | None
) -> None:
    for name, text in files.items():
        path = tmp_path / "mount" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (tmp_path / "cgroup").write_text(cgroup + "\n")
    assert hurt.memory_limit(tmp_path, tmp_path / "mount") == limit
