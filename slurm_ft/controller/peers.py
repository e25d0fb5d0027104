"""The agents that have said who they are, and who of them is silent.

The name of a connection stands for an agent. A controller that was started again knows which agents must be
there but not their names: until they call, a stand-in is kept for each, and one that never calls is lost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from slurm_ft.channel import Message, Server
from slurm_ft.controller.state import Replica

ASK_AGAIN = 1.0
"""Seconds until an agent is asked again who it is; if the question was lost, its next sign of life leads to another."""
EXPECTED = b"expected."
"""How the names of stand-ins begin."""


@dataclass
class Peer:
    """An agent that has said who it is. `heard` is on the monotonic clock, in seconds."""

    replica: int
    step: int
    index: int
    host: str
    heard: float

    @property
    def who(self) -> tuple[int, int, int]:
        """The agent, whatever its connection is called."""
        return self.replica, self.step, self.index


class Peers:
    """The agents of a run, by the names of their connections."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._peers: dict[bytes, Peer] = {}
        self._asked: dict[bytes, float] = {}  # when we asked a connection who it is

    def get(self, name: bytes) -> Peer | None:
        return self._peers.get(name)

    def add(self, name: bytes, peer: Peer) -> None:
        """Take an agent in. It takes the place of what stood for the same host before it."""
        self._peers = {n: p for n, p in self._peers.items() if (p.replica, p.index) != (peer.replica, peer.index)}
        self._peers[name] = peer
        self._asked = {n: t for n, t in self._asked.items() if n in self._peers}

    def expect(self, replica: Replica, doubtful: str, silent_since: float) -> None:
        """Stand-ins for the agents of a replica, which are to call. One on the host `doubtful` counts as silent
        since so many seconds."""
        now = time.monotonic()
        for index in replica.addresses:
            name = EXPECTED + f"{replica.id}.{index}".encode()
            host = replica.hosts[index]
            heard = now - max(0.0, silent_since) if host == doubtful else now
            self._peers[name] = Peer(replica.id, replica.step, index, host, heard)

    @property
    def all_have_called(self) -> bool:
        return not any(name.startswith(EXPECTED) for name in self._peers)

    @property
    def called(self) -> int:
        """How many have said who they are."""
        return sum(not name.startswith(EXPECTED) for name in self._peers)

    @property
    def missing(self) -> set[str]:
        """The hosts of agents that are to call and have not."""
        return {peer.host for name, peer in self._peers.items() if name.startswith(EXPECTED)}

    def any_of(self, replica: int, step: int) -> bool:
        """Is there an agent of this step?"""
        return any((peer.replica, peer.step) == (replica, step) for peer in self._peers.values())

    def most_are_heard(self, now: float, within: float, here: str) -> bool:
        """Have we heard at least half of the agents that there are? From those on our own host nobody can cut
        us off, so they count as heard."""
        heard = sum(peer.host == here or now - peer.heard <= within for peer in self._peers.values())
        return 2 * heard >= len(self._peers)

    def drop(self, name: bytes) -> None:
        self._peers.pop(name, None)

    def drop_step(self, replica: int, step: int) -> None:
        self._peers = {n: p for n, p in self._peers.items() if (p.replica, p.step) != (replica, step)}

    def hear_all(self, now: float) -> None:
        """Count all as heard: that they were not is our own doing."""
        for peer in self._peers.values():
            peer.heard = now

    def silent(self, now: float, longer_than: float) -> Iterator[tuple[Peer, float]]:
        """Those who are silent for longer than so many seconds, and for how long. They are forgotten."""
        for name, peer in list(self._peers.items()):
            silence = now - peer.heard
            if silence > longer_than:
                del self._peers[name]
                yield peer, silence

    def ask_who(self, name: bytes) -> None:
        """Have an agent say who it is, and tell all again that we have not acknowledged. Asked once in ASK_AGAIN: many
        messages of one agent may wait here when we come up, and the answer to each would be all of its news."""
        now = time.monotonic()
        if now - self._asked.get(name, -inf) >= ASK_AGAIN:
            self._asked[name] = now
            self._server.send(name, {"type": "who"})

    def send(self, name: bytes, message: Message) -> None:
        self._server.send(name, message)

    def tell(self, replica: Replica, message: Message) -> bool:
        """Tell all agents of the replica's step; says whether there was one."""
        names = [n for n, peer in self._peers.items() if (peer.replica, peer.step) == (replica.id, replica.step)]
        for name in names:
            self._server.send(name, message)
        return bool(names)

    def tell_host(self, replica: int, index: int, message: Message) -> bool:
        """Tell the agent of one host; says whether there was one."""
        for name, peer in self._peers.items():
            if (peer.replica, peer.index) == (replica, index):
                self._server.send(name, message)
                return True
        return False
