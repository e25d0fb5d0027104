"""A state from a peer: torchft's CheckpointTransport, in chunks, in parallel, verified, and for the run only.

    from slurm_ft.train.ft import Manager, PeerTransport
    Manager(..., checkpoint_transport=PeerTransport(timeout=timedelta(seconds=60)))

torchft's HTTP transport serves the weights to whoever reaches the port, unpickles what a donor sends, copies
a state three times on its way, and starts again from nothing when a connection breaks. This one:

- asks for the run's secret, on both ends, before a word is parsed (`wire`, `key`)
- sends tensors from where they are, with no serialising, and receives them where they will be (`tree`)
- uses several connections at once, each with the next question under way (`receiver`)
- checks each chunk by a digest of 128 bits; goes on from the next missing chunk after a broken connection,
  also at another donor and in the next call, as long as the state has the same layout
- gives step N to who asks for step N, or an error; waits for nothing longer than its time-outs

In place: with `into`, a function that gives the receiver's own state, what arrives is written over it where
path, shape and dtype agree. That saves the memory and a copy. A transfer that breaks then leaves a state that
is half the peer's: `torn` says so until a transfer has succeeded, and `slurm_ft.train.ft.Manager` commits
nothing on it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torchft.checkpointing.transport import CheckpointTransport

from slurm_ft.train.transport.donor import Donor, Offer
from slurm_ft.train.transport.key import transport_key
from slurm_ft.train.transport.receiver import Arrived, Fetch
from slurm_ft.train.transport.tree import CHUNK_BYTES, Row, take_apart
from slurm_ft.train.transport.wire import PeerGone, Refused, TransportError

__all__ = ["PeerGone", "PeerTransport", "Refused", "TransportError", "transport_key"]

T = TypeVar("T")
SCHEME = "slurm-ft"
CONNECTIONS = max(2, min(4, len(os.sched_getaffinity(0))))
"""Measured on 2 cores over loopback: 2 are best; a network's single stream is slower than the network."""
STALL_SECONDS = 10.0


def parse_address(metadata: str) -> tuple[str, int]:
    """Host and port of `slurm-ft://HOST:PORT`. Raises TransportError for anything else."""
    scheme, _, rest = metadata.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != SCHEME or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise TransportError(f"the donor uses another transport: {metadata[:80]!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


class PeerTransport(CheckpointTransport[T]):  # type: ignore[misc]
    """Gives this rank's state to peers and gets theirs.

    timeout      for anything that torchft gives no time-out for: how long a donor serves one connection
    host         the name or address by which peers reach this host; this machine's name by default
    key          the run's secret; from the environment by default (see `key`). UsageError when there is none
    connections  at once, for one receiver; the donor's processor time is shared by them
    stall        seconds without a byte after which a connection counts as broken
    into         gives the receiver's own state, to be written in place
    """

    def __init__(
        self,
        timeout: timedelta,
        host: str | None = None,
        key: bytes | None = None,
        connections: int = CONNECTIONS,
        stall: float = STALL_SECONDS,
        into: Callable[[], Any] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._key = transport_key(os.environ) if key is None else key
        host = host or socket.gethostname()
        self._host = f"[{host}]" if ":" in host else host
        self._connections, self._stall, self._chunk_bytes = connections, stall, chunk_bytes
        self.into = into
        self.torn = False
        self.asked_while_torn = False
        self.bytes_received = 0
        self._kept: Arrived | None = None
        self._donor = Donor(self._key, timeout.total_seconds(), stall)

    def metadata(self) -> str:
        return f"{SCHEME}://{self._host}:{self._donor.port}"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Offer the state until `disallow_checkpoint`. The tensors are read where they are: change none.

        Raises TransportError when the state is half a peer's: nobody gets that.
        """
        if self.torn:
            self.asked_while_torn = True
            raise TransportError("a transfer broke: the state here is half a peer's, and is not given to others")
        skeleton, tensors = take_apart(state_dict)
        self._donor.allow(Offer(step, skeleton, Row(tensors, self._chunk_bytes)))

    def disallow_checkpoint(self) -> None:
        """Returns when nobody reads the state any more."""
        self._donor.disallow()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """The donor's state of this step.

        Raises TimeoutError after `timeout`, Refused when the donor has another step or another secret,
        PeerGone when it is gone, TransportError for a state that cannot be read.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        fetch = Fetch(parse_address(metadata), self._key, step, deadline, self._stall, self._kept)
        own = self.into() if self.into is not None else None
        try:
            state: T = fetch.run(own, self._connections)
        except BaseException:
            self.torn = self.torn or (own is not None and fetch.wrote)
            raise
        finally:
            self._kept = fetch.kept
            self.bytes_received = fetch.bytes_received
        self.torn = False
        return state

    def shutdown(self, wait: bool = True) -> None:
        """Close the port. Connections under way end with their receivers."""
        self._donor.close()
