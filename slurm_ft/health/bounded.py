"""Checks that cannot hang the one who asks.

A `stat` on a dead file server does not come back and cannot be killed. So each check runs in a forked process
of its own, all at once, and hands its faults back through a pipe. One that has not answered in time is a
fault itself; its process group gets SIGKILL and is left to the kernel, which nobody waits for.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping

Check = Callable[[], list[str]]
"""Gives one sentence for each fault; none when all is well."""


def bounded(checks: Mapping[str, Check], seconds: float) -> list[str]:
    """All faults of these checks, in their order. Returns `seconds` after the call at the latest."""
    deadline = time.monotonic() + seconds
    running = {name: _start(check) for name, check in checks.items()}
    answers: dict[str, bytes] = dict.fromkeys(checks, b"")
    with selectors.DefaultSelector() as selector:
        for name, (_, pipe) in running.items():
            selector.register(pipe, selectors.EVENT_READ, name)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                block = os.read(key.fd, 65536)
                answers[key.data] += block
                if not block:
                    selector.unregister(key.fd)
        late = {key.data for key in selector.get_map().values()}
    faults: list[str] = []
    for name, (pid, pipe) in running.items():
        os.close(pipe)
        _end(pid)
        faults += (
            [f"the check of {name} did not answer within {seconds:g} s"] if name in late else _read(name, answers[name])
        )
    return faults


def _start(check: Check) -> tuple[int, int]:
    """A process that runs the check: its number, and the pipe on which it answers."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    code = 1
    try:
        os.setpgid(0, 0)
        os.close(read)
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # what a library prints is no answer
        try:
            answer: object = check()
        except Exception as error:
            answer = [f"{type(error).__name__}: {error}"]
        with os.fdopen(write, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
        code = 0
    finally:
        os._exit(code)


def _end(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the group is there only once the child has made it
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _read(name: str, answer: bytes) -> list[str]:
    try:
        return [str(fault) for fault in json.loads(answer)]
    except ValueError:
        return [f"the check of {name} crashed"]
