"""What we do to a child process before its program starts, and what we call its end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Collection

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


def signal_name(number: int) -> str:
    """SIGKILL for 9; real-time signals have no names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
