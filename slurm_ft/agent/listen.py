"""What the agent listens to on its own host: the ranks' progress, and ranks that look for the Lighthouse."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slurm_ft.aside import Aside
from slurm_ft.train.progress import PACKET_BYTES

ADDRESS_WITHIN = 1.0

HOLD = 30.0
LOOK = 0.05
"""Seconds between two looks at the address of a Lighthouse that is being started again."""
REACH = 5.0
"""Seconds within which a Lighthouse that is there answers a connection."""


class RankSocket:
    """The socket on which ranks report (see slurm_ft.train.progress).

    It is in the abstract namespace, so there is no file to leave behind; only processes of the same user
    are let in. A program that a rank starts may report too, as the rank that it has inherited; what is sent to a
    rank goes to the one that came first, which is the rank itself.
    """

    def __init__(self, on_packet: Callable[[int, dict[str, Any]], None]) -> None:
        self.name = f"@slurm-ft-{secrets.token_hex(12)}"
        self._on_packet = on_packet
        self._connections: dict[int, list[socket.socket]] = {}  # of each rank, the oldest first
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._socket.bind("\0" + self.name[1:])
        self._socket.listen(128)
        asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        connection, _ = self._socket.accept()
        connection.setblocking(False)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, user, _ = struct.unpack("3i", credentials)
        if user != os.getuid():
            connection.close()
            return
        asyncio.get_running_loop().add_reader(connection, self._read, connection, {"rank": -1})

    def _read(self, connection: socket.socket, who: dict[str, int]) -> None:
        try:
            data = connection.recv(PACKET_BYTES)
            packet = json.loads(data) if data else None
        except BlockingIOError:
            return
        except (OSError, ValueError):
            packet = None
        hello = isinstance(packet, dict) and packet.get("type") == "hello"
        if not isinstance(packet, dict) or (hello and not isinstance(packet.get("rank"), int)):
            self._drop(connection, who["rank"])
        elif hello:
            who["rank"] = packet["rank"]
            self._connections.setdefault(who["rank"], []).append(connection)
        else:
            self._on_packet(who["rank"], packet)

    def _drop(self, connection: socket.socket, rank: int) -> None:
        asyncio.get_running_loop().remove_reader(connection)
        connection.close()
        left = [other for other in self._connections.pop(rank, []) if other is not connection]
        if left:
            self._connections[rank] = left

    def ranks(self) -> list[int]:
        """The ranks that are connected now."""
        return sorted(self._connections)

    def send(self, rank: int, packet: dict[str, Any]) -> bool:
        """Send a packet to a rank; False when it is not connected (its program is not observed)."""
        if rank not in self._connections:
            return False
        try:
            self._connections[rank][0].send(json.dumps(packet).encode())
        except OSError:
            return False
        return True

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        for connection in [*itertools.chain(*self._connections.values()), self._socket]:
            loop.remove_reader(connection)
            connection.close()


class Forwarder:
    """Carries bytes from a loopback port to the Lighthouse of the day.

    The Lighthouse's address is read anew for each connection, so it can move while the address that the
    ranks were given stays the same. When it cannot be read in time, the last one known is used. While it is
    empty a Lighthouse is being started again, and who asks for it is kept waiting for up to HOLD seconds.

    `fence` keeps the ranks of a host that was cut off from the Lighthouse, until `open`: their replica may have
    been started elsewhere meanwhile, and when the network heals they must not come between.
    """

    def __init__(self, address_file: Path) -> None:
        self._address_file = address_file
        self._server: asyncio.Server | None = None
        self._files = Aside("lighthouse")
        self._last = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._fenced = False

    async def start(self) -> str:
        """Listen; gives the address for the ranks, or '' when the run has no Lighthouse."""
        if not self._address_file.exists():
            return ""
        self._last = self._address_file.read_text().strip()
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        ends = [writer]
        try:
            far_reader, far_writer = await self._connect()
            ends.append(far_writer)
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        except (OSError, ValueError, asyncio.CancelledError):
            pass  # the rank sees a closed connection and dials again
        finally:
            self._tasks.discard(task)
            for end in ends:
                end.close()

    async def _address(self) -> str:
        with contextlib.suppress(TimeoutError):
            if self._files.busy_for < ADDRESS_WITHIN:
                self._last = await asyncio.wait_for(self._files.do(self._address_file.read_text), ADDRESS_WITHIN)
        return self._last.strip()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the Lighthouse. Raises OSError when there is none to be had."""
        async with asyncio.timeout(HOLD):
            while not (address := await self._address()):
                await asyncio.sleep(LOOK)
        if self._fenced:
            raise ConnectionError("this host is cut off")
        target = urlsplit(address)
        return await asyncio.wait_for(asyncio.open_connection(target.hostname, target.port), REACH)

    async def reaches(self) -> bool:
        """Can the Lighthouse be reached from here? One that is being started again is not out of reach."""
        try:
            if await self._address():
                _, writer = await self._connect()
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
            return True
        except ConnectionRefusedError:
            return True  # its host is there
        except (OSError, ValueError):
            return False

    def fence(self) -> None:
        """Carry nothing any more: what is on its way is dropped, and new connections are closed."""
        self._fenced = True
        for task in list(self._tasks):
            task.cancel()

    def open(self) -> None:
        """Carry again."""
        self._fenced = False

    @property
    def fenced(self) -> bool:
        return self._fenced

    def drop(self) -> None:
        """Close what is open, so that ranks dial again and reach the Lighthouse of now: when the last one's host
        is gone, nothing else may tell them for minutes."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while block := await reader.read(65536):
            writer.write(block)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()
    except OSError:
        writer.close()
        raise
