"""Whom a controller asks who it is, and how often."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_ft.controller import peers
from slurm_ft.controller.peers import Peer, Peers


class Server:
    def __init__(self) -> None:
        self.sent: list[tuple[bytes, str]] = []

    def send(self, name: bytes, message: dict[str, Any]) -> None:
        self.sent.append((name, message["type"]))


def test_of_an_agent_whose_messages_have_piled_up_it_is_asked_once_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer would be all of its news."""
    now = 100.0
    monkeypatch.setattr(peers.time, "monotonic", lambda: now)
    server = Server()
    known = Peers(server)  # type: ignore[arg-type]
    for name in (b"a", b"b", b"a", b"a", b"b"):
        known.ask_who(name)
    assert server.sent == [(b"a", "who"), (b"b", "who")]
    now += peers.ASK_AGAIN
    known.ask_who(b"a")  # the question, or its answer, was lost
    assert server.sent[2:] == [(b"a", "who")]
    known.add(b"b", Peer(0, 1, 0, "host", now))
    assert set(known._asked) == {b"b"}, "connections that are gone are forgotten"
