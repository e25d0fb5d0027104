"""How far each agent's news has come: the other end of slurm_ft/agent/outbox.py. Pure.

An agent is one host of one step of a replica. What counts is what the log holds: a controller that takes over
learns from it which numbers it has.
"""

from __future__ import annotations

from enum import Enum

from slurm_ft.events import Event, Kind

Who = tuple[int, int, int]
"""Replica, step, index of the host."""


class Verdict(Enum):
    """What a number says of its message."""

    NEXT = "next"
    KNOWN = "known"
    GAP = "gap"


class Deliveries:
    """The number of the last news of each agent."""

    def __init__(self, ranks_per_host: int) -> None:
        self._ranks_per_host = ranks_per_host
        self._last: dict[Who, int] = {}
        self._steps: dict[int, int] = {}  # of each replica, as far as it was replayed

    def replay(self, event: Event) -> None:
        """Take in what an earlier controller has written."""
        replica, data = event.replica, event.data
        if replica is None:
            return
        if event.kind is Kind.STEP_LAUNCHED:
            self._steps[replica] = int(data["step"])
        elif "n" in data:
            index = int(data["index"]) if "index" in data else int(data["rank"]) // self._ranks_per_host
            who = (replica, self._steps.get(replica, 0), index)
            self._last[who] = max(self.last(who), int(data["n"]))

    def begins(self, who: Who, first: int) -> None:
        """The agent can tell again what it has told from number `first` on; what came before counts as told."""
        self._last[who] = max(self.last(who), first - 1)

    def last(self, who: Who) -> int:
        return self._last.get(who, 0)

    def take(self, who: Who, n: int) -> Verdict:
        """A message with this number has come. The next one is taken as written down."""
        last = self.last(who)
        if n != last + 1:
            return Verdict.KNOWN if n <= last else Verdict.GAP
        self._last[who] = n
        return Verdict.NEXT
