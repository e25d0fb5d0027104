"""What an agent has told and the controller may not have: kept until it is acknowledged, and told again.

The ledger must know of every commit, also of those whose news was under way when the controller's host died.
Each piece of news has a number `n`, from 1 on for each agent. A controller writes down the next number alone, and
the number goes into the log with it; in its answers to signs of life it says how far it has come. One that sees a
gap, or does not know the agent, asks `who`, and is told all again from there. So nothing is lost and nothing is
written twice, whichever controller writes it. The `age` of what is told again has grown meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from slurm_ft.channel import Message

MOST = 100_000
"""Messages that are kept. A run without a controller for so long that there are more loses the oldest."""


class Outbox:
    """Numbers messages, sends them, and keeps them until they are acknowledged."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._kept: deque[tuple[float, Message]] = deque(maxlen=MOST)
        self.last = 0
        """The number of the newest message."""

    @property
    def first(self) -> int:
        """The number of the oldest message that can be told again."""
        return int(self._kept[0][1]["n"]) if self._kept else self.last + 1

    def tell(self, message: Message) -> None:
        self.last += 1
        numbered = {**message, "n": self.last}
        self._kept.append((time.monotonic(), numbered))
        self._send(numbered)

    def acknowledged(self, n: int) -> None:
        while self._kept and self._kept[0][1]["n"] <= n:
            self._kept.popleft()

    def again(self) -> None:
        now = time.monotonic()
        for told, message in self._kept:
            self._send({**message, "age": message["age"] + now - told} if "age" in message else message)
