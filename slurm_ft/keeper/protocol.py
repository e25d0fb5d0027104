"""What is said between a keeper and the processes of its run.

A SOCK_SEQPACKET Unix socket: one packet is one JSON object, descriptors travel beside it (SCM_RIGHTS). A request
has `v`, `op` and what the operation needs; the answer has `ok`, and `why` in words when it is refused.

    make  bytes               memory that the keeper has made and filled with pages -> one descriptor
    put   name meta           hold these descriptors under a name; replaces what was there
    get   name claim wait     what is held: meta, descriptors; with `claim` the caller becomes its owner
    list                      names, metas, sizes and owners
    drop  name                let go

The owner of a name is the process that put or claimed it last. While it lives nobody else can put, claim or drop
that name: a claim waits for its end, at most `wait` seconds. So memory never has two writers.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import re
import socket
from typing import Any

VERSION = 1
PACKET_BYTES = 64 * 1024
META_BYTES = 16 * 1024
MOST_DESCRIPTORS = 32
"""In one packet, and so under one name. Linux allows 253."""
MOST_NAMES = 256
LONGEST_WAIT = 60.0
NAME = re.compile(r"[A-Za-z0-9_.=+-]{1,100}")

Packet = dict[str, Any]


class Refused(Exception):
    """The keeper said no; the words are its own."""


class Absent(Refused):
    """There is nothing under this name."""


def send(connection: socket.socket, packet: Packet, descriptors: list[int] | tuple[int, ...] = ()) -> None:
    """Raises Refused for a packet that is too large to be sent."""
    data = json.dumps(packet, separators=(",", ":")).encode()
    if len(data) > PACKET_BYTES:
        raise Refused(f"a packet of {len(data)} bytes; at most {PACKET_BYTES} are allowed")
    if len(descriptors) > MOST_DESCRIPTORS:
        raise Refused(f"{len(descriptors)} descriptors at once; at most {MOST_DESCRIPTORS} are allowed")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    connection.sendmsg([data], rights, socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> tuple[Packet, list[int]] | None:
    """One packet and its descriptors, which are the caller's to close; None at the end of the connection.

    Raises ValueError for what is no packet of ours. Its descriptors are closed.
    """
    integers = array.array("i")
    room = socket.CMSG_SPACE(MOST_DESCRIPTORS * integers.itemsize)
    data, rights, flags, _ = connection.recvmsg(PACKET_BYTES + 1, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, raw in rights:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            integers.frombytes(raw[: len(raw) - len(raw) % integers.itemsize])
    descriptors = list(integers)
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ValueError("the packet is too large")
        if not data:
            if descriptors:
                raise ValueError("descriptors without a packet")
            return None
        packet = json.loads(data)
        if not isinstance(packet, dict):
            raise ValueError("the packet is no object")
    except (ValueError, RecursionError) as error:
        close_all(descriptors)
        raise ValueError(str(error)) from None
    return packet, descriptors


def close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
