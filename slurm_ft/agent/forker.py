"""The agent's end of the zygote (see zygote.py): asks it to fork ranks, and hears how they end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slurm_ft.agent.command import BOOTSTRAP, expand_titan, program_index
from slurm_ft.agent.process import die_with_parent

ZYGOTE = str(Path(__file__).with_name("zygote.py"))
PACKET_BYTES = 60_000


class Forker:
    """One zygote. It is started at once and forks as soon as its imports are done.

    `on_pid(rank, pid)` tells that a rank was forked, `on_exit(rank, code, at)` how it ended, and `on_gone()`
    that the zygote itself is gone, and all its ranks with it.
    """

    def __init__(
        self,
        command: Sequence[str],
        modules: Sequence[str],
        environment: Mapping[str, str],
        on_pid: Callable[[int, int], None],
        on_exit: Callable[[int, int, float], None],
        on_gone: Callable[[], None],
    ) -> None:
        self._environment = dict(environment)
        self._on_pid, self._on_exit, self._on_gone = on_pid, on_exit, on_gone
        self._socket, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far:
            self._process = subprocess.Popen(
                zygote_argv(command, modules, far.fileno()),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                process_group=0,
                pass_fds=(far.fileno(),),
                preexec_fn=die_with_parent(os.getpid()),
            )
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def fork(self, rank: int, environment: Mapping[str, str], log: str, cpus: Sequence[int]) -> None:
        """Ask for a rank. Only what differs from the zygote's own environment is sent.

        Raises OSError when the zygote is gone.
        """
        changed = {name: value for name, value in environment.items() if self._environment.get(name) != value}
        request = {"rank": rank, "environment": changed, "log": log, "cpus": list(cpus)}
        self._socket.send(json.dumps(request).encode())

    def kill(self) -> None:
        """End the zygote, and with it every rank it has forked or was about to fork."""
        self._process.kill()

    def close(self) -> None:
        """End the zygote once its ranks are gone."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def _read(self) -> None:
        try:
            packet = self._socket.recv(PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self.close()
            self._on_gone()
            return
        message = json.loads(packet)
        if "code" in message:
            self._on_exit(message["rank"], message["code"], message["at"])
        else:
            self._on_pid(message["rank"], message["pid"])


def zygote_argv(command: Sequence[str], modules: Sequence[str], descriptor: int) -> list[str]:
    """The zygote's command line: the program's own Python and flags, then the zygote, then the program."""
    argv = expand_titan(command, sys.executable)
    index = program_index(argv)
    assert index is not None, "only a Python program has a zygote"
    return [*argv[:index], ZYGOTE, str(descriptor), BOOTSTRAP, ",".join(modules), *argv[index:]]
