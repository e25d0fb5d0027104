"""What `slurm-ft inject` does from within a rank. Loaded by its path when it is needed: standard library alone."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from typing import Any

PIECE = 64 << 20


def suffer(command: dict[str, Any]) -> None:
    """Carry out what the agent has sent. Called in the thread that listens to the agent."""
    kind = command.get("type")
    if kind == "exit":
        os._exit(int(command["code"]))
    elif kind == "hang":
        _hang()
    elif kind == "gil-deadlock":
        _keep_the_lock()
    elif kind == "oom":
        _eat()
    elif kind == "comm-abort":
        _abort_communication()


_never = threading.Event()


def _wait(_: Any) -> int:
    _never.wait()
    return 0


_wait_for_ever = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_wait)


def _hang() -> None:
    """Have the main thread wait for ever, between two of its bytecodes, while all other threads run on."""
    ctypes.pythonapi.Py_AddPendingCall(_wait_for_ever, None)


def _keep_the_lock() -> None:
    """Wait for ever and keep Python's lock, as a deadlock in an extension does: a PyDLL's functions hold it."""
    libc = ctypes.PyDLL(None)
    while True:
        libc.pause()


def _eat() -> None:
    """Take memory, and touch it, until the kernel ends this process."""
    kept = []
    while True:
        kept.append(bytearray(b"x") * PIECE)


def _abort_communication() -> None:
    """Break the connections of each torchft Manager's group, or abort torch's default group where there is none."""
    survivors = sys.modules.get("slurm_ft.train.survivors")
    distributed = sys.modules.get("torch.distributed")
    if survivors is not None and survivors.cut_off():
        return
    if distributed is not None and distributed.is_initialized():
        distributed.distributed_c10d._abort_process_group()
