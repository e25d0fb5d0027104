"""How messages travel between client and hosts: ZeroMQ under CURVE.

A message is a small JSON object and any number of byte strings, which nobody on the way looks into.
Keys and gate are those of the control channel (`slurm_ft.channel`). The sockets are read when the event
loop says that something happened, and emptied then: a future for each message would cost more than the
message.
"""

from __future__ import annotations

import asyncio
import json
import logging
import struct
from collections.abc import Callable, Sequence

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import parse_monitor_message

from slurm_ft.channel import OnlyAgents, keys_of
from slurm_ft.errors import LaunchError
from slurm_ft.mesh.remote.framing import Header, decode
from slurm_ft.paths import RunPaths, write_atomic

log = logging.getLogger(__name__)

Receive = Callable[[bytes, Header, list[bytes]], None]
_LENGTH = struct.Struct("!I")
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
            message = self._raw.recv_multipart(zmq.NOBLOCK)
            try:
                self._receive(message)
            except Exception:  # the descriptor tells of changes only: what is left must be read all the same
                log.exception("a message was lost by a fault of slurm-ft itself")

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._raw.close()


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
    header = decode(raw)
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
