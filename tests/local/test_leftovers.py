"""RW-14: what ranks leave behind on their host is gone before the next attempt starts there."""

from __future__ import annotations

import mmap
import os
import subprocess
from pathlib import Path

from slurm_ft.agent import leftovers
from slurm_ft.agent.leftovers import Attempt, Process, SharedMemory
from slurm_ft.events import Kind
from tests.local.running import PYTHON, Run
from tests.processes import lives
from tests.waiting import wait_until

LEAVES = """
import mmap, os, sys, time
from pathlib import Path
from slurm_ft.train import report

folder, attempt = Path(os.environ["RUN_TEST"]), f"{os.environ['SLURM_FT_ATTEMPT']}-{os.environ['RANK']}"

def detached():
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    (folder / f"new-{attempt}").write_text(str(os.getpid()))
    os.rename(folder / f"new-{attempt}", folder / f"detached-{attempt}")
    while True:
        time.sleep(0.05)

detached()
name = f"/dev/shm/slurm-ft-test-{folder.parent.name}-{folder.name}-{attempt}"
with open(name, "w+b") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
(folder / f"shm-{attempt}").write_text(name)
step = 0
while not (folder / "finish").exists():
    step += 1
    report(step=step)
    time.sleep(0.02)
os.unlink(name)
"""


def test_a_grandchild_that_left_its_session_and_its_files_are_gone_before_the_next_attempt(run: Run) -> None:
    run.program.write_text(LEAVES)
    run.start("--ranks-per-node=2", command=(PYTHON, str(run.program)))
    run.until(Kind.PROGRESSED, 0)
    detached = [int(wait_until(lambda n=n: _text(run.folder / f"detached-1-{n}"))) for n in (0, 1)]
    dead, living = (Path(wait_until(lambda n=n: _text(run.folder / f"shm-1-{n}"))) for n in (0, 1))
    assert all(os.getsid(pid) != os.getsid(run.agent(0)) for pid in detached) and living.exists()
    run.inject(0, "kill")
    run.until(Kind.RANKS_STARTED, 0, 2)
    assert not any(map(lives, detached))
    assert not living.exists()  # of the rank that was still there to be looked at
    cleared = run.events(Kind.AGENT_CLEARED)[0]
    assert "ended 2 processes that its ranks had left behind" in cleared.data["leftovers"]
    second = int(wait_until(lambda: _text(run.folder / "detached-2-0")))
    assert lives(second)
    assert run.finished() == 0
    assert not lives(second)
    dead.unlink(missing_ok=True)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_shared_memory_that_ranks_mapped_is_removed_once_nobody_maps_it(tmp_path: Path) -> None:
    name = f"/dev/shm/slurm-ft-test-{os.getpid()}"
    memory = SharedMemory()
    with open(name, "w+b") as file:
        file.truncate(4096)
        mapped = mmap.mmap(file.fileno(), 4096)
    memory.look([os.getpid()])
    assert memory.remove() == [] and os.path.exists(name)  # we map it still
    mapped.close()
    assert memory.remove() == [name]
    assert not os.path.exists(name)


def test_a_file_that_was_made_anew_under_the_name_is_left_alone() -> None:
    name = f"/dev/shm/slurm-ft-test-b-{os.getpid()}"
    memory = SharedMemory()
    with open(name, "w+b") as file:
        file.truncate(4096)
        mapped = mmap.mmap(file.fileno(), 4096)
    memory.look([os.getpid()])
    os.rename(name, name + ".old")
    Path(name).write_text("somebody else's")
    mapped.close()
    assert memory.remove() == []
    for path in (name, name + ".old"):
        os.unlink(path)


def test_only_older_attempts_of_this_run_on_this_host_are_found(tmp_path: Path) -> None:
    mark = {"SLURM_FT_RUN": str(tmp_path), "SLURM_FT_HOST": "n1", "SLURM_FT_REPLICA": "0", "SLURM_FT_ATTEMPT": "2"}
    wrong = [{"SLURM_FT_RUN": f"{tmp_path}x"}, {"SLURM_FT_HOST": "n2"}, {"SLURM_FT_ATTEMPT": "3"},
             {"SLURM_FT_ATTEMPT": "0"}, {"SLURM_FT_ATTEMPT": ""}]  # fmt: skip
    right = [{}, {"SLURM_FT_REPLICA": "1", "SLURM_FT_ATTEMPT": "9"}]
    started = [subprocess.Popen(["sleep", "60"], env={**os.environ, **mark, **change}) for change in (*right, *wrong)]
    try:
        found = leftovers.older_than(Attempt(str(tmp_path), "n1", 0, 3))
        assert {process.pid for process in found} == {child.pid for child in started[: len(right)]}
        reused = [Process(process.pid, process.started + 1) for process in found]
        assert leftovers.end(reused, 1.0) == []  # numbers that have changed hands
        assert all(child.poll() is None for child in started)
        assert leftovers.end(found, 5.0) == []
        assert [child.poll() is None for child in started] == [False] * len(right) + [True] * len(wrong)
    finally:
        for child in started:
            child.kill()
            child.wait()
