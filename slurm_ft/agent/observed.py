"""What the agent makes of its ranks' packets: few messages for the controller, with what belongs together.

Progress of a step is kept and sent at most a few times a second; quorums, commits and new phases are sent
at once. A commit carries the rank's last progress, and how many training steps it covers: those are lost if
it is not committed. Commits are numbered within an attempt and kept for a while: a controller that was
started again has missed those of the moments between.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

KEPT_COMMITS = 500

Send = Callable[[dict[str, Any]], None]


@dataclass
class _RankNews:
    step: int | None = None
    loss: float | None = None
    tokens: int | None = None
    phase: str | None = None
    reported: bool = True
    steps_since_commit: int = 0
    commits: int = 0


@dataclass
class Observed:
    """The news of one attempt's ranks. `send` takes a message of the control channel."""

    attempt: int
    send: Send
    _ranks: dict[int, _RankNews] = field(default_factory=dict)
    _kept: deque[tuple[float, dict[str, Any]]] = field(default_factory=lambda: deque(maxlen=KEPT_COMMITS))

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
        elif kind == "torchft_error":
            self.send({"type": "torchft_error", **common, **_only(packet, "error")})

    def _progress(self, news: _RankNews, packet: dict[str, Any], common: dict[str, Any]) -> None:
        phase = packet.get("phase")
        if phase and phase != news.phase:
            news.phase = str(phase)
            self.send({"type": "phase", "phase": news.phase, **common})
        step = packet.get("step")
        if isinstance(step, int):
            news.steps_since_commit += step != news.step
            news.step = step
            for name in ("loss", "tokens"):
                if isinstance(packet.get(name), int | float):
                    setattr(news, name, packet[name])
            news.reported = False

    def _commit(self, news: _RankNews, packet: dict[str, Any], common: dict[str, Any]) -> None:
        news.commits += 1
        message = {
            "type": "commit",
            **common,
            **_only(packet, "step", "committed", "quorum_id"),
            "n": news.commits,
            "train_step": news.step,
            "loss": news.loss,
            "tokens": news.tokens,
            "lost": max(1, news.steps_since_commit),
        }
        news.steps_since_commit = 0
        self.send(message)
        if common["rank"] == 0:  # the others say the same
            self._kept.append((time.monotonic(), message))

    def commits(self) -> list[dict[str, Any]]:
        """The last KEPT_COMMITS commits of rank 0, with their ages of now."""
        now = time.monotonic()
        return [{**message, "age": message["age"] + now - sent} for sent, message in self._kept]

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
