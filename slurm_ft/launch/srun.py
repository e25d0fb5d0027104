"""Steps by `srun` inside an allocation.

Every option that Slurm would otherwise take from the environment or from slurm.conf is written out: CPUs
per task are not inherited in 22.05, and the time srun waits after the first task has ended, or whether it
kills a step at a bad exit, are a site's choice. For the same reason no SLURM_* option variable of the batch
step is handed on.

The step dies with its host (no `--no-kill` here; that belongs to the job). `SLURM_EXIT_ERROR` tells srun's
own failure from the program's. The srun client runs in a session of its own, so it outlives the controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_ft import env
from slurm_ft.agent.process import open_log
from slurm_ft.errors import EXIT_LAUNCH, LaunchError
from slurm_ft.launch.base import Ended, Request, Watched, exit_words
from slurm_ft.slurm.hostlist import compress

GONE_WITHIN = 10.0
"""Seconds for which a cancelled step is awaited. Slurm lists a dead host's steps for longer: that list is
not to be believed, and a step that does not go is left to Slurm."""

KEPT = frozenset({"SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CLUSTERS", "SLURM_CLUSTER_NAME"})
"""The only variables of Slurm's that a step's srun sees: where Slurm is, and in which job."""


@dataclass(frozen=True)
class Allocation:
    """What a step asks for on each host: all that the job has there."""

    job_id: str
    cpus_per_host: int
    gpus_per_host: int = 0


def step_argv(request: Request, allocation: Allocation) -> list[str]:
    """The complete srun command line of a step. Pure."""
    hosts = len(request.hosts)
    options = [
        f"--jobid={allocation.job_id}",
        f"--job-name={request.name}",
        f"--nodelist={compress(request.hosts)}",
        f"--nodes={hosts}",
        f"--ntasks={hosts}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={allocation.cpus_per_host}",
        "--mem=0",
        *([f"--gres=gpu:{allocation.gpus_per_host}"] if allocation.gpus_per_host else []),
        "--overlap",
        "--exact",
        "--cpu-bind=none",
        "--mpi=none",
        "--kill-on-bad-exit=1",
        "--wait=60",
        "--unbuffered",
        "--input=none",
        "--export=ALL",
    ]
    return ["srun", *options, *request.agent_argv()]


def step_environment(surroundings: Mapping[str, str], run: str) -> dict[str, str]:
    """The environment of a step's srun. Pure."""
    inherited = {
        name: value
        for name, value in surroundings.items()
        if name in KEPT or name.startswith("SLURM_FT_") or not name.startswith(("SLURM_", "SRUN_", "SBATCH_"))
    }
    return {**inherited, env.RUN: run, "SLURM_EXIT_ERROR": str(EXIT_LAUNCH)}


class SrunLauncher:
    """Starts steps in one allocation."""

    def __init__(self, allocation: Allocation) -> None:
        self._allocation = allocation

    def launch(self, request: Request) -> SrunStep:
        argv = step_argv(request, self._allocation)
        try:
            with open_log(request.log) as log:
                process = subprocess.Popen(
                    argv,
                    env=step_environment(os.environ, str(request.paths.root)),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(f"srun cannot be started: {error.strerror}", "is Slurm's client on the PATH?") from None
        return SrunStep(request, self._allocation.job_id, Watched(process.pid, process))

    def adopt(self, request: Request, pid: int) -> SrunStep:
        return SrunStep(request, self._allocation.job_id, Watched(pid if _is_client_of(pid, request) else 0))


def _is_client_of(pid: int, request: Request) -> bool:
    """Is this process, known by a number from the log, really the srun of this step?"""
    try:
        return f"--job-name={request.name}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


class SrunStep:
    """A step that an srun client stands for.

    Killing the client does not end the step's processes, so a client that was killed, or was not our
    child, is not taken for the end of the step: the step is cancelled by its id and awaited.
    """

    def __init__(self, request: Request, job_id: str, client: Watched) -> None:
        self.pid = client.pid
        self._request = request
        self._job_id = job_id
        self._client = client

    async def wait(self) -> Ended:
        code = await self._client.wait()
        if code is None or code < 0:
            await self._make_sure_it_is_gone()
        return Ended(code, f"srun {exit_words(code)}{self._last_words()}")

    async def terminate(self) -> None:
        await self._cancel("TERM")

    async def kill(self) -> None:
        await self._cancel("KILL")
        self._client.signal(signal.SIGKILL)

    async def _make_sure_it_is_gone(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GONE_WITHIN):
                while await self._step_ids() != []:
                    await self._cancel("KILL")
                    await asyncio.sleep(0.5)

    async def _step_ids(self) -> list[str] | None:
        """The ids of the job's steps that have our name; None when Slurm does not answer, which is no answer.

        Asked only when srun's own word is missing.
        """
        out = await _output("squeue", "--steps", "--noheader", f"--jobs={self._job_id}", "--format=%i %j")
        if out is None:
            return None
        rows = (line.split(None, 1) for line in out.splitlines())
        return [row[0] for row in rows if len(row) == 2 and row[1].strip() == self._request.name]

    async def _cancel(self, name: str) -> None:
        for step_id in await self._step_ids() or ():
            await _output("scancel", f"--signal={name}", step_id)

    def _last_words(self) -> str:
        """srun's own error lines, since its exit code alone does not say what was wrong."""
        try:
            lines = self._request.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        words = [line for line in lines if line.startswith(("srun: error", "slurmstepd: error", "srun: fatal"))]
        return f": {words[-1]}" if words else ""


async def _output(*argv: str) -> str | None:
    """What a Slurm command prints, or None when it fails: these calls only help, nothing depends on them."""
    environment = step_environment(os.environ, "") | {"LC_ALL": "C"}
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        out, _ = await asyncio.wait_for(process.communicate(), 20)
    except (OSError, TimeoutError):
        return None
    if process.returncode:
        return None
    return out.decode("utf-8", errors="replace")


def allocation_from(surroundings: Mapping[str, str]) -> Allocation:
    """The allocation around us, from the batch step's environment.

    The smallest host decides the CPUs of a step: all hosts of a step must be able to give them.
    """
    cpus = surroundings.get("SLURM_JOB_CPUS_PER_NODE") or surroundings.get("SLURM_CPUS_ON_NODE") or "1"
    gpus = surroundings.get("SLURM_GPUS_ON_NODE", "")
    return Allocation(
        job_id=surroundings["SLURM_JOB_ID"],
        cpus_per_host=min(_counts(cpus)),
        gpus_per_host=int(gpus) if gpus.isdigit() else 0,
    )


def _counts(text: str) -> Sequence[int]:
    """The numbers in Slurm's `72(x2),36`."""
    return [int(part.partition("(")[0]) for part in text.split(",")]
