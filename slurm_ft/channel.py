"""The control channel between the controller and its agents: ZeroMQ under CURVE.

Agents dial (DEALER), the controller listens (ROUTER). A run has two key pairs, made when it starts and kept
in its 0700 folder `secret/`: the controller's and the one all agents share. A connection without the
agents' secret key is refused in the handshake, before any message is read. Messages are JSON objects with a
`type`; a message from another version of this protocol is dropped. What a controller says bears its `epoch`
(slurm_ft/lease.py): an agent obeys the highest one that it knows of, and tells a lower one that it is deposed.

An agent that loses the controller goes on dialling. The controller's address is in `secret/endpoint`, so a
controller that starts again elsewhere is found there.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
import zmq.auth
from zmq.auth.asyncio import AsyncioAuthenticator

from slurm_ft.errors import LaunchError, RunFolderError
from slurm_ft.paths import RunPaths, write_atomic

PROTOCOL = 1
HEARTBEAT = 1.0
"""Seconds between two signs of life of an agent."""
PING_MS = 3000
PINGS_LOST = 5
"""An agent whose pings get no answer for so many intervals drops the connection and dials again. ZeroMQ answers
them in a thread of its own, so a controller that is busy, or waits for a file system, loses nothing by this."""

Message = dict[str, Any]


def make_keys(paths: RunPaths) -> None:
    """Make the run's two key pairs in its secret folder, unless they are there."""
    for name in ("controller", "agent"):
        if not (paths.secret / f"{name}.key_secret").exists():
            previous = os.umask(0o077)
            try:
                zmq.auth.create_certificates(paths.secret, name)
            finally:
                os.umask(previous)


def keys_of(folder: Path, name: str) -> tuple[bytes, bytes]:
    """A key pair (public, secret). Raises RunFolderError when it is not there or not readable."""
    try:
        public, secret = zmq.auth.load_certificate(folder / f"{name}.key_secret")
    except (OSError, ValueError) as error:
        raise RunFolderError(f"the run's keys cannot be read: {error}", "only the run's owner can reach it") from None
    assert secret is not None
    return public, secret


def _encode(message: Message) -> bytes:
    return json.dumps({"v": PROTOCOL, **message}).encode()


def _decode(data: bytes) -> Message | None:
    try:
        message = json.loads(data)
    except ValueError:
        return None
    return message if isinstance(message, dict) and message.get("v") == PROTOCOL and "type" in message else None


def _endpoint(paths: RunPaths) -> str:
    """Where the run's controller listens, or '' before there is one."""
    return paths.endpoint.read_text() if paths.endpoint.exists() else ""


class OnlyAgents:
    """Lets in the holders of the agents' key and nobody else (ZAP's credentials provider)."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


LONGEST_MESSAGE = 16 << 20
"""Bytes. The longest message of an agent is a traceback."""


class Server:
    """The controller's end. Peers are named by bytes that they choose (see `Client`)."""

    def __init__(self, paths: RunPaths, host: str, epoch: int = 0) -> None:
        """Listen on `host`, on the port of the run's last controller if that is free; `epoch` goes with
        every message.

        Raises LaunchError when nothing can be bound there.
        """
        self._stamp = {"epoch": epoch} if epoch else {}
        self._paths = paths
        public, secret = keys_of(paths.secret, "controller")
        agent_public, _ = keys_of(paths.secret, "agent")
        self._context = zmq.asyncio.Context()
        self._gate = AsyncioAuthenticator(self._context)
        self._gate.start()
        self._gate.configure_curve_callback(credentials_provider=OnlyAgents(agent_public))
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        # Who has no key is refused after the frame that says so has been read, however long that is.
        self._socket.setsockopt(zmq.MAXMSGSIZE, LONGEST_MESSAGE)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        if ":" in host:
            self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
        try:
            self.endpoint = self._bind(host, paths)
        except LaunchError:
            self.close()
            raise
        self.advertise()

    def advertise(self) -> None:
        """Tell agents where we are, if the file says something else. Raises OSError."""
        if _endpoint(self._paths) != self.endpoint:
            write_atomic(self._paths.endpoint, self.endpoint, 0o600)

    def _bind(self, host: str, paths: RunPaths) -> str:
        address = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        last = _endpoint(paths)
        if last.startswith(f"{address}:"):
            try:
                self._socket.bind(last)
                return last
            except zmq.ZMQError:
                pass  # taken by somebody else meanwhile; agents find the new port in the endpoint file
        try:
            port = self._socket.bind_to_random_port(address)
        except zmq.ZMQError as error:
            raise LaunchError(
                f"the controller cannot listen on {host}: {error}", "set SLURM_FT_ADDRESS to an address of this host"
            ) from None
        return f"{address}:{port}"

    def send(self, peer: bytes, message: Message) -> None:
        """Send to one peer; a peer that is gone is not an error, its loss is seen elsewhere."""
        self._socket.send_multipart([peer, _encode({**self._stamp, **message})])

    async def messages(self) -> AsyncIterator[tuple[bytes, Message]]:
        while True:
            parts = await self._socket.recv_multipart()
            message = _decode(parts[-1]) if len(parts) == 2 else None
            if message is not None:
                yield parts[0], message

    def close(self) -> None:
        self._socket.close()
        self._gate.stop()
        self._context.term()


class Client:
    """An agent's end."""

    def __init__(self, paths: RunPaths, identity: bytes) -> None:
        self._paths = paths
        self._identity = identity
        self._keys = keys_of(paths.secret, "agent"), keys_of(paths.secret, "controller")[0]
        self._context = zmq.asyncio.Context()
        self._endpoint = ""
        self._socket: zmq.asyncio.Socket | None = None
        self.dial()

    def dial(self) -> None:
        """Connect to where the run's controller is now; what was not sent yet to the last one is lost."""
        endpoint = _endpoint(self._paths)
        if not endpoint or (endpoint == self._endpoint and self._socket is not None):
            return
        if self._socket is not None:
            self._socket.close(linger=0)
        (public, secret), server = self._keys
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, self._identity)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        # TCP waits longer and longer before it tries again: after a cut of a minute, up to another minute.
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, PINGS_LOST * PING_MS)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, PING_MS)
        self._socket.setsockopt(zmq.SNDHWM, 100_000)
        self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
        self._socket.curve_serverkey = server
        self._socket.connect(endpoint)
        self._endpoint = endpoint

    def send(self, message: Message) -> None:
        """Queue a message. It leaves as soon as the controller can be reached."""
        if self._socket is not None:
            self._socket.send(_encode(message))

    async def receive(self) -> Message | None:
        """The next message, or None for one that is not of this protocol."""
        while True:
            here, task = self._socket, asyncio.current_task()
            if here is None:
                raise ConnectionError("the run has no controller yet")
            try:
                return _decode(await here.recv())
            except asyncio.CancelledError:
                # Closing a socket cancels who listens to it: after `dial` that means to listen to the new one.
                if here is self._socket or (task is not None and task.cancelling()):
                    raise

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._context.term()
