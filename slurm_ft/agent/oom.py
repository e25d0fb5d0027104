"""Was a rank killed for lack of memory? The kernel counts such kills per control group, and for the host.

The agent and its ranks are in one group (Slurm's task or step); its counters, and those of the groups above it,
are read when an attempt starts and when a rank was killed by a SIGKILL that is not ours. cgroup 2 has
`memory.events` and `memory.max`; cgroup 1 `memory.oom_control` and `memory.limit_in_bytes`. Where no group tells,
`oom_kill` of /proc/vmstat is a hint only: the kernel killed something on this host, perhaps not this rank.
"""

from __future__ import annotations

import re
from pathlib import Path

UNLIMITED = 1 << 60
"""A limit above this is none: cgroup 1 writes the largest number of pages."""


class OomWatch:
    """The counters of this process's groups; `root` is the file system's, for tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._groups = _groups(root)
        self.begin()

    def begin(self) -> None:
        """Forget what was before: a new attempt starts."""
        self._before = [_kills(group) for group in self._groups]
        self._host_before = _host_kills(self._root)

    def words(self) -> str:
        """How the kernel killed for lack of memory since `begin`, or ''."""
        for group, before in zip(self._groups, self._before, strict=True):
            if _kills(group) > before:
                limit = next((size for place in self._groups if (size := _limit(place))), 0)
                return f"for lack of memory ({f'the limit is {_size(limit)}' if limit else 'of its control group'})"
        if _host_kills(self._root) > self._host_before:
            return "perhaps for lack of memory (the kernel has killed for that on this host meanwhile)"
        return ""


def _groups(root: Path) -> list[Path]:
    """The folder of this process's memory group and those above it, the innermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        place = base / path.strip("/")
        found = [at for at in (place, *place.parents) if at == base or base in at.parents]
        groups = [at for at in found if _counter(at) is not None]
        if groups:
            return groups
    return []


def _counter(group: Path) -> Path | None:
    for name in ("memory.events", "memory.oom_control"):
        if (group / name).exists():
            return group / name
    return None


def _kills(group: Path) -> int:
    path = _counter(group)
    return _number(path, r"^oom_kill (\d+)$") if path is not None else 0


def _host_kills(root: Path) -> int:
    return _number(root / "proc/vmstat", r"^oom_kill (\d+)$")


def _limit(group: Path) -> int:
    """The group's limit in bytes, 0 for none."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        size = _number(group / name, r"^(\d+)$")
        if 0 < size < UNLIMITED:
            return size
    return 0


def _number(path: Path, pattern: str) -> int:
    try:
        found = re.search(pattern, path.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found.group(1)) if found else 0


def _size(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"
