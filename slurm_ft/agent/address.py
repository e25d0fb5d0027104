"""Addresses and ports of this host, as the other hosts of a run use them."""

from __future__ import annotations

import contextlib
import os
import socket
from urllib.parse import urlsplit

PORTS = range(20_000, 32_000)
"""Below the kernel's ephemeral range, so that no outgoing connection takes a port we chose."""


def free_port(host: str = "") -> int:
    """A port that is free now, from PORTS. Nothing reserves it: a rank that finds it taken fails and the
    next attempt gets another."""
    start = int.from_bytes(os.urandom(4), "big")
    for offset in range(len(PORTS)):
        port = PORTS[(start + offset * 7) % len(PORTS)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise OSError("no port between 20000 and 32000 is free")


def address_towards(endpoint: str) -> str:
    """Our address on the way to the controller: what other hosts of the allocation can reach us by."""
    target = urlsplit(endpoint)
    family = socket.AF_INET6 if ":" in (target.hostname or "") else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((target.hostname, target.port))
        return str(probe.getsockname()[0])
