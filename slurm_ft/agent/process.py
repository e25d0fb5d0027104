"""What we do to a child process before its program starts, and what we call its end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Collection
from pathlib import Path
from typing import BinaryIO

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(
    parent: int, number: signal.Signals = signal.SIGKILL, cpus: Collection[int] = ()
) -> Callable[[], None]:
    """A preexec_fn: the child gets `number` when its parent dies, and runs on `cpus` only (all if none).

    The parent may die between the fork and the call, so its number is looked at once more.
    """

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os.kill(os.getpid(), number)
        if cpus:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, cpus)

    return prepare


def open_log(path: Path) -> BinaryIO:
    """The log of a process, to append to; /dev/null when it cannot be opened. What a process writes is not
    worth the process: on a full disk it runs without a log."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "ab")
    except OSError:
        return open(os.devnull, "ab")


def signal_name(number: int) -> str:
    """SIGKILL for 9; real-time signals have no names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
