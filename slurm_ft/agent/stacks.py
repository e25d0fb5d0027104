"""The stacks of a rank that hangs, in its log: by py-spy where it is installed, and by faulthandler.

py-spy looks from outside, also into native code and into programs that we do not observe; it needs the right to
trace a process of the same user, which some systems give to root alone. faulthandler writes from within, in a
signal handler that runs while Python's lock is held; the bootstrap has set it up.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from slurm_ft.agent.process import open_log

WITHIN = 3.0
"""Seconds for py-spy to look at all ranks of a host, side by side."""


async def by_pyspy(ranks: Mapping[int, Path], program: str | None = None) -> None:
    """Append the stacks of these processes (pid -> log), as far as py-spy gets them. Does nothing without it."""
    program = program or shutil.which("py-spy")
    if program is None:
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WITHIN):
            await asyncio.gather(*(_dump(program, pid, log) for pid, log in ranks.items()))


async def _dump(program: str, pid: int, path: Path) -> None:
    with open_log(path) as log:
        try:
            process = await asyncio.create_subprocess_exec(
                program, "dump", "--pid", str(pid), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )
        except OSError:
            return
    try:
        await process.wait()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
