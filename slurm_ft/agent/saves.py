"""Asks the ranks of this host to save, and passes on what they answer.

A rank that has said `can_save` gets a packet. Another one gets the run's save signal, where there is one: the
rank itself, never its children. Whoever asks twice with the same id gets the same answers and nobody is
signalled again, so the controller may repeat a question that was lost.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from typing import Any

Message = dict[str, Any]


class Saves:
    """The save of one attempt's ranks. `tell(rank, packet)` reaches a rank that is connected, `signal_rank(number,
    rank)` any rank; both say whether there was one. `send` takes a message of the control channel."""

    def __init__(
        self,
        index: int,
        save_signal: str,
        tell: Callable[[int, Message], bool],
        signal_rank: Callable[[int, int], bool],
        send: Callable[[Message], None],
    ) -> None:
        self._index, self._tell, self._signal_rank, self._send = index, tell, signal_rank, send
        self._number = signal.Signals[save_signal] if save_signal else None
        self._able: set[int] = set()
        self._id = ""
        self._said: list[Message] = []

    def begin_attempt(self) -> None:
        """The ranks are new ones: what the old ones could, or were asked, is forgotten."""
        self._able.clear()
        self._id, self._said = "", []

    def packet(self, rank: int, packet: Message, attempt: int) -> bool:
        """Take in a rank's packet; says whether it was about saving."""
        if packet.get("type") == "can_save":
            self._able.add(rank)
            return True
        if packet.get("type") != "saved":
            return False
        if packet.get("id") == self._id:
            words = {name: packet.get(name) for name in ("id", "step", "wrote", "path", "error")}
            self._say({"type": "saved", "attempt": attempt, "rank": rank, **words})
        return True

    def ask(self, id: str, attempt: int, ranks: Iterable[int]) -> None:
        """Ask these ranks, those that run here."""
        if id == self._id:
            for message in self._said:
                self._send(message)
            return
        self._id, self._said = id, []
        able = [rank for rank in ranks if rank in self._able and self._tell(rank, {"type": "save", "id": id})]
        signalled = [
            rank
            for rank in ranks
            if rank not in able and self._number is not None and self._signal_rank(self._number, rank)
        ]
        self._say({"type": "save_asked", "id": id, "attempt": attempt, "index": self._index, "able": able,
                   "signalled": signalled})  # fmt: skip

    def _say(self, message: Message) -> None:
        self._said.append(message)
        self._send(message)
