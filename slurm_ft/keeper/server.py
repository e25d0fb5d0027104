"""The keeper's process: `python -m slurm_ft.keeper.server --run-dir DIR --host NAME`.

It holds descriptors (held.py) and answers on a socket (protocol.py), one thread a connection. Only processes of
its own user are served. One keeper serves a run on a host: a second one that is started finds the first one's
lock and leaves with code 0.

It ends when it is told to (SIGTERM), or by itself when nobody is connected and the run's controller has written
no state.json for `--orphan-timeout` seconds: then whoever would have told it is gone. Memory that it held lives
on only as long as somebody else has it mapped.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

from slurm_ft.keeper import protocol
from slurm_ft.keeper.held import Shelf
from slurm_ft.keeper.place import private_folder, socket_path
from slurm_ft.keeper.protocol import Absent, Packet, Refused

MOST_CONNECTIONS = 512
TICK = 1.0
LOOK_AT_MOST = 30.0
"""Seconds between two looks at state.json: it lies on a file system that all hosts share."""
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_CREDENTIALS = struct.Struct("3i")


class _Told(Exception):
    """A signal that asks us to end has come."""


def _tell(*_: object) -> None:
    raise _Told


def caller(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the other end, as the kernel says."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def answer(shelf: Shelf, packet: Packet, descriptors: list[int], pid: int) -> tuple[Packet, list[int], Any]:
    """(answer, descriptors for it, what must live until they are sent). Raises Refused.

    Descriptors of the packet that are held are taken out of the list; the rest is the caller's to close.
    """
    if packet.get("v") != protocol.VERSION:
        raise Refused(f"version {packet.get('v')!r}; this keeper speaks {protocol.VERSION}")
    operation = packet.get("op")
    if operation == "make":
        made = shelf.make(_number(packet, "bytes", 1, 1 << 50))
        return {"ok": True}, [made], _Closed(made)
    if operation == "list":
        return {"ok": True, "held": shelf.names()}, [], None
    name = packet.get("name")
    if not isinstance(name, str) or not protocol.NAME.fullmatch(name):
        raise Refused("a name has 1 to 100 letters, digits and _ . = + -")
    if operation == "put":
        shelf.put(name, _meta(packet), _some(descriptors), pid)
        descriptors.clear()
        return {"ok": True}, [], None
    if operation == "get":
        wait = float(_number(packet, "wait", 0, protocol.LONGEST_WAIT))
        item, owner = shelf.get(name, pid, packet.get("claim") is True, wait)
        return {"ok": True, "meta": item.meta, "owner": owner, "bytes": item.bytes}, item.descriptors, item
    if operation == "drop":
        shelf.drop(name, pid)
        return {"ok": True}, [], None
    raise Refused(f"the operation {str(operation)[:40]!r} is unknown")


class _Closed:
    """Closes a descriptor with itself."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __del__(self) -> None:
        os.close(self._descriptor)


def _number(packet: Packet, name: str, least: float, most: float) -> Any:
    value = packet.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise Refused(f"{name} is no number between {least:g} and {most:g}")
    return value if name == "wait" else int(value)


def _meta(packet: Packet) -> dict[str, Any]:
    meta = packet.get("meta", {})
    if not isinstance(meta, dict) or len(repr(meta)) > protocol.META_BYTES:
        raise Refused(f"meta is no object of at most {protocol.META_BYTES} bytes")
    return meta


def _some(descriptors: list[int]) -> list[int]:
    if not descriptors:
        raise Refused("there is no descriptor to hold")
    return descriptors


class Server:
    """Listens, and ends when nobody needs it any more. Raises OSError when the socket cannot be had."""

    def __init__(self, path: Path, shelf: Shelf, state: Path, orphan_timeout: float) -> None:
        self._path, self._shelf, self._state, self._orphan_timeout = path, shelf, state, orphan_timeout
        self._connections = 0
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # of a keeper that was killed: we hold the lock, so none lives
        before = os.umask(0o177)
        try:
            self._socket.bind(str(path))
        finally:
            os.umask(before)
        self._socket.listen(64)
        self._socket.settimeout(TICK)

    def run(self) -> str:
        """Serve; gives the reason why it ended. Meanwhile, and only then, ENDING signals are taken."""
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
            return self._run()
        except _Told:
            return "it was told to"
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
            self._shelf.stopped.set()

    def _run(self) -> str:
        seen, changed = self._written(), time.monotonic()
        look, every = changed, min(max(self._orphan_timeout / 10, TICK), LOOK_AT_MOST)
        while True:
            with contextlib.suppress(TimeoutError):
                self._take(self._socket.accept()[0])
            now = time.monotonic()
            if self._connections:
                changed = now
                continue
            if now < look:
                continue
            look, written = now + every, self._written()
            if written != seen:
                seen, changed = written, now
            if now - changed > self._orphan_timeout:
                return f"the run has had no controller for {self._orphan_timeout:g} s"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
        self._socket.close()

    def _written(self) -> int:
        try:
            return os.stat(self._state).st_mtime_ns
        except OSError:
            return 0

    def _take(self, connection: socket.socket) -> None:
        pid, uid = caller(connection)
        with self._lock:
            if uid != os.getuid() or self._connections >= MOST_CONNECTIONS:
                connection.close()
                return
            self._connections += 1
        threading.Thread(target=self._serve, args=(connection, pid), daemon=True).start()

    def _serve(self, connection: socket.socket, pid: int) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                while self._one(connection, pid):
                    pass
        finally:
            with self._lock:
                self._connections -= 1

    def _one(self, connection: socket.socket, pid: int) -> bool:
        """Take and answer one request; False at the end of the connection."""
        try:
            received = protocol.receive(connection)
        except ValueError as error:
            protocol.send(connection, {"ok": False, "why": f"this is no request: {error}"})
            return True
        if received is None:
            return False
        packet, descriptors = received
        try:
            reply, given, _alive = answer(self._shelf, packet, descriptors, pid)
            protocol.send(connection, reply, given)
        except Refused as error:
            protocol.send(connection, {"ok": False, "why": str(error), "absent": isinstance(error, Absent)})
        finally:
            protocol.close_all(descriptors)
        return True


def only_one(folder: Path) -> int | None:
    """The lock of this host's keeper of the run, or None when another one has it."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def host_memory() -> int:
    """Bytes of memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--host", help="the name of this host; Slurm's by default")
    parser.add_argument("--orphan-timeout", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--limit", type=int, default=0, metavar="BYTES", help="hold at most; the host's memory if 0")
    options = parser.parse_args()
    host = options.host or os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    path = socket_path(options.run_dir, host)
    try:
        private_folder(path.parent)
        lock = only_one(path.parent)
        if lock is None:
            print("slurm-ft keeper: there is one already", file=sys.stderr)
            return 0
        shelf = Shelf(options.limit or host_memory())
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        for number in ENDING:
            signal.signal(number, _tell)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm's word to all steps that the time limit is near
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        server = Server(path, shelf, Path(options.run_dir) / "state.json", options.orphan_timeout)
    except OSError as error:
        print(f"slurm-ft keeper: cannot listen on {path}: {error.strerror or error}", file=sys.stderr)
        return 1
    why = server.run()
    server.close()
    print(f"slurm-ft keeper: leaves, since {why}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        (path.parent / "lock").unlink()
        path.parent.rmdir()
    os._exit(0)  # threads that wait for requests, or fill memory, are not waited for


if __name__ == "__main__":
    sys.exit(main())
