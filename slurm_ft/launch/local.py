"""Steps as processes of this machine: for a laptop, and for tests. Needs no root and no network.

A local host is a name. A step is `localstep.py` in a session of its own with one agent per host. Its
processes carry its mark in their environment; when it has ended, whatever still carries it is killed, so
that nothing of an attempt outlives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from slurm_ft import env
from slurm_ft.agent import fitness
from slurm_ft.agent.process import open_log
from slurm_ft.errors import LaunchError
from slurm_ft.launch import localstep
from slurm_ft.launch.base import Ended, Request, Watched, exit_words
from slurm_ft.launch.helper import Allocation


def hosts(count: int) -> list[str]:
    """The names of the local hosts."""
    return [f"local{index}" for index in range(count)]


class LocalLauncher:
    """Starts steps on this machine."""

    allocation: Allocation | None = None

    def launch(self, request: Request) -> LocalStep:
        argv = [sys.executable, localstep.__file__, *request.hosts, "--", *request.agent_argv()]
        mark = _mark(request)
        try:
            with open_log(request.log) as log:
                process = subprocess.Popen(
                    argv,
                    env={**os.environ, env.STEP: mark},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(f"a local step cannot be started: {error}") from None
        return LocalStep(request, Watched(process.pid, process))

    def look(self, host: str, command: str) -> tuple[list[str], dict[str, str]]:
        return fitness.shell(command), fitness.check_environment({**os.environ, env.HOST: host})

    def adopt(self, request: Request, pid: int) -> LocalStep:
        mark = _mark(request)
        alive = _Member.find(pid, mark) is not None
        return LocalStep(request, Watched(pid if alive else 0), pid)


def _mark(request: Request) -> str:
    """What the processes of a step have in their environment, and no others."""
    return f"{request.paths.root}#{request.name}#"  # so that no mark is the beginning of another


class LocalStep:
    """A step on this machine; its first process has the number `pid` and leads the session `pid`."""

    def __init__(self, request: Request, leader: Watched, pid: int = 0) -> None:
        self.pid = pid or leader.pid
        self._mark = _mark(request)
        self._leader = leader

    async def wait(self) -> Ended:
        code = await self._leader.wait()
        while left := members(self._mark):
            for member in left:
                member.kill()
            await asyncio.sleep(0.01)
        return Ended(code, f"the step {exit_words(code)}")

    async def terminate(self) -> None:
        self._leader.signal(signal.SIGTERM)

    async def kill(self) -> None:
        self._leader.signal(signal.SIGKILL)

    def left(self) -> None:
        """Its first process tells of its end."""

    def let_go(self) -> None:
        """Its first process is the step itself, and needs nobody."""


@dataclass(frozen=True)
class _Member:
    """A living process of a run's steps. Its number alone would not do: numbers are given away again."""

    pid: int
    mark: str

    @staticmethod
    def find(pid: int, mark: str) -> _Member | None:
        """The process, if it lives and its step's mark begins with `mark`."""
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return None
        found = any(item.startswith(f"{env.STEP}={mark}".encode()) for item in environment)
        return _Member(pid, mark) if found and state not in "ZX" else None

    def kill(self) -> None:
        """Kill it if it still is who it was: the pidfd keeps its number from being given away."""
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(self.pid)
            try:
                if _Member.find(self.pid, self.mark) == self:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)


def members(mark: str) -> list[_Member]:
    """The living processes whose step's mark begins with `mark`."""
    found = (_Member.find(int(name), mark) for name in os.listdir("/proc") if name.isdigit())
    return [member for member in found if member is not None]


def sweep(root: Path) -> None:
    """Kill whatever is left of a run's steps on this machine."""
    for member in members(f"{root}#"):
        member.kill()
