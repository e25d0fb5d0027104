"""Which processes belong to a devcluster, and how they are ended.

Nothing is remembered: every question is answered from /proc at the moment it is asked, so a crash leaves nothing
stale behind. A process belongs to the cluster in folder F when one of these holds:

1. we started it: MARK=F is in its environment. That is each host's init (devcluster_init) and the daemon below it.
   Slurm gives a job's processes the environment of the job and not of the daemon, so the mark does not leak into
   user code. A slurmstepd writes its title over its environment; the log file that it holds open tells its host;
2. Slurm started it: SLURM_CONF=F/slurm.conf and SLURMD_NODENAME are in its environment. A user's own shell has
   the first (from `env`) and never the second;
3. one of its ancestors is of kind 1 or 2: a child that cleared its environment. The inits adopt orphans;
4. it is a Slurm client (srun, salloc, ...) that talks to this cluster, started from outside.

Signals go through a pidfd whose start time has been compared with the one in the scan, so a reused pid is never hit.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "SLURM_FT_DEVCLUSTER_MARK"
HOST = "SLURM_FT_DEVCLUSTER_HOST"
DAEMONS = frozenset({"munged", "slurmctld", "slurmscriptd", "slurmd", "slurmdbd", "mariadbd"})
WATCHER = "watcher"  # stands for a host, in HOST
CLIENTS = frozenset({"srun", "salloc", "sbatch", "sattach"})


@dataclass(frozen=True)
class Process:
    """One process of the cluster. `role` is init, watcher, a daemon's name, slurmstepd, job or client."""

    pid: int
    started: str
    role: str
    host: str
    name: str

    def __str__(self) -> str:
        return f"{self.pid} {self.name}"


@dataclass(frozen=True)
class _Row:
    pid: int
    parent: int
    started: str
    name: str


def find(folder: Path) -> list[Process]:
    """All living processes of the cluster in `folder`, without the one that asks."""
    rows = {row.pid: row for pid in os.listdir("/proc") if pid.isdigit() and (row := _read_row(int(pid)))}
    known: dict[int, Process | None] = {}
    for pid in rows:
        _classify(pid, rows, known, folder)
    return [process for pid, process in known.items() if process is not None and pid != os.getpid()]


def end(select_: Callable[[], Iterable[Process]], deadline: float) -> list[Process]:
    """SIGKILL what `select_` finds until it finds nothing; returns what outlived the deadline.

    A host that dies does not see itself die. So all are stopped first, and then killed, children before their
    parents: the kernel wakes up a stopped process whose parent dies, with SIGHUP, and an srun that gets SIGHUP ends
    its step, on other hosts too. The inits go when all others are gone: they keep the orphans together.
    """
    while left := list(select_()):
        victims = [process for process in left if process.role != "init"] or left
        victims.sort(key=lambda process: -process.pid)
        send(victims, signal.SIGSTOP)
        send(victims, signal.SIGKILL, wait=deadline - time.monotonic())
        if time.monotonic() > deadline:
            return list(select_())
    return []


def send(processes: Iterable[Process], number: signal.Signals, wait: float = 0.0) -> None:
    """Send a signal to each, then wait up to `wait` seconds until all of them have ended."""
    with ExitStack() as stack:
        fds = [fd for process in processes if (fd := _open(process)) is not None]
        for fd in fds:
            stack.callback(os.close, fd)
        for fd in fds:  # nothing but signals in this loop: they should all come at once
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, number)
        _wait_for_end(fds, time.monotonic() + wait)


def wait(processes: Iterable[Process], deadline: float) -> None:
    """Wait until all of them have ended, or the deadline has passed."""
    with ExitStack() as stack:
        fds = [fd for process in processes if (fd := _open(process)) is not None]
        for fd in fds:
            stack.callback(os.close, fd)
        _wait_for_end(fds, deadline)


def _open(process: Process) -> int | None:
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    row = _read_row(process.pid)
    if row is None or row.started != process.started:
        os.close(fd)
        return None
    return fd


def _wait_for_end(fds: list[int], deadline: float) -> None:
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    left = len(fds)
    while left and (remaining := deadline - time.monotonic()) > 0:
        for fd, _ in poller.poll(min(remaining, 1.0) * 1000):
            poller.unregister(fd)
            left -= 1


def _classify(pid: int, rows: dict[int, _Row], known: dict[int, Process | None], folder: Path) -> Process | None:
    if pid in known:
        return known[pid]
    row = rows.get(pid)
    if row is None:
        return None
    known[pid] = None  # also ends a circle, which a reused parent pid could make
    parent = _classify(row.parent, rows, known, folder)
    known[pid] = _by_environment(row, _read_environment(pid), folder) or _by_parent(row, parent)
    return known[pid]


def _by_environment(row: _Row, environment: dict[str, str], folder: Path) -> Process | None:
    if row.name == "slurmstepd":
        host = _host_by_log(row.pid, folder)
        return Process(row.pid, row.started, row.name, host, row.name) if host else None
    if environment.get(MARK) == str(folder):
        host = environment.get(HOST, "")
        role = row.name if row.name in DAEMONS else "watcher" if host == WATCHER else "init"
        return Process(row.pid, row.started, role, host, row.name)
    if environment.get("SLURM_CONF") != str(folder / "slurm.conf"):
        return None
    if host := environment.get("SLURMD_NODENAME", ""):
        return Process(row.pid, row.started, "job", host, row.name)
    return Process(row.pid, row.started, "client", "", row.name) if row.name in CLIENTS else None


def _by_parent(row: _Row, parent: Process | None) -> Process | None:
    # What a client of the user has below it (salloc: a shell) is the user's.
    if parent is None or parent.role == "client":
        return None
    role = row.name if row.name in DAEMONS or row.name == "slurmstepd" else "job"
    return Process(row.pid, row.started, role, parent.host, row.name)


def _read_row(pid: int) -> _Row | None:
    """Name, parent and start time; None when it is gone, a zombie, or a kernel thread."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    name = stat[stat.index("(") + 1 : stat.rindex(")")]
    fields = stat[stat.rindex(")") + 2 :].split()
    if fields[0] in "ZX":
        return None
    return _Row(pid=pid, parent=int(fields[1]), started=fields[19], name=name)


def _host_by_log(pid: int, folder: Path) -> str:
    """The host whose log file this process has open; empty when there is none."""
    start, targets = f"{folder}/log/", []
    with suppress(OSError):  # the process has ended
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # it has closed this one meanwhile
                targets.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    logs = [target.removesuffix(" (deleted)") for target in targets if target.startswith(start)]
    return logs[0].removeprefix(start).removesuffix(".log") if logs else ""


def _read_environment(pid: int) -> dict[str, str]:
    try:
        block = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in block.split(b"\0") if b"=" in entry)
    return {key: value for key, _, value in pairs}
