"""Is a host usable again? One small step there: its slurmd answers, and this Python starts with this package."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from slurm_ft.launch.srun import step_environment

MINUTES = 1
"""Slurm's own limit on the step, in case that whoever waits for it is gone."""


def probe_argv(cluster: str, job_id: str, host: str) -> list[str]:
    """The command line of the look at a host. Pure."""
    works = [sys.executable, "-c", "import slurm_ft.agent.main"]
    if cluster == "local":
        return works
    options = [
        f"--jobid={job_id}",
        f"--job-name=sft-probe-{host}",
        f"--nodelist={host}",
        "--nodes=1",
        "--ntasks=1",
        "--cpus-per-task=1",
        "--mem=0",
        f"--time={MINUTES}",
        "--overlap",
        "--cpu-bind=none",
        "--mpi=none",
        "--immediate=10",
        "--input=none",
        "--export=ALL",
    ]
    return ["srun", *options, *works]


async def works(argv: Sequence[str], surroundings: Mapping[str, str], seconds: float) -> bool:
    """Does the look at a host end well within `seconds`? It leaves no process behind."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=step_environment(surroundings, ""),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return False
    try:
        return await asyncio.wait_for(process.wait(), seconds) == 0
    except TimeoutError:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
