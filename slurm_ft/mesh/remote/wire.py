"""How messages travel: ZeroMQ under CURVE between client and hosts, framed Unix streams inside a host.

A message is a small JSON object and any number of byte strings, which nobody on the way looks into.
Keys and gate are those of the control channel (`slurm_ft.channel`). The sockets are read when the event
loop says that something happened, and emptied then: a future for each message would cost more than the
message.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import parse_monitor_message

from slurm_ft.channel import OnlyAgents, keys_of
from slurm_ft.errors import LaunchError
from slurm_ft.paths import RunPaths, write_atomic

Header = dict[str, Any]
Receive = Callable[[bytes, Header, list[bytes]], None]
_LENGTH = struct.Struct("!I")
_LENGTHS = struct.Struct("!IQ")
PEER_IVL_MS = 1000
PEER_TIMEOUT_MS = 10_000
"""A peer whose machine answers no ZeroMQ ping for this long is gone. The I/O thread answers, so a client
that is busy, or holds the GIL for long, is not taken for a dead one."""


class _Emptied:
    """A socket whose messages are handed to `receive` as they come."""

    def __init__(self, raw: zmq.Socket[bytes], receive: Callable[[list[bytes]], None]) -> None:
        self._raw, self._receive = raw, receive
        self._loop = asyncio.get_running_loop()
        self._fd = int(raw.getsockopt(zmq.FD))
        self._scheduled = False
        self._loop.add_reader(self._fd, self._empty)
        self.look()

    def look(self) -> None:
        """ZeroMQ's descriptor tells of changes only, and sending may swallow one: look after a send too."""
        if not self._scheduled and self._full():
            self._scheduled = True
            self._loop.call_soon(self._empty)

    def _full(self) -> bool:
        return not self._raw.closed and bool(int(self._raw.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _empty(self) -> None:
        self._scheduled = False
        while self._full():
            self._receive(self._raw.recv_multipart(zmq.NOBLOCK))

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._raw.close()


def _decode(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def pack(header: Header, parts: Sequence[bytes] = ()) -> bytes:
    """One message as one frame: each frame of ZeroMQ's costs as much as a small message."""
    if len(parts) > 1:
        header = {**header, "lengths": [len(part) for part in parts]}
    encoded = json.dumps(header).encode()
    return b"".join([_LENGTH.pack(len(encoded)), encoded, *parts])


def unpack(data: bytes) -> tuple[bytes, Header, list[bytes]] | None:
    """(header's bytes, header, parts), None for what is no message. The inverse of `pack`, but for empty parts."""
    if len(data) < _LENGTH.size:
        return None
    start = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    raw = data[_LENGTH.size : start]
    header = _decode(raw)
    if not isinstance(header, dict):
        return None
    parts = []
    for length in header.pop("lengths", [len(data) - start]):
        parts.append(data[start : start + length])
        start += length
    return raw, header, parts


def _tune(raw: zmq.Socket[bytes]) -> None:
    raw.setsockopt(zmq.SNDHWM, 0)
    raw.setsockopt(zmq.RCVHWM, 0)
    raw.setsockopt(zmq.LINGER, 500)
    raw.setsockopt(zmq.HEARTBEAT_IVL, PEER_IVL_MS)
    raw.setsockopt(zmq.HEARTBEAT_TIMEOUT, PEER_TIMEOUT_MS)


class ClientEnd:
    """The client's end: hosts dial it. Made and used in the mesh's loop."""

    def __init__(self, paths: RunPaths, address: str, receive: Receive) -> None:
        """Raises LaunchError when nothing can be bound at `address`."""
        public, secret = keys_of(paths.secret, "controller")
        self._receive = receive
        self._context = zmq.asyncio.Context()
        self._gate = AsyncioAuthenticator(self._context)
        self._gate.start()
        self._gate.configure_curve_callback(credentials_provider=OnlyAgents(keys_of(paths.secret, "agent")[0]))
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context)
        self._raw = plain.socket(zmq.ROUTER)
        _tune(self._raw)
        self._raw.curve_server = True
        self._raw.curve_publickey, self._raw.curve_secretkey = public, secret
        if ":" in address:
            self._raw.setsockopt(zmq.IPV6, 1)
        target = f"tcp://[{address}]" if ":" in address else f"tcp://{address}"
        try:
            port = self._raw.bind_to_random_port(target)
        except zmq.ZMQError as error:
            self._raw.close()
            self._gate.stop()
            raise LaunchError(
                f"the mesh cannot listen on {address}: {error}", "set SLURM_FT_ADDRESS to an address of this host"
            ) from None
        write_atomic(paths.endpoint, f"{target}:{port}", 0o600)
        self._emptied = _Emptied(self._raw, self._take)

    def send(self, peer: bytes, header: Header, parts: Sequence[bytes] = ()) -> None:
        """Send to a host; one that is gone is not an error, its loss is seen elsewhere."""
        self._raw.send_multipart([peer, pack(header, parts)])
        self._emptied.look()

    def _take(self, parts: list[bytes]) -> None:
        message = unpack(parts[1]) if len(parts) == 2 else None
        if message is not None:
            self._receive(parts[0], message[1], message[2])

    def close(self) -> None:
        self._emptied.close()
        self._gate.stop()
        self._context.term()


class HostEnd:
    """A host's end. `on_gone` is called once the client, once reached, cannot be reached any more."""

    def __init__(self, paths: RunPaths, identity: bytes, receive: Receive, on_gone: Callable[[], None]) -> None:
        public, secret = keys_of(paths.secret, "agent")
        self._receive, self._on_gone = receive, on_gone
        self.endpoint = paths.endpoint.read_text()
        self.reached = False
        self._context = zmq.Context()
        self._raw = self._context.socket(zmq.DEALER)
        _tune(self._raw)
        self._raw.setsockopt(zmq.IDENTITY, identity)
        self._raw.curve_publickey, self._raw.curve_secretkey = public, secret
        self._raw.curve_serverkey = keys_of(paths.secret, "controller")[0]
        if "[" in self.endpoint:
            self._raw.setsockopt(zmq.IPV6, 1)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        monitor = self._raw.get_monitor_socket(events)
        self._monitor = _Emptied(monitor, self._event)
        self._raw.connect(self.endpoint)
        self._emptied = _Emptied(self._raw, self._take)

    def send(self, header: Header, parts: Sequence[bytes] = ()) -> None:
        self._raw.send(pack(header, parts))
        self._emptied.look()

    def _take(self, parts: list[bytes]) -> None:
        message = unpack(parts[0])
        if message is not None:
            self._receive(*message)  # the header's bytes too, which go on to the workers as they came

    def _event(self, parts: list[bytes]) -> None:
        if parse_monitor_message(parts)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.reached = True
        elif self.reached:
            self._on_gone()

    def close(self) -> None:
        self._raw.disable_monitor()
        self._monitor.close()
        self._emptied.close()
        self._context.term()


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
            header = _decode(bytes(buffer[begin : begin + first]))
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
