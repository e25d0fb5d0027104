"""Incidents: one failure of one replica, and how long each part of its repair took.

An incident begins where the controller's own `observe` counts a failure, so there is one for each repair and
none for ranks that were stopped on purpose. Times are seconds after the failure itself, which lies `age`
before the moment the controller learnt of it. Only what was measured is there: a script that never uses
torchft has no quorum to join and no step to commit, and is well again with its first progress.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slurm_ft.controller.state import BY_STEP, FINAL, IN_PLACE, SPARE, Replica, RunState, State
from slurm_ft.events import Event, Kind
from slurm_ft.observe.words import state_words

if TYPE_CHECKING:
    from slurm_ft.observe.ledger import Commit

HEAD = -1
"""Stands for a replica's number in the incident of a head that was lost."""

OF_A_HEAD = ("head", "controller", "adopted")
STAGES = ("detected", *OF_A_HEAD, "relaunched", "imported", "joined", "healed", "committed", "progressed")
"""The parts of a repair, in their order. Those of a lost head: another one is there, its controller writes, all
agents obey it; then the first commit counts. `progressed` stands in for `committed` where nothing commits."""

STRUCK_SECONDS = 600.0
"""A failure this soon after a fault on purpose is taken for its effect."""

REMEMBERED = 20_000
"""Commits that are kept for a failure that shows late: of 8 replicas with 8 a second each, those of five minutes."""


@dataclass
class Incident:
    """One failure. `stages` holds seconds since `failed`; `outcome` is a word of OUTCOMES."""

    replica: int
    attempt: int
    failed: float
    what: str
    cause: str
    rank: int | None = None
    host: str = ""
    injected: bool = False
    log: str = ""
    traceback: str = ""
    stages: dict[str, float] = field(default_factory=dict)
    relaunched_attempt: int | None = None
    rung: str = ""
    outcome: str = "open"
    why: str = ""
    source: str = ""
    """Where the restarted ranks got their state: live, snapshot, peer or disk. Empty when they did not say."""
    source_step: int | None = None
    survivor_commits: int = 0
    survivor_lost: dict[int, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The replica and, where one rank failed, that rank: `2-0`."""
        if self.replica == HEAD:
            return "head"
        return str(self.replica) if self.rank is None else f"{self.replica}-{self.rank}"

    @property
    def state_words(self) -> str:
        """Where its state came from, in words; empty when that was not said."""
        return state_words({"source": self.source, "source_step": self.source_step}) if self.source else ""

    @property
    def lost(self) -> int:
        """The most training steps that any one survivor had to throw away."""
        return max(self.survivor_lost.values(), default=0)

    def mark(self, stage: str, t: float) -> None:
        self.stages.setdefault(stage, max(0.0, t - self.failed))

    def survived(self, commit: Commit) -> None:
        """Count what another replica did after the failure."""
        if commit.replica == self.replica or commit.t < self.failed:
            return
        lost = self.survivor_lost.get(commit.replica, 0) - (commit.lost if commit.again else 0)
        if commit.committed:
            self.survivor_commits += 1
        else:
            lost += commit.lost
        self.survivor_lost[commit.replica] = max(0, lost)


OUTCOMES = {
    "open": "not repaired yet",
    "healed": "repaired",
    "failed again": "failed again before it got on",
    "given up": "given up",
    "stopped": "stopped before it was repaired",
    "finished": "finished by its peers",
    "interrupted": "cut short: the job ended",
}


class IncidentBook:
    """All incidents of a run, in the order of their failures. Fed by the ledger, one event at a time."""

    def __init__(self) -> None:
        self.all: list[Incident] = []
        self._open: dict[int, Incident] = {}
        self._recent: deque[Commit] = deque(maxlen=REMEMBERED)
        self._collective = False
        self._struck: dict[int, float] = {}

    def add(self, before: RunState, event: Event, after: RunState, t: float, commit: Commit | None) -> None:
        """Take in an event that happened at `t` and led from one state to the other."""
        self._collective = after.collective
        if commit is not None:
            self._recent.append(commit)
            for open_one in self._open.values():
                open_one.survived(commit)
        if event.kind is Kind.RUN_ENDED:
            self._run_ended(event)
        self._follow_head(event, t, commit)
        if event.replica is None or not 0 <= event.replica < len(before.replicas):
            return
        incident = self._open.get(event.replica)
        if incident is not None:
            self._advance(incident, event, t, commit)
        if event.kind is Kind.INJECTED and not event.data.get("error"):
            self._struck[event.replica] = t
        was, now = before.replicas[event.replica], after.replicas[event.replica]
        if now.failure is not None and now.failure is not was.failure:
            self._begin(event, now)
        elif now.state in FINAL and was.state not in FINAL:
            self._close(event.replica, *_how_it_ended(now))

    def _follow_head(self, event: Event, t: float, commit: Commit | None) -> None:
        """The incident of a head that was lost: it begins when its successor's controller says so."""
        data, silence = event.data, number_of(event.data.get("silence"))
        if event.kind is Kind.HEAD_STARTED and silence:
            self._close(HEAD, "failed again", "")
            host = str(data.get("before", ""))
            incident = Incident(
                HEAD, event.epoch, t - silence, f"the head host {host} was lost", "head lost", host=host
            )
            incident.rung = f"to {data.get('host', '?')}"
            incident.mark("detected", t)
            incident.mark("head", t + number_of(data.get("up")))
            incident.mark("controller", event.t)
            self._open_now(incident)
        open_one = self._open.get(HEAD)
        if open_one is None:
            return
        if event.kind is Kind.ADOPTED:
            open_one.mark("adopted", event.t)
        elif commit is not None and commit.committed:
            open_one.mark("committed", t)
        elif event.kind is Kind.PROGRESS and not self._collective:
            open_one.mark("progressed", event.t)
        if "adopted" in open_one.stages and open_one.stages.keys() & {"committed", "progressed"}:
            self._close(HEAD, "healed", "")

    def session_ended(self, t: float) -> None:
        """A new session begins: what was open in the last one was cut short."""
        for replica in list(self._open):
            self._close(replica, "interrupted", "")
        self._recent.clear()

    def _begin(self, event: Event, replica: Replica) -> None:
        self._close(replica.id, "failed again", "")
        failure = replica.failure
        assert failure is not None
        incident = Incident(
            replica=replica.id,
            attempt=replica.attempt,
            failed=failure.t,
            what=failure.what,
            cause=_cause(event),
            rank=failure.rank if event.kind is Kind.RANK_FAILED else None,
            host=failure.host,
            injected=event.data.get("injected") is True or self._was_struck(replica.id, event.t),
            log=failure.log,
            traceback=failure.traceback,
        )
        incident.mark("detected", event.t)
        self._open_now(incident)

    def _open_now(self, incident: Incident) -> None:
        """A hang shows minutes after it began: what the others did meanwhile is part of the incident."""
        self.all.append(incident)
        self._open[incident.replica] = incident
        for commit in self._recent:
            incident.survived(commit)

    def _was_struck(self, replica: int, t: float) -> bool:
        """Was it hurt on purpose, and this is the first failure since? A hang shows late."""
        return t - self._struck.pop(replica, -math.inf) < STRUCK_SECONDS

    def _close(self, replica: int, outcome: str, why: str) -> None:
        incident = self._open.pop(replica, None)
        if incident is not None:
            incident.outcome, incident.why = outcome, why

    def _run_ended(self, event: Event) -> None:
        head = self._open.get(HEAD)
        if head is not None and "adopted" in head.stages:
            self._close(HEAD, "healed", "")  # nothing was committed after it, or nothing ever is
        for replica in list(self._open):
            self._close(replica, "interrupted", str(event.data.get("why", "")))

    def _advance(self, incident: Incident, event: Event, t: float, commit: Commit | None) -> None:
        kind, data = event.kind, event.data
        if kind is Kind.HOST_REPLACED:
            incident.rung = SPARE if data.get("bad") != data.get("spare") else ""  # its own host is back
        elif kind is Kind.STEP_LAUNCHED:
            incident.rung = SPARE if incident.rung == SPARE else BY_STEP
        elif kind is Kind.RANKS_STARTED and incident.relaunched_attempt is None:
            incident.relaunched_attempt = data.get("attempt")
            incident.rung = incident.rung or (IN_PLACE if data.get("rung") == IN_PLACE else "")
            incident.mark("relaunched", t)
        if incident.relaunched_attempt is None or data.get("attempt") != incident.relaunched_attempt:
            return
        if kind is Kind.PHASE and data.get("phase") in ("imported", "joined", "healed"):
            incident.mark(str(data["phase"]), t)
            if data.get("source"):  # the last word counts: a kept state that peers have passed is healed once more
                incident.source, incident.source_step = str(data["source"]), data.get("source_step")
        elif kind is Kind.QUORUM:
            incident.mark("joined", t)
        elif commit is not None and commit.committed:
            self._healed(incident, "committed", t)
        elif kind is Kind.PROGRESSED:
            self._progressed(incident, t)

    def _progressed(self, incident: Incident, t: float) -> None:
        """Without a quorum there will be no commit: the first progress is the end of the repair."""
        incident.mark("progressed", t)
        if "joined" not in incident.stages:
            self._healed(incident, "progressed", t)

    def _healed(self, incident: Incident, stage: str, t: float) -> None:
        incident.mark(stage, t)
        self._close(incident.replica, "healed", "")


def number_of(value: Any) -> float:
    """A number of an event, 0 where it is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value == value else 0.0


def _how_it_ended(replica: Replica) -> tuple[str, str]:
    if replica.state is State.FAILED:
        return "given up", replica.why
    if replica.state is State.DONE:
        return "healed", ""
    return ("finished" if "peers" in replica.why else "stopped"), replica.why


def _cause(event: Event) -> str:
    """Two or three words: the signal, the exit code, or what was lost."""
    data: Any = event.data
    if event.kind is Kind.AGENT_LOST:
        return "agent lost"
    if event.kind is Kind.STEP_EXITED:
        return "step ended"
    if event.kind is Kind.STEP_ENDING:
        return "no start"
    if data.get("hung"):
        return "hang"
    if data.get("oom"):
        return "out of memory"
    if data.get("signal"):
        return str(data["signal"])
    return "failed" if data.get("code") is None else f"exit {data['code']}"
