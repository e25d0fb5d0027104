"""The ranks of one host: started together, watched by pidfd, ended together.

A rank is the leader of a process group of its own and dies with the agent (PR_SET_PDEATHSIG), so a killed
agent leaves no rank behind. When a rank has ended, its process group is killed before the leader is reaped:
until then no other process can have got its number, so data-loader workers go and nobody else is hit.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


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
        if self.code >= 0:
            return None
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"

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
    def __init__(self, plan: Plan, process: subprocess.Popen[bytes]) -> None:
        self.plan = plan
        self.process = process
        self.pidfd = os.pidfd_open(process.pid)


class Ranks:
    """The ranks of this host's current attempt. `on_exit` is told of each end, in the order of ending."""

    def __init__(self, on_exit: Callable[[Exit], None]) -> None:
        self._on_exit = on_exit
        self._ranks: dict[int, _Rank] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._clearing = False

    def __bool__(self) -> bool:
        return bool(self._ranks)

    def start(self, plans: Sequence[Plan]) -> None:
        """Start all. A rank whose program cannot be started ends at once with code 127 (or 126)."""
        self._clearing = False
        for plan in plans:
            try:
                self._start(plan)
            except OSError as error:
                code = 127 if isinstance(error, FileNotFoundError) else 126
                with contextlib.suppress(OSError), open(plan.log, "a") as log:
                    log.write(f"slurm-ft: cannot start `{plan.argv[0]}`: {error.strerror}\n")
                self._on_exit(Exit(plan.rank, code, time.monotonic()))

    def _start(self, plan: Plan) -> None:
        plan.log.parent.mkdir(parents=True, exist_ok=True)
        agent = os.getpid()

        def prepare() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != agent:  # it died between fork and prctl
                os.kill(os.getpid(), signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, plan.cpus)

        with open(plan.log, "ab") as log:
            process = subprocess.Popen(
                plan.argv,
                env=dict(plan.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=prepare,
            )
        rank = _Rank(plan, process)
        self._ranks[plan.rank] = rank
        self._empty.clear()
        asyncio.get_running_loop().add_reader(rank.pidfd, self._ended, rank)

    def _ended(self, rank: _Rank) -> None:
        at = time.monotonic()
        asyncio.get_running_loop().remove_reader(rank.pidfd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.process.pid, signal.SIGKILL)
        code = rank.process.wait()
        os.close(rank.pidfd)
        del self._ranks[rank.plan.rank]
        if not self._ranks:
            self._empty.set()
        if not self._clearing:
            self._on_exit(Exit(rank.plan.rank, code, at))

    def signal(self, number: int, rank: int | None = None) -> bool:
        """Send a signal to one rank or to all; False when there is none."""
        chosen = [r for n, r in self._ranks.items() if rank in (None, n)]
        for item in chosen:
            signal.pidfd_send_signal(item.pidfd, number)
        return bool(chosen)

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
            await self._empty.wait()
