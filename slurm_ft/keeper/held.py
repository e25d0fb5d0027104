"""What a keeper holds: descriptors under names, each with an owner of whom it is known whether he lives.

No socket and no clock in here but the wait for an owner's end: `Shelf` is what the server's threads share.
"""

from __future__ import annotations

import os
import select
import stat
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from slurm_ft.keeper.protocol import MOST_NAMES, Absent, Packet, Refused, close_all

POPULATE_PIECE = 256 << 20


class Process:
    """A process, known by a descriptor of it: numbers are given away again."""

    def __init__(self, pid: int) -> None:
        """Raises Refused for a process of another container: nobody could tell when it has ended."""
        self.pid = pid
        self._pidfd = -1
        if pid <= 0:
            raise Refused("the caller is in a PID namespace (a container) that the keeper cannot see into")
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:
            self._pidfd = -1

    def gone(self, wait: float = 0.0) -> bool:
        """Has it ended? Waits for that, at most so many seconds. A zombie has: its memory is given back."""
        if self._pidfd < 0:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(max(0.0, wait) * 1000))

    def __del__(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)


@dataclass
class Held:
    """One name's descriptors. They are closed when the last one who uses them lets go of this object."""

    meta: dict[str, Any]
    descriptors: list[int]
    owner: Process
    bytes: int = field(default=0)

    def __post_init__(self) -> None:
        self.bytes = sum(size_of(descriptor) for descriptor in self.descriptors)

    def __del__(self) -> None:
        close_all(self.descriptors)


def size_of(descriptor: int) -> int:
    """Bytes behind a descriptor of memory. Raises Refused for one that is no memory (a socket, a terminal, ...)."""
    found = os.fstat(descriptor)
    # A memfd is a regular file, a dma-buf has no type, and memory of an NVIDIA GPU is a descriptor of its device.
    kinds = (0, stat.S_IFREG, stat.S_IFCHR)
    if stat.S_IFMT(found.st_mode) not in kinds or os.isatty(descriptor):
        raise Refused("only memory can be held: this descriptor is something else")
    return found.st_size


def make(size: int, stopped: threading.Event) -> int:
    """A sealed memfd of `size` bytes with all its pages, taken by this process: they are charged to its cgroup,
    and a lack of memory is an error here and no signal in a rank later. Raises OSError."""
    descriptor = os.memfd_create("slurm-ft-kept", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        for offset in range(0, size, POPULATE_PIECE):
            if stopped.is_set():
                raise OSError(0, "the keeper is leaving")
            os.posix_fallocate(descriptor, offset, min(POPULATE_PIECE, size - offset))
        seal(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def seal(descriptor: int) -> None:
    """No one can shrink or grow it any more: a shrunk file would be a SIGBUS in whoever maps it."""
    import fcntl

    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


class Shelf:
    """All that is held, at most `limit` bytes of it. Safe to use from several threads."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: dict[str, Held] = {}
        self._making = 0
        self._lock = threading.Lock()
        self.stopped = threading.Event()

    def make(self, size: int) -> int:
        """New memory, which belongs to the caller until it is put."""
        with self._lock:
            held = sum(item.bytes for item in self._items.values()) + self._making
            if held + size > self._limit:
                raise Refused(f"{size} bytes more than the {held} held would be above the limit of {self._limit}")
            self._making += size
        try:
            return make(size, self.stopped)
        except OSError as error:
            raise Refused(f"{size} bytes cannot be had: {error.strerror}") from None
        finally:
            with self._lock:
                self._making -= size

    def put(self, name: str, meta: dict[str, Any], descriptors: list[int], pid: int) -> None:
        """Takes the descriptors over. Raises Refused, and then they stay the caller's."""
        for descriptor in descriptors:
            size_of(descriptor)
        with self._lock:
            self._must_be_free(name, pid)
            if name not in self._items and len(self._items) >= MOST_NAMES:
                raise Refused(f"{MOST_NAMES} names are held already")
            new = Held(meta, list(descriptors), Process(pid))
            held = sum(item.bytes for key, item in self._items.items() if key != name)
            if held + new.bytes > self._limit:
                new.descriptors = []
                raise Refused(f"{new.bytes} bytes more than the {held} held would be above the limit of {self._limit}")
            self._items[name] = new

    def get(self, name: str, pid: int, claim: bool, wait: float) -> tuple[Held, int]:
        """What is held, and who owned it before. Raises Refused when the owner lives on, or there is no such name."""
        deadline = time.monotonic() + wait
        while True:
            with self._lock:
                item = self._items.get(name)
                if item is None:
                    raise Absent(f"nothing is held under the name {name}")
                owner = item.owner
                if not claim:
                    return item, owner.pid
                if owner.pid == pid or owner.gone():
                    item.owner = Process(pid)
                    return item, owner.pid
            if not owner.gone(deadline - time.monotonic()) and time.monotonic() >= deadline:
                raise Refused(f"process {owner.pid} owns {name} and lives on after {wait:g} s")

    def drop(self, name: str, pid: int) -> None:
        with self._lock:
            self._must_be_free(name, pid)
            if self._items.pop(name, None) is None:
                raise Absent(f"nothing is held under the name {name}")

    def names(self) -> Packet:
        """For people: metas are left out, a list must fit a packet."""
        with self._lock:
            return {
                name: {"bytes": item.bytes, "owner": item.owner.pid, "owned": not item.owner.gone()}
                for name, item in sorted(self._items.items())
            }

    def _must_be_free(self, name: str, pid: int) -> None:
        item = self._items.get(name)
        if item is not None and item.owner.pid != pid and not item.owner.gone():
            raise Refused(f"process {item.owner.pid} owns {name} and lives")
