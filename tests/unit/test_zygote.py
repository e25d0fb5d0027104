"""Ranks forked from a zygote behave as Pythons that were started afresh. Real processes, no torch."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from slurm_ft.agent.preload import ALWAYS_WITH_TORCH, modules_for
from slurm_ft.agent.ranks import Exit, Plan, Preload, Ranks
from slurm_ft.train.titan import PRELOAD, PRELOAD_WITHOUT_GPU
from tests.processes import lives
from tests.waiting import until

Story = Callable[["Host"], Coroutine[None, None, None]]


class Host:
    """The ranks of one host, whose program is a script of the test's own."""

    def __init__(self, folder: Path, script: str, modules: str = "json,decimal", flags: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.script = folder / "program.py"
        self.script.write_text(script)
        self.command = (sys.executable, *flags, str(self.script), "one", "it's 50% done")
        self.environment = {"PATH": os.environ["PATH"], "COLOUR": "red", "PYTHONPATH": str(folder)}
        self.ends: list[Exit] = []
        self.ranks = Ranks(self.ends.append, Preload(self.command, modules.split(","), self.environment))

    def plan(self, rank: int = 0, **environment: str) -> Plan:
        cpus = frozenset(os.sched_getaffinity(0))
        log = self.folder / f"{rank}.log"
        return Plan(rank, rank, self.command, {**self.environment, **environment}, log, cpus)

    def log(self, rank: int = 0) -> str:
        path = self.folder / f"{rank}.log"
        return path.read_text() if path.exists() else ""

    async def ended(self, count: int = 1) -> list[Exit]:
        await until(lambda: len(self.ends) >= count, what=f"{count} ranks have ended; logs: {self.log()}")
        return self.ends

    def zygote(self) -> int:
        """The zygote's number, by the children of this process."""
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        return next(int(pid) for pid in children if b"zygote.py" in Path(f"/proc/{pid}/cmdline").read_bytes())


def tell(folder: Path, script: str, story: Story, modules: str = "json,decimal", flags: tuple[str, ...] = ()) -> Host:
    async def main() -> Host:
        host = Host(folder, script, modules, flags)
        try:
            await asyncio.wait_for(story(host), 30)
        finally:
            await host.ranks.clear(0.1)
            host.ranks.close()
        return host

    return asyncio.run(main())


def test_a_forked_rank_sees_what_a_fresh_python_sees(tmp_path: Path) -> None:
    script = """
import sys, os, pickle
class Thing: pass
print(__name__, __file__ == sys.argv[0], sys.argv[1:], sys.path[0] == os.path.dirname(__file__))
print(os.environ["COLOUR"], os.environ["RANK"], "decimal" in sys.modules, sys.flags.optimize)
print(type(pickle.loads(pickle.dumps(Thing()))) is Thing, os.getpgid(0) == os.getpid(), sys.stdin.read() == "")
"""

    async def story(host: Host) -> None:
        host.ranks.start([host.plan(RANK="0", COLOUR="blue")])
        assert [end.code for end in await host.ended()] == [0]

    log = tell(tmp_path, script, story, flags=("-O",)).log()
    assert log.splitlines() == [
        """__main__ True ['one', "it's 50% done"] True""",
        "blue 0 True 1",
        "True True True",
    ]


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('no more data')", 1, "no more data"),
        ("import os; os.kill(os.getpid(), 15)", -15, ""),
        ("import os; os.abort()", -6, "Fatal Python error"),
        ("import atexit; atexit.register(print, 'last words')", 0, "last words"),
        ("import threading, time; threading.Thread(target=lambda: print('thread done')).start()", 0, "thread done"),
    ],
)
def test_a_forked_rank_ends_as_a_python_ends(tmp_path: Path, body: str, code: int, words: str) -> None:
    async def story(host: Host) -> None:
        host.ranks.start([host.plan()])
        assert [end.code for end in await host.ended()] == [code]

    assert words in tell(tmp_path, body, story).log()


def test_a_traceback_shows_only_the_programs_own_frames(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        host.ranks.start([host.plan()])
        assert [end.code for end in await host.ended()] == [1]

    log = tell(tmp_path, "def f():\n    raise KeyError('lr')\nf()\n", story).log()
    assert log.startswith("Traceback (most recent call last):\n  File ")
    assert "program.py" in log and "zygote.py" not in log and "bootstrap.py" not in log


def test_ranks_and_attempts_have_different_random_numbers(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        host.ranks.start([host.plan(0), host.plan(1)])
        await host.ended(2)
        host.ranks.start([host.plan(2)])
        await host.ended(3)

    host = tell(tmp_path, "import random; print(random.random())", story, modules="random")
    assert len({host.log(rank) for rank in range(3)}) == 3


def test_a_killed_rank_is_reported_and_its_workers_are_gone(tmp_path: Path) -> None:
    script = "import subprocess, time\nprint(subprocess.Popen(['sleep', '100']).pid, flush=True)\ntime.sleep(100)\n"

    async def story(host: Host) -> None:
        host.ranks.start([host.plan()])
        worker = int(await until(lambda: host.log().strip()))
        host.ranks.signal(signal.SIGKILL, 0)
        assert [end.signal_name for end in await host.ended()] == ["SIGKILL"]
        await until(lambda: not lives(worker))

    tell(tmp_path, script, story)


def test_when_the_zygote_dies_its_ranks_are_reported_and_the_next_attempt_has_a_new_one(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        host.ranks.start([host.plan()])
        rank = int(await until(lambda: host.log().strip()))
        os.kill(host.zygote(), signal.SIGKILL)
        assert [end.code for end in await host.ended()] == [-signal.SIGKILL]
        await until(lambda: not lives(rank))
        (host.folder / "0.log").unlink()
        host.ranks.start([host.plan()])
        await until(lambda: host.log().strip())

    tell(tmp_path, "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(100)\n", story)


def test_a_stop_that_comes_while_the_zygote_imports_leaves_no_rank_behind(tmp_path: Path) -> None:
    (tmp_path / "slow_import.py").write_text("import time\ntime.sleep(100)\n")

    async def story(host: Host) -> None:
        host.ranks.start([host.plan()])
        await host.ranks.clear(0.05)
        assert not host.ranks
        assert not host.ends

    assert tell(tmp_path, "print('I run')", story, modules="slow_import").log() == ""


def test_a_module_that_cannot_be_preloaded_is_left_to_the_program(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        host.ranks.start([host.plan()])
        assert [end.code for end in await host.ended()] == [0]

    assert tell(tmp_path, "print('I run')", story, modules="no_such_module").log() == "I run\n"


def test_what_is_preloaded_follows_from_the_command(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nimport torch.nn as nn\nfrom torchft.local_sgd import DiLoCo\ntry:\n import numpy\nfinally:\n ...\n"
    )
    assert modules_for(("python", "-u", str(script)), gpu=False) == (
        "torch.nn",
        "torchft.local_sgd",
        "numpy",
        ALWAYS_WITH_TORCH,
    )
    assert modules_for(("titan",), gpu=False) == PRELOAD_WITHOUT_GPU
    assert modules_for(("titan",), gpu=True) == PRELOAD
    for command in (("python", "-m", "train"), ("./train.sh",), ("python", str(tmp_path / "none.py"))):
        assert modules_for(command, gpu=False) == ()
