"""Faults on purpose, as far as the controller carries them out: at an srun client, the Lighthouse or itself."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

LIGHTHOUSE = b"slurm_ft.controller.lighthouse"


def kill(pid: int) -> str:
    """SIGKILL; gives what stands against it, or ''."""
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError as error:
        return f"process {pid} cannot be killed: {error.strerror}"
    return ""


def kill_lighthouse(run: Path, proc: Path = Path("/proc")) -> str:
    """SIGKILL to the Lighthouse that our head keeps; gives what stands against it, or ''."""
    for task in (proc / str(os.getppid()) / "task").glob("*/children"):
        for child in task.read_text().split():
            with contextlib.suppress(OSError):
                words = (proc / child / "cmdline").read_bytes().split(b"\0")
                if LIGHTHOUSE in words and any(os.fsencode(run) in word for word in words):
                    return kill(int(child))
    return "this run has no Lighthouse"
