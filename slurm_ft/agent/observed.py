"""What the agent makes of its ranks' packets: few messages for the controller, with what belongs together.

Progress of a step is kept and sent at most a few times a second; quorums, commits and new phases are sent
at once. A commit carries the rank's last progress, and how many training steps it covers: those are lost if
it is not committed, unless the next one is `again`, on the same work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Send = Callable[[dict[str, Any]], None]


@dataclass
class _RankNews:
    step: int | None = None
    loss: float | None = None
    tokens: int | None = None
    phase: str | None = None
    reported: bool = True
    steps_since_commit: int = 0
    steps_voted_on: int = 0
    again: bool = False


@dataclass
class Observed:
    """The news of one attempt's ranks. `send` takes a message of the control channel."""

    attempt: int
    send: Send
    _ranks: dict[int, _RankNews] = field(default_factory=dict)

    def packet(self, rank: int, packet: dict[str, Any]) -> None:
        """Take in one packet of a rank; its `m` is the sender's monotonic clock, the same as ours."""
        news = self._ranks.setdefault(rank, _RankNews())
        kind = packet.get("type")
        common = {"attempt": self.attempt, "rank": rank, "age": max(0.0, time.monotonic() - float(packet.get("m", 0)))}
        if kind == "progress":
            self._progress(news, packet, common)
        elif kind == "quorum":
            self.send({"type": "quorum", **common, **_only(packet, "quorum_id", "step")})
        elif kind == "commit":
            self._commit(news, packet, common)
        elif kind == "member":
            self.send({"type": "member", **common, **_only(packet, "id", "timeouts")})
        elif kind == "torchft_error":
            self.send({"type": "torchft_error", **common, **_only(packet, "error")})
        elif kind == "again":
            news.again = True

    def _progress(self, news: _RankNews, packet: dict[str, Any], common: dict[str, Any]) -> None:
        phase = packet.get("phase")
        source = packet.get("source")
        if phase and (phase != news.phase or source):
            news.phase = str(phase)
            state = {"source": source, "source_step": packet.get("source_step")} if source else {}
            news.again = news.again and not source  # another's state has taken the place of that work
            self.send({"type": "phase", "phase": news.phase, **state, **common})
        step = packet.get("step")
        if isinstance(step, int):
            news.steps_since_commit += step != news.step
            news.step = step
            for name in ("loss", "tokens"):
                if isinstance(packet.get(name), int | float):
                    setattr(news, name, packet[name])
            news.reported = False

    def _commit(self, news: _RankNews, packet: dict[str, Any], common: dict[str, Any]) -> None:
        if not news.again:
            news.steps_voted_on = max(1, news.steps_since_commit)
        self.send(
            {
                "type": "commit",
                **common,
                **_only(packet, "step", "committed", "quorum_id"),
                "train_step": news.step,
                "loss": news.loss,
                "tokens": news.tokens,
                "lost": news.steps_voted_on,
                **({"again": True} if news.again else {}),
            }
        )
        news.steps_since_commit, news.again = 0, False

    def flush(self) -> None:
        """Send what progress has come since the last call."""
        for rank, news in self._ranks.items():
            if not news.reported:
                news.reported = True
                self.send(
                    {
                        "type": "progress",
                        "attempt": self.attempt,
                        "rank": rank,
                        "step": news.step,
                        "loss": news.loss,
                        "tokens": news.tokens,
                    }
                )


def _only(packet: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: packet.get(name) for name in names}
