"""The other end of the keeper: what a rank asks of it.

    with Client.connect(path) as keeper:
        fd = keeper.make(1 << 30)
        keeper.put("0-0.live", {"format": 1}, [fd])

One connection, one request at a time, used by one thread. Raises Refused with the keeper's words, and OSError when
the keeper is gone.
"""

from __future__ import annotations

import socket
import struct
import time
from pathlib import Path
from typing import Any, NamedTuple, Self

from slurm_ft.keeper import protocol
from slurm_ft.keeper.place import is_ours
from slurm_ft.keeper.protocol import Absent, Packet, Refused

ANSWER_WITHIN = 600.0
"""Seconds. Memory of many GiB takes as many seconds to be filled with pages."""


class Found(NamedTuple):
    """What was held. The descriptors are the caller's to close; `owner` is the process that had it before."""

    meta: dict[str, Any]
    descriptors: list[int]
    owner: int


class Client:
    """A connection to a keeper."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @classmethod
    def connect(cls, path: str | Path, within: float = 2.0) -> Self:
        """Connect; a keeper that is still starting is waited for, up to `within` seconds.

        Raises OSError when there is none, or when the socket is not our own user's.
        """
        deadline = time.monotonic() + within
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            try:
                is_ours(Path(path).parent)
                connection.connect(str(path))
            except (FileNotFoundError, ConnectionRefusedError):
                connection.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
            except BaseException:
                connection.close()
                raise
            else:
                connection.settimeout(ANSWER_WITHIN)
                return cls(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    @property
    def keeper_pid(self) -> int:
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", raw)[0])

    def make(self, size: int) -> int:
        """Memory of `size` bytes that the keeper has filled with pages; the descriptor is the caller's."""
        _, descriptors = self._ask({"op": "make", "bytes": size})
        return descriptors[0]

    def put(self, name: str, meta: Packet, descriptors: list[int]) -> None:
        """Have them held under this name. The descriptors stay open here."""
        self._ask({"op": "put", "name": name, "meta": meta}, descriptors)

    def get(self, name: str, claim: bool = False, wait: float = 0.0) -> Found | None:
        """What is held under a name, or None. With `claim` the caller owns it from now on, once the owner before
        has ended; that is waited for, `wait` seconds at most, then Refused is raised."""
        try:
            reply, descriptors = self._ask({"op": "get", "name": name, "claim": claim, "wait": wait})
        except Absent:
            return None
        return Found(reply["meta"], descriptors, int(reply["owner"]))

    def names(self) -> dict[str, Packet]:
        reply, _ = self._ask({"op": "list"})
        held: dict[str, Packet] = reply["held"]
        return held

    def drop(self, name: str) -> None:
        self._ask({"op": "drop", "name": name})

    def _ask(self, request: Packet, descriptors: list[int] | tuple[int, ...] = ()) -> tuple[Packet, list[int]]:
        protocol.send(self._socket, {"v": protocol.VERSION, **request}, descriptors)
        try:
            received = protocol.receive(self._socket)
        except ValueError as error:
            raise OSError(f"the keeper's answer is damaged: {error}") from None
        if received is None:
            raise ConnectionError("the keeper is gone")
        reply, given = received
        if reply.get("ok") is not True:
            protocol.close_all(given)
            why = str(reply.get("why", "the keeper gave no reason"))
            raise Absent(why) if reply.get("absent") else Refused(why)
        return reply, given
