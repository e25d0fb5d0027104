"""Running a health check on a host, from the agent that is to work there or from the controller for a spare.

A check is any command: 0 says fit, anything else unfit, and what it printed says why (`ERROR: ...` first, as
`slurm-ft check` does). Before ranks are started it is asked again while there is time: the memory of a program that
was killed is freed a moment later. What it said last counts, and that it hung only when it has said nothing yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

AGAIN_AFTER = 1.0
GONE_WITHIN = 1.0
MARK = "ERROR: "
SHOWN = 300


def shell(command: str) -> list[str]:
    """The command line that runs a health check."""
    return ["/bin/sh", "-c", command]


def check_environment(surroundings: Mapping[str, str]) -> dict[str, str]:
    """The check's environment: its `slurm-ft` is found although no module was loaded here."""
    path = f"{surroundings.get('PATH', os.defpath)}:{Path(sys.executable).parent}"
    return {**surroundings, "PATH": path}


async def fault(argv: Sequence[str], environ: Mapping[str, str], seconds: float, again: bool = False) -> str:
    """What is wrong, in one line, or '' when the check passes within `seconds`; `again` asks until then, as long as
    there is time for another try like the last one."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    said = f"the check did not answer within {seconds:g} s"
    while True:
        began = loop.time()
        found = await _once(argv, environ, deadline - began)
        took = loop.time() - began
        said = said if found is None else found
        if not said or not again or loop.time() + AGAIN_AFTER + took >= deadline:
            return said
        await asyncio.sleep(AGAIN_AFTER)


async def _once(argv: Sequence[str], environ: Mapping[str, str], left: float) -> str | None:
    """What one try says is wrong, or ''; None when it does not answer in the time that is left."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=dict(environ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return f"the check cannot be started: {error.strerror}"
    try:
        out, _ = await asyncio.wait_for(process.communicate(), left)
    except TimeoutError:
        return None
    finally:
        # Also what the check has left behind, and also when we are cancelled.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):  # what hangs in a dead file system is left to the kernel
            await asyncio.wait_for(process.communicate(), GONE_WITHIN)
    return words(out.decode("utf-8", errors="replace"), process.returncode or 0)


def words(text: str, code: int) -> str:
    """The reason in a check's output, '' for code 0. Pure."""
    if code == 0:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    marked = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    if marked:
        more = f" (and {len(marked) - 1} more)" if len(marked) > 1 else ""
        return marked[0][:SHOWN] + more
    return lines[-1][:SHOWN] if lines else f"the check exited with code {code}"
