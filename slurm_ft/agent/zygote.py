"""The zygote: a Python with the program's heavy imports done, from which a host's ranks are forked.

    python FLAGS zygote.py SOCKET-FD BOOTSTRAP MODULE,MODULE,... PROGRAM ARGS

Importing torch and what stands on it costs seconds, on a busy host tens of seconds, and a restarted rank's
peers train on meanwhile. A rank forked from the zygote has it all at once. It then runs the bootstrap on the
program as a rank that was started afresh does, and ends as a Python ends: exit code, atexit, signals and
`__main__` are its own.

Fork safety. The zygote imports and never computes: one multi-threaded operation, one backward pass or one
touch of a GPU before the fork, and a rank would hang or fail. It holds one socket and no thread of its own.
A rank gets new seeds for `random` and numpy (torch's default seed is a constant), its own process group,
affinity, log and environment, and the default action of every signal. What a module reads from the
environment while it is imported is the zygote's: the same for every attempt of this host.

The agent asks (one JSON packet a fork) and is told of each rank's number and of its end. The zygote reaps:
it kills the process group of a rank that has ended before its number can be given away. It ends with the
agent, and its ranks with it. Uses the standard library alone and is run by its path, like the bootstrap.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import random
import select
import signal
import socket
import sys
import time
from types import ModuleType
from typing import Any

PACKET_BYTES = 150_000
_PR_SET_PDEATHSIG = 1
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def _load(name: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _preload(modules: list[str]) -> None:
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # the program will meet it too, and say so in its own log
            print(f"slurm-ft zygote: {name} is not preloaded: {error}", file=sys.stderr)
    gc.collect()
    gc.freeze()  # the collector must not touch, and so copy, what all ranks share


class _Zygote:
    def __init__(self, agent: socket.socket) -> None:
        self._agent = agent
        self._ranks: dict[int, int] = {}
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)  # the agent ends ranks one by one, and us by its own end
        self._woken, self._wake = socket.socketpair(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def serve(self) -> dict[str, Any] | None:
        """Fork as asked. Returns the request in a child that is to become a rank, None when the agent is gone."""
        while True:
            ready, _, _ = select.select([self._agent, self._woken], [], [])
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
                self._reap()
            if self._agent in ready:
                packet = self._agent.recv(PACKET_BYTES)
                if not packet:
                    return None
                request = json.loads(packet)
                if self._fork(request):
                    return request  # type: ignore[no-any-return]

    def _fork(self, request: dict[str, Any]) -> bool:
        """True in the child."""
        zygote = os.getpid()
        # A signal that comes before the child has its default actions back waits until then.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._ranks[pid] = request["rank"]
            self._tell({"rank": request["rank"], "pid": pid})
            return False
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != zygote:
            os._exit(128 + signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number in (*_IGNORED, signal.SIGCHLD):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        for end in (self._agent, self._woken, self._wake):
            end.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return True

    def _reap(self) -> None:
        for pid, rank in list(self._ranks.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            at = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            del self._ranks[pid]
            self._tell({"rank": rank, "pid": pid, "code": os.waitstatus_to_exitcode(status), "at": at})

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._agent.send(json.dumps(message).encode())


def _open_log(path: str) -> int:
    """The log, or /dev/null when it cannot be opened: on a full disk a rank runs without a log."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def _become_rank(request: dict[str, Any]) -> None:
    """Take on what is this rank's own."""
    os.setpgid(0, 0)
    log = _open_log(request["log"])
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, request["cpus"])
    os.environ.update(request["environment"])
    atexit.register(gc.unfreeze)  # or extension modules complain at the end of leaks that are none

    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def main() -> None:
    """In the zygote: serve, and leave when the agent is gone. In a rank: run the program."""
    descriptor, bootstrap_path, modules, *program = sys.argv[1:]
    agent = socket.socket(fileno=int(descriptor))
    agent.set_inheritable(False)
    bootstrap = _load("_slurm_ft_bootstrap", bootstrap_path)
    bootstrap.OWN_FILES.add(__file__)
    bootstrap.enter_folder(program)
    _preload(modules.split(","))
    request = _Zygote(agent).serve()
    if request is not None:
        _become_rank(request)
        sys.argv = [bootstrap_path, *program]
        bootstrap.main()


if __name__ == "__main__":
    # The program takes over this very namespace, so what outlives it must live in another.
    _load("_slurm_ft_zygote", os.path.abspath(__file__)).main()
