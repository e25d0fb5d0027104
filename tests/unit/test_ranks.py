"""The ranks of a host, with real small processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft.agent.ranks import Exit, Plan, Ranks, split_cpus
from tests.processes import lives, state
from tests.waiting import until, wait_until

ALL = frozenset(os.sched_getaffinity(0))
SLEEP = "exec sleep 60"


class Host:
    """The ranks of a host, and how they have ended so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.exits: list[Exit] = []
        self.ranks = Ranks(self.exits.append)

    def plan(self, rank: int, *argv: str, attempt: int = 1, **environment: str) -> Plan:
        log = self.folder / f"attempt_{attempt}" / f"{rank}.log"
        return Plan(rank, rank, argv, {"PATH": os.environ["PATH"], **environment}, log, ALL)

    def start(self, *scripts: str) -> None:
        """One rank for each shell script."""
        self.ranks.start([self.plan(rank, "sh", "-c", script) for rank, script in enumerate(scripts)])

    def log(self, rank: int) -> str:
        return (self.folder / "attempt_1" / f"{rank}.log").read_text()

    async def number(self, name: str) -> int:
        """A process number that a script has written."""
        file = self.folder / name
        return int(await until(lambda: file.exists() and file.read_text().strip()))


def on_a_host(folder: Path, story: Callable[[Host], Awaitable[None]]) -> Host:
    host = Host(folder)

    async def within() -> None:
        async with asyncio.timeout(20):
            try:
                await story(host)
            finally:
                await host.ranks.clear(0.0)

    asyncio.run(within())
    return host


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ("exit 0", 0, "rank 0 exited with code 0"),
        ("exit 3", 3, "rank 0 exited with code 3"),
        ("kill -KILL $$", -9, "rank 0 was killed by SIGKILL"),
        ("kill -SEGV $$", -11, "rank 0 was killed by SIGSEGV"),
        ("kill -TERM $$", -15, "rank 0 was killed by SIGTERM"),
        ("kill -40 $$", -40, "rank 0 was killed by signal 40"),
    ],
)
def test_how_a_rank_ended_is_told_in_words(tmp_path: Path, script: str, code: int, words: str) -> None:
    async def story(host: Host) -> None:
        host.start(script)
        await until(lambda: host.exits)

    (end,) = on_a_host(tmp_path, story).exits
    assert (end.rank, end.code, end.words) == (0, code, words)


def test_ends_are_told_in_the_order_of_ending(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        host.start(f"cd {tmp_path}; until test -e go; do sleep 0.01; done; exit 1", "exit 2")
        await until(lambda: host.exits)
        (tmp_path / "go").touch()
        await until(lambda: len(host.exits) == 2)
        assert not host.ranks

    exits = on_a_host(tmp_path, story).exits
    assert [end.rank for end in exits] == [1, 0]
    assert exits[0].at <= exits[1].at


def test_output_of_both_streams_is_in_the_ranks_own_log_and_is_added_to(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        for _ in range(2):
            host.exits.clear()
            host.start("echo out; echo err >&2", "echo other")
            await until(lambda: len(host.exits) == 2)

    host = on_a_host(tmp_path, story)
    assert host.log(0) == "out\nerr\n" * 2
    assert host.log(1) == "other\n" * 2


def test_a_rank_gets_its_arguments_and_environment_literally(tmp_path: Path) -> None:
    words = ["it's 50% done", "$HOME", "`id`", "a\nb", "", 'say "no"', "*", "ü"]

    async def story(host: Host) -> None:
        code = "import os, sys; print(sys.argv[1:], os.environ['NOTE'])"
        host.ranks.start([host.plan(0, sys.executable, "-c", code, *words, NOTE="$HOME it's", PYTHONUTF8="1")])
        await until(lambda: host.exits)

    assert on_a_host(tmp_path, story).log(0) == f"{words} $HOME it's\n"


@pytest.mark.parametrize(
    ("program", "code", "why"),
    [("no-such-program", 127, "No such file"), ("/no/such/program", 127, "No such file"),
     ("/etc/passwd", 126, "Permission"), ("/", 126, "Permission")],
)  # fmt: skip
def test_a_program_that_cannot_be_started_is_the_end_of_its_rank_and_says_why_in_its_log(
    tmp_path: Path, program: str, code: int, why: str
) -> None:
    async def story(host: Host) -> None:
        host.ranks.start([host.plan(0, program), host.plan(1, "sh", "-c", "exit 0")])
        await until(lambda: len(host.exits) == 2)

    host = on_a_host(tmp_path, story)
    assert {end.rank: end.code for end in host.exits} == {0: code, 1: 0}
    assert host.log(0).startswith(f"slurm-ft: cannot start `{program}`: {why}")


def test_what_a_dead_rank_leaves_in_its_process_group_is_killed(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        host.start(f"sleep 60 & echo $! > {tmp_path}/worker; kill -KILL $$")
        await until(lambda: host.exits)
        worker = await host.number("worker")
        await until(lambda: not lives(worker))

    on_a_host(tmp_path, story)


def test_a_rank_is_the_leader_of_a_group_of_its_own(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        host.start(f"echo $$ > {tmp_path}/0; {SLEEP}", f"echo $$ > {tmp_path}/1; {SLEEP}")
        for name in "01":
            pid = await host.number(name)
            assert os.getpgid(pid) == pid

    on_a_host(tmp_path, story)


def test_clear_asks_first_and_tells_nobody(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        host.start(f"trap 'echo saved; exit 0' TERM; echo > {tmp_path}/ready; while :; do sleep 0.01; done")
        await until((tmp_path / "ready").exists)
        await host.ranks.clear(10.0)
        assert not host.ranks

    host = on_a_host(tmp_path, story)
    assert host.log(0) == "saved\n"
    assert host.exits == []


def test_clear_kills_a_rank_that_does_not_listen(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        host.start(f"trap '' TERM; echo $$ > {tmp_path}/pid; {SLEEP}", "exit 0")
        pid = await host.number("pid")
        await host.ranks.clear(0.1)
        assert not lives(pid)
        assert not host.ranks

    on_a_host(tmp_path, story)


@pytest.mark.parametrize("listens", [True, False])
def test_clear_ends_a_stopped_rank_too(tmp_path: Path, listens: bool) -> None:
    trap = "trap 'echo saved; exit 0' TERM" if listens else "trap '' TERM"

    async def story(host: Host) -> None:
        host.start(f"{trap}; echo $$ > {tmp_path}/pid; while :; do sleep 0.01; done")
        pid = await host.number("pid")
        assert host.ranks.signal(signal.SIGSTOP, 0)
        await until(lambda: state(pid) == "T")
        await host.ranks.clear(10.0 if listens else 0.1)
        assert not lives(pid)

    assert on_a_host(tmp_path, story).log(0) == ("saved\n" if listens else "")


def test_after_a_clear_the_next_attempt_is_told_of_again(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        host.start(SLEEP)
        await host.ranks.clear(5.0)
        await host.ranks.clear(5.0)  # nothing is left: it returns at once
        host.ranks.start([host.plan(0, "sh", "-c", "exit 4", attempt=2)])
        await until(lambda: host.exits)

    assert [end.code for end in on_a_host(tmp_path, story).exits] == [4]


def test_a_signal_goes_to_the_rank_that_is_meant_or_says_that_there_is_none(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        host.start(SLEEP, SLEEP)
        assert host.ranks.signal(signal.SIGKILL, 1)
        await until(lambda: host.exits)
        assert not host.ranks.signal(signal.SIGKILL, 1)
        assert not host.ranks.signal(signal.SIGKILL, 7)
        assert host.ranks.signal(signal.SIGTERM)
        await until(lambda: len(host.exits) == 2)
        assert not host.ranks.signal(signal.SIGTERM)

    assert [(end.rank, end.code) for end in on_a_host(tmp_path, story).exits] == [(1, -9), (0, -15)]


AGENT = """
import asyncio, os, sys
from pathlib import Path
from slurm_ft.agent.ranks import Plan, Ranks

async def main():
    ranks = Ranks(print)
    script = f"trap '' TERM; echo $$ > {sys.argv[1]}/pid; exec sleep 60"
    log, cpus = Path(sys.argv[1]) / "log", os.sched_getaffinity(0)
    ranks.start([Plan(0, 0, ("sh", "-c", script), dict(os.environ), log, cpus)])
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_rank_dies_with_its_agent(tmp_path: Path) -> None:
    agent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(AGENT), str(tmp_path)])
    try:
        file = tmp_path / "pid"
        rank = int(wait_until(lambda: file.exists() and file.read_text().strip()))
        assert lives(rank)
    finally:
        agent.kill()
        agent.wait()
    wait_until(lambda: not lives(rank))


# --- CPUs --------------------------------------------------------------------------------------------------------


def test_a_rank_runs_on_the_cpus_of_its_plan(tmp_path: Path) -> None:
    one = frozenset([min(ALL)])

    async def story(host: Host) -> None:
        plan = host.plan(0, sys.executable, "-c", "import os; print(os.sched_getaffinity(0))")
        host.ranks.start([Plan(plan.rank, 0, plan.argv, plan.environment, plan.log, one)])
        await until(lambda: host.exits)

    assert on_a_host(tmp_path, story).log(0).strip() == str(set(one))


def test_neighbouring_cpus_go_together() -> None:
    assert split_cpus([7, 0, 1, 2, 5], 2) == [{0, 1, 2}, {5, 7}]


@given(st.sets(st.integers(0, 300), min_size=1), st.integers(1, 16))
def test_the_split_of_cpus_is_even_and_complete(cpus: set[int], parts: int) -> None:
    shares = split_cpus(sorted(cpus), parts)
    assert len(shares) == parts
    assert frozenset().union(*shares) == cpus
    if len(cpus) < parts:
        assert all(share == cpus for share in shares)
    else:
        assert sum(map(len, shares)) == len(cpus)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
