"""Addresses and ports of this host, as the other hosts of a run use them."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Sequence
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


def reachable(name: str, others: Sequence[str]) -> str:
    """An address of this host that the `others` reach, where `name` stands for it.

    Debian lets a host's own name stand for 127.0.1.1: then it is the address from which we would talk to one of the
    others. An address instead of a name is taken as it is, and so is what it stands for where nobody knows the
    others. Raises OSError when there is none.
    """
    found = [str(item[4][0]) for item in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    if name in found:
        return found[0]
    towards = []
    for other in others:
        with contextlib.suppress(OSError):
            far = str(socket.getaddrinfo(other, None, type=socket.SOCK_STREAM)[0][4][0])
            towards.append(address_towards(f"udp://[{far}]:9" if ":" in far else f"udp://{far}:9"))
    for address in found + towards:
        if not is_of_one_host(address):
            return address
    if not towards:
        return found[0]
    raise OSError(f"it stands for {found[0]} here, which no other host reaches")


def is_of_one_host(address: str) -> bool:
    """Does this address lead nowhere but to the host itself, or to its link?"""
    plain = ipaddress.ip_address(address.partition("%")[0])
    return plain.is_loopback or plain.is_link_local


def address_towards(endpoint: str) -> str:
    """Our address on the way to the controller: what other hosts of the allocation can reach us by."""
    target = urlsplit(endpoint)
    family = socket.AF_INET6 if ":" in (target.hostname or "") else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((target.hostname, target.port))
        return str(probe.getsockname()[0])
