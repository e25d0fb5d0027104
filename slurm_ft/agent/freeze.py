"""Freezes processes and, if asked, thaws them: `python -I -S freeze.py SECONDS PID...`.

To their peers and to the controller a host whose processes are all stopped looks like one whose network is
cut: nothing is answered, and no connection is reset. It is done from a process outside, since the agent
stops too. Processes are held by descriptor, so that a number given away meanwhile is not hit. SECONDS of 0
mean for good.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time


def main(seconds: float, pids: list[int]) -> None:
    held = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            held.append(os.pidfd_open(pid))
    _send(held, signal.SIGSTOP)
    if seconds:
        time.sleep(seconds)
        _send(held, signal.SIGCONT)


def _send(held: list[int], number: int) -> None:
    for process in held:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, number)


if __name__ == "__main__":
    main(float(sys.argv[1]), [int(word) for word in sys.argv[2:]])
