"""Faults on purpose, as far as the controller carries them out: at an srun client, the Lighthouse or itself."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

LIGHTHOUSE = b"slurm_ft.controller.lighthouse"


def obstacle(kind: str, seconds: float) -> Callable[[], None]:
    """What meets a write of events for so many seconds from now: an error (`disk-full`), or a wait (`slow-fs`)."""
    until = time.monotonic() + seconds

    def full() -> None:
        if time.monotonic() < until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def slow() -> None:
        time.sleep(max(0.0, until - time.monotonic()))

    return full if kind == "disk-full" else slow


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
