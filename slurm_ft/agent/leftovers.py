"""What an attempt leaves behind on its host: processes, and files in /dev/shm.

A process belongs to an attempt when its environment says so (SLURM_FT_RUN, SLURM_FT_HOST, SLURM_FT_ATTEMPT): a
child inherits that, also one that has left its rank's session and group and has init for a parent. It must have
our user and is ended through a pidfd after a second look, so that no number that has changed hands is hit, and
never by its name. Nothing of another run, another host or another job is touched.

A file in /dev/shm is removed when it was seen mapped by a rank of ours, is ours, is the same file still, and no
process of ours maps it any more. Ports go with their processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from slurm_ft import env

SHM = "/dev/shm/"
POLL = 0.02


@dataclass(frozen=True)
class Attempt:
    """A run's attempt on one host, and whatever came before it there: those are not to be found any more."""

    run: str
    host: str
    replica: int
    number: int


@dataclass(frozen=True)
class Process:
    """A process, and when it started (clock ticks since boot): together they are never given away again."""

    pid: int
    started: int


@dataclass
class Swept:
    """What was found and ended, and what would not go."""

    ended: list[int] = field(default_factory=list)
    stuck: list[int] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @property
    def words(self) -> str:
        parts = []
        if self.ended:
            parts.append(f"ended {len(self.ended)} processes that its ranks had left behind")
        if self.files:
            parts.append(f"removed {len(self.files)} of their files in /dev/shm")
        if self.stuck:
            parts.append(f"processes {', '.join(map(str, self.stuck))} do not end, even by KILL")
        return "; ".join(parts)


def older_than(attempt: Attempt, proc: Path = Path("/proc")) -> list[Process]:
    """The living processes of attempts on this host that came before this one."""
    found = (_of_older(int(name), attempt, proc) for name in os.listdir(proc) if name.isdigit())
    return [process for process in found if process is not None]


def _of_older(pid: int, attempt: Attempt, proc: Path) -> Process | None:
    place = proc / str(pid)
    try:
        if place.stat().st_uid != os.getuid() or pid == os.getpid():
            return None
        variables = (place / "environ").read_bytes()
    except OSError:
        return None
    if f"{env.RUN}={attempt.run}\0".encode() not in variables:
        return None  # most processes: nothing else is looked at
    values = dict(item.partition(b"=")[::2] for item in variables.split(b"\0"))
    number = values.get(env.ATTEMPT.encode(), b"")
    if values.get(env.HOST.encode()) != attempt.host.encode() or not number.isdigit() or int(number) == 0:
        return None  # attempt 0 is the zygote
    other = values.get(env.REPLICA.encode()) != str(attempt.replica).encode()
    return _process(pid, proc) if other or int(number) < attempt.number else None


def _process(pid: int, proc: Path) -> Process | None:
    try:
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else Process(pid, int(fields[19]))


def end(processes: Iterable[Process], within: float, proc: Path = Path("/proc")) -> list[Process]:
    """Kill these and wait until they are gone, so long at most; gives those that are not."""
    left = list(processes)
    for process in left:
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(process.pid)
            try:
                if _process(process.pid, proc) == process:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)
    until = time.monotonic() + within
    while left := [process for process in left if _process(process.pid, proc) == process]:
        if time.monotonic() > until:
            break
        time.sleep(POLL)
    return left


class SharedMemory:
    """The files in /dev/shm that ranks of ours were seen to map, by name and inode."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._seen: dict[str, int] = {}

    def look(self, pids: Iterable[int]) -> None:
        """Remember what these processes map now."""
        for pid in pids:
            self._seen |= self._mapped(pid)

    def _mapped(self, pid: int) -> dict[str, int]:
        try:
            lines = (self._proc / str(pid) / "maps").read_text(errors="replace").splitlines()
        except OSError:
            return {}
        found = {}
        for line in lines:
            fields = line.split(None, 5)
            if len(fields) == 6 and fields[5].startswith(SHM) and not fields[5].endswith(" (deleted)"):
                found[fields[5]] = int(fields[4])
        return found

    def remove(self) -> list[str]:
        """Remove those that nobody of ours maps any more; gives their names."""
        if not self._seen:
            return []
        used: set[str] = set()
        for name in os.listdir(self._proc):
            if name.isdigit():
                used |= self._mapped(int(name)).keys()
        gone = []
        for path, inode in list(self._seen.items()):
            if path in used:
                continue
            del self._seen[path]
            with contextlib.suppress(OSError):
                found = os.stat(path, follow_symlinks=False)
                if found.st_uid == os.getuid() and found.st_ino == inode:
                    os.unlink(path)
                    gone.append(path)
        return gone


def sweep(attempt: Attempt, memory: SharedMemory, within: float) -> Swept:
    """End what is left of the attempts before this one on this host, and remove their files."""
    found = older_than(attempt)
    memory.look(process.pid for process in found)
    stuck = [process.pid for process in end(found, within)]
    return Swept([p.pid for p in found if p.pid not in stuck], stuck, memory.remove())
