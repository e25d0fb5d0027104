"""The giving end: a port that serves one step's state to holders of the run's key.

One thread accepts, one thread serves each connection. Between `allow` and `disallow` the tensors are read
where they are; `disallow` returns when nobody reads them any more, and cuts off who has not moved for
`stall` seconds, so a receiver that hangs costs its donor that long at most.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import xxhash

from slurm_ft.train.transport import wire
from slurm_ft.train.transport.tree import Row, Skeleton

logger = logging.getLogger(__name__)

STRANGERS = 64
"""Connections that have not proved themselves; more than that are closed at once."""


def digest(pieces: list[memoryview]) -> bytes:
    """16 bytes by which two chunks are the same. Fast, no secret: xxh3, 128 bit."""
    total = xxhash.xxh3_128()
    for piece in pieces:
        total.update(piece)
    return total.digest()


@dataclass
class Offer:
    """A state that is being served. Digests are kept, so that several receivers cost one reading."""

    step: int
    skeleton: Skeleton
    row: Row
    digests: dict[int, bytes] = field(default_factory=dict)

    def digest(self, chunk: int) -> bytes:
        known = self.digests.get(chunk)
        if known is None:
            known = self.digests[chunk] = digest(self.row.pieces(chunk))
        return known


class Donor:
    """Serves on a port of its own, on all addresses of this host, from `__init__` to `close`."""

    def __init__(self, key: bytes, timeout: float, stall: float) -> None:
        self._key, self._timeout, self._stall = key, timeout, stall
        self._changed = threading.Condition()
        self._offer: Offer | None = None
        self._readers: dict[wire.Connection, float] = {}
        self._strangers = 0
        self._closed = False
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._server = socket.create_server(
            ("", 0), family=family, backlog=128, dualstack_ipv6=family == socket.AF_INET6
        )
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, name="slurm-ft donor", daemon=True).start()

    def allow(self, offer: Offer) -> None:
        with self._changed:
            self._offer = offer
            self._changed.notify_all()

    def disallow(self) -> None:
        """Serve nothing from now on. Returns when the last reader has gone or was cut off."""
        with self._changed:
            self._offer = None
            while self._readers:
                oldest = min(self._readers.values())
                if not self._changed.wait(max(oldest + self._stall - time.monotonic(), 0.01)):
                    self._cut(time.monotonic() - self._stall)

    def _cut(self, before: float) -> None:
        for connection, moved in list(self._readers.items()):
            if moved <= before:
                logger.warning("a peer that has taken nothing for %g s is cut off", self._stall)
                with contextlib.suppress(OSError):
                    connection.stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed = True
        # A blocked accept() is woken by shutdown, not by close.
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        with self._changed:
            self._offer = None
            self._changed.notify_all()

    def _accept(self) -> None:
        while not self._closed:
            try:
                stream, _ = self._server.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # out of descriptors, most likely: the next try may do
                continue
            with self._changed:
                welcome = self._strangers < STRANGERS
                self._strangers += welcome
            if welcome:
                threading.Thread(target=self._serve, args=(stream,), name="slurm-ft donor", daemon=True).start()
            else:
                stream.close()

    def _serve(self, stream: socket.socket) -> None:
        with stream:
            connection = wire.Connection(stream, time.monotonic() + wire.HANDSHAKE_SECONDS, self._stall)
            try:
                try:
                    wire.admit(connection, self._key)
                    connection.deadline = time.monotonic() + self._timeout
                    asked = connection.receive_message()
                finally:
                    with self._changed:
                        self._strangers -= 1
                self._answer(connection, asked)
            except (wire.Refused, IndexError) as error:
                logger.warning("a peer was turned away: %s", error)
            except (wire.TransportError, TimeoutError, OSError) as error:
                logger.debug("a peer's connection ended: %s", error)

    def _answer(self, connection: wire.Connection, asked: dict[str, Any]) -> None:
        try:
            step, seconds = int(asked["step"]), float(asked["seconds"])
        except (KeyError, TypeError, ValueError):
            raise wire.Refused(f"its request is not understood: {str(asked)[:100]}") from None
        offer = self._begin(connection, step, min(seconds, self._timeout))
        if not isinstance(offer, Offer):
            connection.send_message({"ok": False, "why": offer})
            return
        try:
            answer = {"ok": True, "skeleton": offer.skeleton, "chunk_bytes": offer.row.chunk_bytes}
            connection.send_message(answer if asked.get("skeleton") else {"ok": True})
            self._give(connection, offer)
        finally:
            with self._changed:
                self._readers.pop(connection, None)
                self._changed.notify_all()

    def _begin(self, connection: wire.Connection, step: int, seconds: float) -> Offer | str:
        """Wait for the state of this step; what is wrong, in words, when it does not come."""
        give_up = time.monotonic() + seconds
        with self._changed:
            while self._offer is None:
                left = give_up - time.monotonic()
                if self._closed or left <= 0:
                    return f"step {step} was not offered in time"
                self._changed.wait(left)
            if self._offer.step != step:
                return f"this peer has step {self._offer.step} and not {step}"
            self._readers[connection] = time.monotonic()
            return self._offer

    def _give(self, connection: wire.Connection, offer: Offer) -> None:
        while True:
            try:
                chunk, have = wire.GET.unpack(connection.receive(wire.GET.size))
            except wire.PeerGone:
                return  # it has what it wanted, or it is gone
            pieces, mark = offer.row.pieces(chunk), offer.digest(chunk)
            if have == mark:
                connection.send([wire.CHUNK.pack(wire.SAME, 0, mark)])
            else:
                size = sum(map(len, pieces))
                connection.send([wire.CHUNK.pack(wire.SENT, size, mark), *pieces])
            self._readers[connection] = time.monotonic()
