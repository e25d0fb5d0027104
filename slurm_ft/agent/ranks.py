"""The ranks of one host: started together, watched by pidfd, ended together.

A rank is started as a process of its own, or forked from a zygote where its command has one. It leads a
process group of its own and dies with its parent (PR_SET_PDEATHSIG), so a killed agent leaves no rank
behind. When a rank has ended, its process group is killed before the leader is reaped: until then no other
process can have got its number, so data-loader workers go and nobody else is hit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from slurm_ft.agent.forker import Forker
from slurm_ft.agent.process import die_with_parent, open_log, signal_name


class Preload(NamedTuple):
    """What a zygote is made of: the command, the modules to import ahead, the environment."""

    command: Sequence[str]
    modules: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Plan:
    """How to start one rank."""

    rank: int
    local_rank: int
    argv: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    cpus: frozenset[int]


@dataclass(frozen=True)
class Exit:
    """How a rank ended: `code` is its exit code, or -n for signal n; `at` is on the monotonic clock."""

    rank: int
    code: int
    at: float

    @property
    def signal_name(self) -> str | None:
        return signal_name(-self.code) if self.code < 0 else None

    @property
    def words(self) -> str:
        name = self.signal_name
        return f"rank {self.rank} was killed by {name}" if name else f"rank {self.rank} exited with code {self.code}"


def split_cpus(cpus: Sequence[int], parts: int) -> list[frozenset[int]]:
    """An even split of the host's CPUs, neighbours together; everyone gets all if there are too few."""
    ordered = sorted(cpus)
    if len(ordered) < parts:
        return [frozenset(ordered)] * parts
    share, rest = divmod(len(ordered), parts)
    result, start = [], 0
    for part in range(parts):
        end = start + share + (part < rest)
        result.append(frozenset(ordered[start:end]))
        start = end
    return result


class _Rank:
    """A rank that was asked for. One that a zygote forks has no number until the zygote tells it."""

    def __init__(self, plan: Plan, process: subprocess.Popen[bytes] | None = None) -> None:
        self.plan = plan
        self.process = process
        self.pid = 0
        self.pidfd = -1
        if process is not None:
            self.born(process.pid)

    def born(self, pid: int) -> None:
        self.pid = pid
        with contextlib.suppress(ProcessLookupError):  # it has ended already; its end is on the way
            self.pidfd = os.pidfd_open(pid)

    def signal(self, number: int) -> bool:
        """False when there is no process: it is not forked yet, or it has just ended."""
        if self.pidfd < 0:
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)
            return True
        return False


class Ranks:
    """The ranks of this host's current attempt. `on_exit` is told of each end, in the order of ending.

    With `preload` ranks are forked from a zygote, which is started now and again when it has died.
    """

    def __init__(self, on_exit: Callable[[Exit], None], preload: Preload | None = None) -> None:
        self._on_exit = on_exit
        self._ranks: dict[int, _Rank] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._clearing = False
        self._preload = preload
        self._forker = self._new_forker()

    def __bool__(self) -> bool:
        return bool(self._ranks)

    @property
    def numbers(self) -> list[int]:
        """The ranks that run here."""
        return sorted(self._ranks)

    @property
    def pids(self) -> dict[int, int]:
        """The process of each rank that runs here."""
        return {number: rank.pid for number, rank in self._ranks.items() if rank.pid}

    def _new_forker(self) -> Forker | None:
        if self._preload is None:
            return None
        try:
            return Forker(*self._preload, self._forked, self._fork_ended, self._forker_gone)
        except OSError:
            self._preload = None  # its Python cannot be started: the ranks themselves will say why
            return None

    def start(self, plans: Sequence[Plan]) -> None:
        """Start all. A rank whose program cannot be started ends at once with code 127 (or 126)."""
        self._clearing = False
        self._forker = self._forker or self._new_forker()
        for plan in plans:
            try:
                if self._forker is not None:
                    self._fork(plan, self._forker)
                else:
                    self._spawn(plan)
            except OSError as error:
                self._ranks.pop(plan.rank, None)
                code = 127 if isinstance(error, FileNotFoundError) else 126
                with contextlib.suppress(OSError), open(plan.log, "a") as log:
                    log.write(f"slurm-ft: cannot start `{plan.argv[0]}`: {error.strerror}\n")
                self._on_exit(Exit(plan.rank, code, time.monotonic()))

    def _spawn(self, plan: Plan) -> None:
        with open_log(plan.log) as log:
            process = subprocess.Popen(
                plan.argv,
                env=dict(plan.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=die_with_parent(os.getpid(), cpus=plan.cpus),
            )
        rank = self._add(_Rank(plan, process))
        asyncio.get_running_loop().add_reader(rank.pidfd, self._ended, rank, process)

    def _add(self, rank: _Rank) -> _Rank:
        self._ranks[rank.plan.rank] = rank
        self._empty.clear()
        return rank

    def _ended(self, rank: _Rank, process: subprocess.Popen[bytes]) -> None:
        at = time.monotonic()
        asyncio.get_running_loop().remove_reader(rank.pidfd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self._remove(rank, process.wait(), at)

    def _remove(self, rank: _Rank, code: int, at: float) -> None:
        if rank.pidfd >= 0:
            os.close(rank.pidfd)
        del self._ranks[rank.plan.rank]
        if not self._ranks:
            self._empty.set()
        if not self._clearing:
            self._on_exit(Exit(rank.plan.rank, code, at))

    def _fork(self, plan: Plan, forker: Forker) -> None:
        self._add(_Rank(plan))
        forker.fork(plan.rank, plan.environment, str(plan.log), sorted(plan.cpus))

    def _forked(self, number: int, pid: int) -> None:
        self._ranks[number].born(pid)
        if self._clearing:
            self._ranks[number].signal(signal.SIGTERM)

    def _fork_ended(self, number: int, code: int, at: float) -> None:
        self._remove(self._ranks[number], code, at)

    def _forker_gone(self) -> None:
        """The zygote has died, and its ranks with it, by the signal they get at their parent's death. Nobody
        reaps them for us now: their groups are killed, and each is over when its process is."""
        self._forker = None
        for rank in [rank for rank in self._ranks.values() if rank.process is None]:
            if rank.pidfd < 0:
                self._remove(rank, -signal.SIGKILL, time.monotonic())
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            asyncio.get_running_loop().add_reader(rank.pidfd, self._orphan_ended, rank)

    def _orphan_ended(self, rank: _Rank) -> None:
        asyncio.get_running_loop().remove_reader(rank.pidfd)
        self._remove(rank, -signal.SIGKILL, time.monotonic())

    def close(self) -> None:
        if self._forker is not None:
            self._forker.close()
            self._forker = None

    def signal(self, number: int, rank: int | None = None) -> bool:
        """Send a signal to one rank or to all; False when it has reached none."""
        sent = [item.signal(number) for n, item in self._ranks.items() if rank in (None, n)]
        return any(sent)

    async def clear(self, grace: float) -> None:
        """End all ranks: TERM, up to `grace` seconds, KILL. Returns when they are gone; tells nobody."""
        self._clearing = True
        if not self._ranks:
            return
        self.signal(signal.SIGTERM)
        # A stopped process takes its TERM only when it is let go on.
        self.signal(signal.SIGCONT)
        try:
            await asyncio.wait_for(self._empty.wait(), grace)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            if self._forker is not None and any(rank.pidfd < 0 for rank in self._ranks.values()):
                self._forker.kill()  # it is still importing: what it would fork later must not come
            await self._empty.wait()
