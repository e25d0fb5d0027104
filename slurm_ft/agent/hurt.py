"""Faults on purpose, as far as an agent carries them out: at a rank of its own, or at itself and its host."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from slurm_ft.agent.listen import RankSocket
from slurm_ft.agent.ranks import Ranks
from slurm_ft.errors import UsageError
from slurm_ft.faults import Fault, Target, parse

FREEZE = str(Path(__file__).with_name("freeze.py"))
AFTER_THE_ANSWER = 0.3
"""Seconds in which the answer leaves this host before the host does."""
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}


def hurt(kind: str, rank: int, seconds: float | None, ranks: Ranks, socket: RankSocket) -> str:
    """Hurt a rank or this host; gives what stands against it, or ''."""
    try:
        fault, number = parse(kind)
    except UsageError:
        return f"the kind `{kind}` is unknown"
    if fault.target is Target.HOST:
        return _hurt_host(fault, fault.lasts if seconds is None else seconds)
    if fault.name in SIGNALS:
        return "" if ranks.signal(SIGNALS[fault.name], rank) else f"rank {rank} is not running"
    if fault.name == "oom" and memory_limit() is None:
        return "the ranks' cgroup has no memory limit: the whole host would run out of memory"
    if socket.send(rank, {"type": "exit", "code": number} if fault.name == "exit" else {"type": fault.name}):
        return ""
    return f"rank {rank} is no observed Python program; use kill, term or segv"


def _hurt_host(fault: Fault, seconds: float | None) -> str:
    if fault.name == "agent":
        asyncio.get_running_loop().call_later(AFTER_THE_ANSWER, os.kill, os.getpid(), signal.SIGKILL)
    else:
        asyncio.get_running_loop().call_later(AFTER_THE_ANSWER, _freeze_all, seconds or 0.0)
    return ""


def _freeze_all(seconds: float) -> None:
    """Freeze this process and all below it."""
    pids = [os.getpid(), *descendants(os.getpid())]
    subprocess.Popen([sys.executable, "-I", "-S", FREEZE, str(seconds), *map(str, pids)], start_new_session=True)


def descendants(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """The processes below one, parents first."""
    found: list[int] = []
    for task in (proc / str(pid) / "task").glob("*/children"):
        try:
            children = [int(word) for word in task.read_text().split()]
        except OSError:  # it has ended
            continue
        for child in children:
            found += [child, *descendants(child, proc)]
    return found


def memory_limit(proc: Path = Path("/proc/self"), mount: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The memory limit of this process's cgroup in bytes, of version 2 or 1; None when there is none.

    The limit of a cgroup above counts too. Source: the kernel's cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    limits = []
    for line in (proc / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _limits(mount, Path(path.lstrip("/")), "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits(mount / "memory", Path(path.lstrip("/")), "memory.limit_in_bytes")
    return min(limits, default=None)


def _limits(root: Path, path: Path, name: str) -> list[int]:
    found = []
    for folder in (path, *path.parents):
        try:
            text = (root / folder / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:  # version 1 writes a huge number for "no limit"
            found.append(int(text))
    return found
