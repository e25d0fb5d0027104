"""Tells the agent of this host how the rank gets on. For training scripts and for our own adapters.

    from slurm_ft.train.progress import report
    report(step=step, loss=loss, tokens=tokens_so_far)

The rank holds one connection to its agent: a Unix SEQPACKET socket in the abstract namespace, whose name is
in SLURM_FT_SOCKET. Each packet is one JSON object. A packet that does not fit is kept and sent with the
next one, so a busy agent never blocks a training step. The agent can send packets too: faults on purpose
(`slurm-ft inject`), which injected.py carries out, and those that another module has put into COMMANDS.

This file uses the standard library alone, because `bootstrap.py` loads it by its path into Pythons that
have no slurm-ft installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

STACKS_SIGNAL = signal.SIGRTMIN + 5
"""Has an observed rank write the stacks of all its threads into its log. Not SIGUSR1 or SIGUSR2: programs
and libraries have their own uses for these."""
PACKET_BYTES = 60_000
KEPT_PACKETS = 10_000
COMMANDS: dict[str, Callable[[Mapping[str, Any]], None]] = {}
"""What to do with a packet of this type from the agent; called in the channel's own thread."""


def _plain(value: Any) -> Any:
    """A number of torch's or numpy's as Python's own; whatever else as text."""
    try:
        return value.item()
    except Exception:
        return str(value)


class Channel:
    """This rank's connection to its agent. Never raises: observing must not end a training."""

    def __init__(self, name: str) -> None:
        self._waiting: deque[bytes] = deque(maxlen=KEPT_PACKETS)
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            connection.connect("\0" + name.removeprefix("@"))
            self._socket = connection
            threading.Thread(target=self._listen, args=(connection,), name="slurm-ft", daemon=True).start()
            self.send("hello", rank=int(os.environ.get("RANK", "0")), pid=os.getpid())

    def send(self, kind: str, **fields: Any) -> None:
        """Send one packet of this kind; `m` is the sender's monotonic clock in seconds."""
        if self._socket is None:
            return
        packet = json.dumps({"type": kind, "m": time.monotonic(), **fields}, default=_plain).encode()
        with self._lock:
            if self._socket is None or len(packet) > PACKET_BYTES:  # what is cut short cannot be read
                return
            self._waiting.append(packet)
            try:
                while self._waiting:
                    self._socket.send(self._waiting[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                    self._waiting.popleft()
            except BlockingIOError:
                pass
            except OSError:
                self._socket = None

    def _listen(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            while packet := connection.recv(PACKET_BYTES):
                command = json.loads(packet)
                function = COMMANDS.get(str(command.get("type")))
                if function is not None:  # in a thread of its own: the next order does not wait for it
                    threading.Thread(target=function, args=(command,), name="slurm-ft order", daemon=True).start()
                else:
                    _beside("injected").suffer(command)


def _beside(name: str) -> Any:
    """A file of this folder, by its path: the program's Python may have no slurm-ft."""
    full = f"slurm_ft.train.{name}"
    if full not in sys.modules:
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
        spec = importlib.util.spec_from_file_location(full, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[full] = module
    return sys.modules[full]


_channel: Channel | None = None
at_step: Callable[[int], None] | None = None
"""What `report(step)` calls in the training's own thread; see slurm_ft.train.save."""


def channel() -> Channel | None:
    """This process's channel, or None outside a slurm-ft rank."""
    global _channel
    name = os.environ.get("SLURM_FT_SOCKET")
    if _channel is None and name:
        _channel = Channel(name)
    return _channel


def _forget_after_fork() -> None:
    global _channel, at_step
    _channel = at_step = None
    os.environ.pop("SLURM_FT_SOCKET", None)


# A data loader's worker is not the rank: what it would report is not this rank's progress.
os.register_at_fork(after_in_child=_forget_after_fork)


def report(step: int, loss: float | None = None, tokens: int | None = None, phase: str | None = None) -> None:
    """Report progress: the training step, its loss, the tokens this replica has trained on so far.

    What is left out stays as it was reported last. Call it when a step begins as well if it is to be known
    which step a commit belongs to. Cheap, never raises, and does nothing outside a slurm-ft rank.
    """
    here = channel()
    if here is not None:
        here.send("progress", step=step, loss=loss, tokens=tokens, phase=phase)
        if at_step is not None:
            at_step(step)


def report_phase(phase: str, source: str | None = None, step: int | None = None) -> None:
    """Report a phase by itself. A word of the script's own choosing; `imported`, `joined`, `healed` and
    `train` are known to the report's time line.

    With `healed`: where the state came from (`live`, `snapshot`, `peer` or `disk`), and of which step it is.
    """
    here = channel()
    if here is not None:
        here.send("progress", phase=phase, source=source, source_step=step)


def report_again() -> None:
    """Report that the next vote on a commit is on the same work as the last one, so that work is not lost yet."""
    here = channel()
    if here is not None:
        here.send("again")
