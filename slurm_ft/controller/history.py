"""What the log of a run tells a controller that begins, read in one pass.

A log of days has millions of lines, so nothing but what is needed is kept, and the reading is done beside the event
loop: a controller that reads for a minute must renew its lease meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from slurm_ft.controller.book import Book
from slurm_ft.controller.deliveries import Deliveries
from slurm_ft.controller.fold import observe
from slurm_ft.controller.state import RunState
from slurm_ft.events import Event, Kind, read


@dataclass
class History:
    """`epoch` is the highest that is in the log, `saves` are the complete ones of the whole run; the rest is of the
    last session, which `started` began."""

    deliveries: Deliveries
    epoch: int = 0
    saves: list[Event] = field(default_factory=list)
    started: Event | None = None
    state: RunState = field(default_factory=RunState)
    book: Book = field(default_factory=Book)
    keepers: list[Event] = field(default_factory=list)

    @staticmethod
    def of(log: Path, ranks_per_host: int) -> History:
        """Read a log. A missing one is empty."""
        history = History(Deliveries(ranks_per_host))
        for event in read(log):
            if event.kind is Kind.RUN_STARTED:
                history = History(Deliveries(ranks_per_host), history.epoch, history.saves, event)
            history.take(event)
        return history

    def take(self, event: Event) -> None:
        self.epoch = max(self.epoch, event.epoch)
        if event.kind is Kind.SAVE_ENDED and event.data.get("complete"):
            self.saves.append(event)
        if self.started is None:
            return
        self.state = observe(self.state, event)
        self.book.replay(event)
        self.deliveries.replay(event)
        if event.kind is Kind.KEEPER:
            self.keepers.append(event)
