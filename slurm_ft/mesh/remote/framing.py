"""How messages travel inside a host: framed Unix streams between the host process and its workers.

A worker loads this and no network library.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Any

Header = dict[str, Any]
_LENGTHS = struct.Struct("!IQ")


def decode(data: bytes) -> Any:
    """What JSON says, None for what is no JSON."""
    try:
        return json.loads(data)
    except ValueError:
        return None


def frame(header: bytes, payload: bytes = b"") -> bytes:
    """One message of a Unix stream, in front of its payload if that is sent by itself."""
    return _LENGTHS.pack(len(header), len(payload)) + header + payload


class Framed(asyncio.Protocol):
    """One connection of a worker to its host process. `owner` is for whoever has it to note whose it is."""

    owner: int | None = None

    def __init__(self, on_message: Callable[[Framed, Header, bytes], None], on_end: Callable[[Framed], None]) -> None:
        self._on_message, self._on_end = on_message, on_end
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        peer = transport.get_extra_info("socket")
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        start, buffer = 0, self._buffer
        while len(buffer) - start >= _LENGTHS.size:
            first, second = _LENGTHS.unpack_from(buffer, start)
            begin = start + _LENGTHS.size
            if len(buffer) - begin < first + second:
                break
            header = decode(bytes(buffer[begin : begin + first]))
            start = begin + first + second
            if isinstance(header, dict):
                self._on_message(self, header, bytes(buffer[begin + first : start]))
        if start:
            del buffer[:start]

    def connection_lost(self, _: Exception | None) -> None:
        self._on_end(self)

    def send(self, header: bytes, payload: bytes = b"") -> None:
        if self._transport is not None:
            # Two writes would be two wake-ups of the worker; a large payload is not copied for that.
            if len(payload) < 65536:
                self._transport.write(frame(header, payload))
            else:
                self._transport.write(_LENGTHS.pack(len(header), len(payload)) + header)
                self._transport.write(payload)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def serve_framed(factory: Callable[[], Framed]) -> tuple[asyncio.Server, str]:
    """Listen in the abstract namespace, where no file is left behind. Gives the server and its name."""
    name = f"@slurm-ft-mesh-{secrets.token_hex(12)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.bind("\0" + name[1:])
    return await asyncio.get_running_loop().create_unix_server(factory, sock=listener, backlog=512), name


class Stream:
    """A worker's blocking end of such a connection."""

    def __init__(self, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.connect("\0" + name[1:])

    def send(self, header: Header, payload: bytes = b"") -> None:
        encoded = json.dumps(header).encode()
        self._socket.sendall(_LENGTHS.pack(len(encoded), len(payload)) + encoded)
        if payload:
            self._socket.sendall(payload)

    def close(self) -> None:
        self._socket.close()

    def receive(self) -> tuple[Header, bytes] | None:
        """The next message, None when the host process is gone."""
        lengths = self._exactly(_LENGTHS.size)
        if lengths is None:
            return None
        first, second = _LENGTHS.unpack(lengths)
        body = self._exactly(first + second)
        return None if body is None else (json.loads(body[:first]), bytes(memoryview(body)[first:]))

    def _exactly(self, count: int) -> bytearray | None:
        data = bytearray(count)
        view, got = memoryview(data), 0
        while got < count:
            received = 0
            with contextlib.suppress(ConnectionError):
                received = self._socket.recv_into(view[got:])
            if not received:
                return None
            got += received
        return data
