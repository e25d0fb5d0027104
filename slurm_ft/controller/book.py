"""The controller's book of training progress: the last word of each replica, and which of it to record.

A commit is always recorded (the ledger); progress of a step only as a sample every SAMPLE_INTERVAL seconds
and once more when an attempt ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_ft.events import Event, Kind

SAMPLE_INTERVAL = 5.0
"""Seconds between two recorded samples of a replica's progress."""


@dataclass
class Page:
    """What is known of one replica's training."""

    attempt: int = 0
    step: int | None = None
    loss: float | None = None
    tokens: int | None = None
    member: str | None = None  # how torchft's quorums call this attempt
    quorum_id: int | None = None
    committed: int = 0
    recorded_at: float = float("-inf")
    unrecorded: bool = False


@dataclass
class Book:
    """One page per replica."""

    pages: dict[int, Page] = field(default_factory=dict)

    def page(self, replica: int) -> Page:
        return self.pages.setdefault(replica, Page())

    def replay(self, event: Event) -> None:
        """Take in what an earlier controller has recorded."""
        if event.replica is None:
            return
        if event.kind is Kind.RANKS_STARTED:
            self.started(event.replica, int(event.data["attempt"]))
        elif event.kind is Kind.PROGRESS:
            self.progress(event.replica, event.data)
        elif event.kind is Kind.COMMIT:
            self.commit(event.replica, event.data)
        elif event.kind is Kind.MEMBER and event.data.get("attempt") == self.page(event.replica).attempt:
            self.page(event.replica).member = event.data.get("id")
        elif event.kind is Kind.SURVIVORS_TOLD:
            self.page(event.replica).member = None

    def started(self, replica: int, attempt: int) -> None:
        page = self.page(replica)
        page.attempt, page.unrecorded, page.member = attempt, False, None

    @property
    def members(self) -> dict[int, str]:
        """How torchft's quorums call the replicas that are in them."""
        return {replica: page.member for replica, page in self.pages.items() if page.member}

    def progress(self, replica: int, message: Mapping[str, Any]) -> None:
        page = self.page(replica)
        for name in ("step", "loss", "tokens"):
            if message.get(name) is not None:
                setattr(page, name, message[name])
        page.unrecorded = page.step is not None  # a program that reports no steps has nothing to sample

    def commit(self, replica: int, message: Mapping[str, Any]) -> None:
        """A commit carries the progress that was made until then, under `train_step`."""
        self.progress(replica, {**message, "step": message.get("train_step")})
        self.page(replica).committed += bool(message.get("committed"))

    def sample(self, replica: int, now: float, last: bool = False) -> dict[str, Any] | None:
        """The progress to record now, or None. `last` asks for what there is, whenever the last one was."""
        page = self.page(replica)
        if not page.unrecorded or (not last and now - page.recorded_at < SAMPLE_INTERVAL):
            return None
        page.unrecorded, page.recorded_at = False, now
        return {"attempt": page.attempt, "step": page.step, "loss": page.loss, "tokens": page.tokens}
