"""The getting end: all chunks of a step from one donor, over several connections, into place.

Each connection has a thread that takes the next missing chunk, asks for it, and asks for more before the
answer is there, so the donor does not wait for a question. A chunk counts when its digest is right. A
connection that breaks gives its chunks back and is made again; when the donor is gone, what has arrived is
kept, and the next donor is asked only for the rest.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from slurm_ft.train.transport import wire
from slurm_ft.train.transport.donor import digest
from slurm_ft.train.transport.tree import Row, Skeleton, put_together

AHEAD = 16
"""Questions under way on one connection: on a busy host the donor has work for as long as we are not scheduled."""
TRIES = 3
"""Connections in a row that bring nothing before a donor counts as gone."""
PAUSE = 0.1


def layout(node: Any) -> Any:
    """A skeleton without its values: equal for states whose tensors lie at the same places."""
    if isinstance(node, dict):
        return {key: layout(item) for key, item in node.items() if key not in ("v", "b", "p", "spec")}
    return [layout(item) for item in node] if isinstance(node, list) else node


@dataclass
class Arrived:
    """What a broken transfer has left: the tensors, and which chunks of them were received."""

    layout: Any
    row: Row
    tensors: list[Any]
    chunks: set[int] = field(default_factory=set)


class Fetch:
    """One state from one donor. `kept` is what an earlier transfer has left behind, or None."""

    def __init__(
        self, address: tuple[str, int], key: bytes, step: int, deadline: float, stall: float, kept: Arrived | None
    ) -> None:
        self._address, self._key, self._step = address, key, step
        self._deadline, self._stall = deadline, stall
        self.kept = kept
        self.bytes_received = 0
        self.wrote = False
        self._lock = threading.Lock()
        self._missing: deque[int] = deque()
        self._claims: dict[int, bytes] = {}
        self._failure: Exception | None = None

    def _connect(self, with_skeleton: bool) -> tuple[wire.Connection, dict[str, Any]]:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the transfer did not end in time")
        try:
            stream = socket.create_connection(self._address, timeout=min(left, self._stall))
        except OSError as error:
            raise wire.PeerGone(f"the donor cannot be reached: {error}") from None
        connection = wire.Connection(
            stream, min(self._deadline, time.monotonic() + wire.HANDSHAKE_SECONDS), self._stall
        )
        try:
            try:
                wire.introduce(connection, self._key)
            except TimeoutError:
                if time.monotonic() >= self._deadline:
                    raise
                raise wire.PeerGone("the donor was slow to say who it is") from None
            connection.deadline = self._deadline
            left = max(self._deadline - time.monotonic(), 0.0)
            connection.send_message({"step": self._step, "seconds": left, "skeleton": with_skeleton})
            connection.stall = max(left, 0.01)  # the donor may have to come to this step first
            answer = connection.receive_message()
            connection.stall = self._stall
        except BaseException:
            connection.close()
            raise
        if not answer.get("ok"):
            connection.close()
            raise wire.Refused(str(answer.get("why", "the donor refused")))
        return connection, answer

    def run(self, own: Any, connections: int) -> Any:
        """The state. Raises TransportError, its subclasses or TimeoutError; then `kept` has what arrived."""
        connection, answer = self._first()
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            state, arrived = self._place(answer["skeleton"], int(answer["chunk_bytes"]), own)
            count = min(connections, max(len(self._missing), 1))
            workers = [threading.Thread(target=self._work, args=(None,), daemon=True) for _ in range(count - 1)]
            for worker in workers:
                worker.start()
            self._work(connection)
            for worker in workers:
                worker.join()
        if len(arrived.chunks) < arrived.row.chunks:
            raise self._failure or wire.PeerGone("the donor is gone")
        self.kept = None
        return state

    def _first(self) -> tuple[wire.Connection, dict[str, Any]]:
        for attempt in range(TRIES):
            try:
                return self._connect(with_skeleton=True)
            except wire.PeerGone:
                if attempt == TRIES - 1:
                    raise
                time.sleep(PAUSE)
        raise AssertionError

    def _place(self, skeleton: Skeleton, chunk_bytes: int, own: Any) -> tuple[Any, Arrived]:
        if chunk_bytes < 1:
            raise wire.TransportError("the peer's description of its state is damaged")
        state, tensors = put_together(skeleton, own)
        shape, kept = layout(skeleton), self.kept
        if kept is not None and kept.layout == shape and kept.row.chunk_bytes == chunk_bytes:
            for old, new in zip(kept.tensors, tensors, strict=True):
                if old.data_ptr() != new.data_ptr():
                    new.set_(old)  # the bytes that have arrived are there
            self._claims = {chunk: digest(kept.row.pieces(chunk)) for chunk in kept.chunks}
        self.kept = Arrived(shape, Row(tensors, chunk_bytes), tensors)
        self._missing = deque(range(self.kept.row.chunks))
        return state, self.kept

    def _work(self, connection: wire.Connection | None) -> None:
        fruitless = 0
        try:
            while self._missing and self._failure is None:
                try:
                    if connection is None:
                        connection, _ = self._connect(with_skeleton=False)
                    fruitless = 0 if self._take(connection) else fruitless
                except wire.PeerGone:
                    fruitless += 1
                    if fruitless >= TRIES:
                        raise
                    time.sleep(PAUSE)
                finally:
                    if connection is not None:
                        connection.close()
                    connection = None
        except Exception as error:
            self._failure = self._failure or error

    def _take(self, connection: wire.Connection) -> int:
        """Chunks over one connection until none is missing; how many came. Raises PeerGone when it breaks."""
        assert self.kept is not None
        row, asked, came = self.kept.row, deque[int](), 0
        try:
            while self._failure is None:
                while len(asked) < AHEAD and self._missing:
                    with contextlib.suppress(IndexError):  # another thread was faster
                        asked.append(self._missing.popleft())
                        connection.send([wire.GET.pack(asked[-1], self._claims.get(asked[-1], wire.NOTHING))])
                if not asked:
                    break
                self._take_chunk(connection, row, asked[0])
                self.kept.chunks.add(asked.popleft())
                came += 1
            return came
        except wire.PeerGone:
            if came:
                return came
            raise
        finally:
            self._missing.extendleft(reversed(asked))

    def _take_chunk(self, connection: wire.Connection, row: Row, chunk: int) -> None:
        pieces = row.pieces(chunk)
        kind, size, mark = wire.CHUNK.unpack(connection.receive(wire.CHUNK.size))
        if kind == wire.SAME and self._claims.get(chunk) == mark:
            return
        if kind != wire.SENT or size != sum(map(len, pieces)):
            raise wire.Refused(f"the donor's answer for chunk {chunk} is damaged")
        self._claims.pop(chunk, None)
        self.wrote = True
        connection.receive_into(pieces)
        if digest(pieces) != mark:
            raise wire.PeerGone(f"chunk {chunk} arrived damaged")
        with self._lock:
            self.bytes_received += size
