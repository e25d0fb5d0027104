"""How keepers are started: one on each host of the allocation, outside of every replica's step.

With Slurm all of them are one step of their own (`sft-keeper`), which a replica's step may come and go beside.
Unlike a replica's step it does not end when one of its hosts dies or one of its keepers ends. Its memory is that
of the job (`--mem=0`), and counts: what is kept is charged to this step.

On this machine each keeper is a process in a session of its own, with the mark by which what is left of a run is
found and killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_ft import env
from slurm_ft.agent.process import open_log
from slurm_ft.errors import LaunchError
from slurm_ft.launch.base import Ended, StepHandle, StepRequest, Watched, exit_words
from slurm_ft.launch.helper import Allocation
from slurm_ft.launch.srun import Listing, SrunStep, step_environment
from slurm_ft.paths import RunPaths
from slurm_ft.slurm.hostlist import compress

NAME = "sft-keeper"


@dataclass(frozen=True)
class KeeperRequest(StepRequest):
    """What to start: a keeper on each of `hosts`. An own kind of step, of no replica."""

    orphan_timeout: float = 120.0

    @classmethod
    def of(cls, paths: RunPaths, hosts: Sequence[str], start: int, orphan_timeout: float) -> KeeperRequest:
        return cls(paths, -1, start, tuple(hosts), orphan_timeout)

    @property
    def name(self) -> str:
        return f"{NAME}-{self.step}"

    @property
    def log(self) -> Path:
        return self.paths.root / "keeper.log"

    def keeper_argv(self) -> list[str]:
        return [
            sys.executable,
            "-m",
            "slurm_ft.keeper.server",
            f"--run-dir={self.paths.root}",
            f"--orphan-timeout={self.orphan_timeout:g}",
        ]


def keeper_argv(request: KeeperRequest, allocation: Allocation) -> list[str]:
    """The complete srun command line of the keepers' step. Pure."""
    hosts = len(request.hosts)
    options = [
        f"--jobid={allocation.job_id}",
        f"--job-name={request.name}",
        f"--nodelist={compress(request.hosts)}",
        f"--nodes={hosts}",
        f"--ntasks={hosts}",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        "--mem=0",
        "--gres=none",
        "--overlap",
        "--exact",
        "--cpu-bind=none",
        "--mpi=none",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--unbuffered",
        "--input=none",
        "--export=ALL",
    ]
    return ["srun", *options, *request.keeper_argv()]


def launch_by_srun(request: KeeperRequest, allocation: Allocation) -> list[StepHandle]:
    """Raises LaunchError when srun cannot be started."""
    argv = keeper_argv(request, allocation)
    process = _start(argv, step_environment(os.environ, str(request.paths.root)), request.log)
    return [SrunStep(request, Listing(allocation.ordered), Watched(process.pid, process))]


def launch_here(request: KeeperRequest) -> list[StepHandle]:
    """Raises LaunchError when a process cannot be started."""
    handles: list[StepHandle] = []
    for host in request.hosts:
        surroundings = {**os.environ, env.STEP: f"{request.paths.root}#keeper.{host}"}
        process = _start([*request.keeper_argv(), f"--host={host}"], surroundings, request.log)
        handles.append(LocalKeeper(Watched(process.pid, process)))
    return handles


def _start(argv: list[str], environment: dict[str, str], path: Path) -> subprocess.Popen[bytes]:
    try:
        with open_log(path) as log:
            return subprocess.Popen(
                argv,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        raise LaunchError(f"a keeper cannot be started: {error.strerror}") from None


class LocalKeeper:
    """A keeper on this machine."""

    def __init__(self, watched: Watched) -> None:
        self.pid = watched.pid
        self._watched = watched

    async def wait(self) -> Ended:
        code = await self._watched.wait()
        return Ended(code, f"the keeper {exit_words(code)}")

    async def terminate(self) -> None:
        self._watched.signal(signal.SIGTERM)

    async def kill(self) -> None:
        self._watched.signal(signal.SIGKILL)

    def left(self) -> None:
        """It has no agents."""

    def let_go(self) -> None:
        """Nothing stands for it."""


def adopt(request: KeeperRequest, allocation: Allocation | None, pid: int) -> StepHandle:
    """Take over a keeper, or a keepers' step, that an earlier controller has started."""
    watched = Watched(pid if _is_keeper(pid) else 0)
    return LocalKeeper(watched) if allocation is None else SrunStep(request, Listing(allocation.ordered), watched)


def _is_keeper(pid: int) -> bool:
    """Is this process, known by a number from the log, really a keeper or its srun?"""
    try:
        return b"slurm_ft.keeper.server" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
