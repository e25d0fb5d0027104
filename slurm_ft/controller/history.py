"""What the log of a run tells a controller that begins, read in one pass.

A log of days has millions of lines, so nothing but what is needed is kept, and the reading is done beside the event
loop: a controller that reads for a minute must renew its lease meanwhile. What a deposed controller writes in that
minute is read too, once our own first event is there and ends it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slurm_ft.controller.book import Book
from slurm_ft.controller.deliveries import Deliveries
from slurm_ft.controller.fold import observe
from slurm_ft.controller.state import RunState
from slurm_ft.events import Event, Follower, Kind


@dataclass
class History:
    """`epoch` is the highest that is in the log, `saves` are the complete ones of the whole run; the rest is of the
    last session, which `started` began."""

    ranks_per_host: int
    epoch: int = 0
    saves: list[Event] = field(default_factory=list)
    started: Event | None = None
    state: RunState = field(default_factory=RunState)
    book: Book = field(default_factory=Book)
    keepers: list[Event] = field(default_factory=list)
    deliveries: Deliveries = field(init=False)

    def __post_init__(self) -> None:
        self.deliveries = Deliveries(self.ranks_per_host)

    def read_on(self, log: Follower) -> History:
        """This history with what the log has more by now."""
        history = self
        for event in log.stream():
            if event.kind is Kind.RUN_STARTED:
                history = History(self.ranks_per_host, history.epoch, history.saves, event)
            history._take(event)
        return history

    def _take(self, event: Event) -> None:
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
