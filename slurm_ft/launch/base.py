"""The interface of the two launchers, and how a process is watched."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slurm_ft.agent.process import signal_name
from slurm_ft.paths import RunPaths
from slurm_ft.slurm.hostlist import compress


class Request(Protocol):
    """What a launcher must know of a step: one process is started on each of `hosts` by `agent_argv`."""

    @property
    def paths(self) -> RunPaths: ...

    @property
    def hosts(self) -> tuple[str, ...]: ...

    @property
    def name(self) -> str:
        """No other step of the job, and none of the folder `paths.root`, has this name."""
        ...

    @property
    def log(self) -> Path: ...

    def agent_argv(self) -> list[str]: ...


@dataclass(frozen=True)
class StepRequest:
    """What to start: one agent on each of `hosts`, for step number `step` of a replica."""

    paths: RunPaths
    replica: int
    step: int
    hosts: tuple[str, ...]

    @property
    def name(self) -> str:
        """The step's name in Slurm; no other step of the job has it."""
        return f"sft-r{self.replica}-s{self.step}"

    @property
    def log(self) -> Path:
        return self.paths.step_log(self.replica, self.step)

    def agent_argv(self) -> list[str]:
        return [
            sys.executable,
            "-m",
            "slurm_ft.agent.main",
            f"--run-dir={self.paths.root}",
            f"--replica={self.replica}",
            f"--step={self.step}",
            f"--hosts={compress(self.hosts)}",
        ]


@dataclass(frozen=True)
class Ended:
    """How a step ended: its exit code (-n for signal n, None when it was not our child) and in words.

    `unanswered` means that it was never started, because Slurm did not answer.
    """

    code: int | None
    what: str
    unanswered: bool = False


class StepHandle(Protocol):
    """A step that was started."""

    pid: int

    async def wait(self) -> Ended:
        """Returns when no process of the step is left."""
        ...

    async def terminate(self) -> None:
        """Ask the step to end (TERM)."""
        ...

    async def kill(self) -> None:
        """End the step now (KILL)."""
        ...

    def left(self) -> None:
        """Its agents have said that they leave: where nothing else tells of its end, this does."""
        ...

    def let_go(self) -> None:
        """Somebody else looks after the step: end the process that stands for it here, and not the step."""
        ...


class Launcher(Protocol):
    """Starts steps, and finds those that an earlier controller has started."""

    def launch(self, request: Request) -> StepHandle:
        """Start a step. Raises LaunchError when not even its first process can be started."""
        ...

    def adopt(self, request: Request, pid: int) -> StepHandle:
        """Take over a step whose first process is, or was, `pid`, maybe on another host."""
        ...


class Watched:
    """A process, our child or not, whose end can be awaited, by any number of waiters."""

    def __init__(self, pid: int, child: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self._child = child
        self._over = asyncio.Event()
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:  # it has ended already
            self._pidfd = -1
            self._over.set()
        else:
            asyncio.get_running_loop().add_reader(self._pidfd, self._ended)

    def _ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._over.set()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    async def wait(self) -> int | None:
        """The exit code (-n for signal n), or None when the process was not our child."""
        await self._over.wait()
        return self._child.wait() if self._child is not None else None

    def signal(self, number: int) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)


def exit_words(code: int | None) -> str:
    if code is None:
        return "ended"
    if code < 0:
        return f"was killed by {signal_name(-code)}"
    return f"exited with code {code}"
