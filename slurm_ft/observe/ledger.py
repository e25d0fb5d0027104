"""The ledger of a run: what its events say about every session, attempt and step tried.

`Ledger.add` takes one event after the other; everything that is shown about a run is computed from the ledger
they leave. States come from the controller's own `observe`, so that a reader and the controller never
disagree. An event with missing or odd fields is passed over: a reader must not fail because a line is damaged
or because a newer slurm-ft wrote it.

A run that was requeued has several sessions, each begun by its `run_started`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_ft.controller.fold import observe
from slurm_ft.controller.state import RANKS_RUN, RunState, State
from slurm_ft.events import Event, Kind
from slurm_ft.observe.incidents import IncidentBook


def number(data: Mapping[str, Any], name: str) -> float | None:
    """A number in an event, or None when it is missing or something else (NaN counts as something else)."""
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return None
    return value


def measured(data: Mapping[str, Any], name: str) -> float | None:
    """A measured value, which may well be NaN or infinite: a person must see that a loss is."""
    value = data.get(name)
    return None if isinstance(value, bool) or not isinstance(value, int | float) else float(value)


def whole(data: Mapping[str, Any], name: str) -> int | None:
    value = number(data, name)
    return None if value is None or abs(value) == float("inf") else int(value)


def happened(event: Event) -> float:
    """When it happened where it happened: the controller learnt it `age` seconds later."""
    return event.t - max(0.0, number(event.data, "age") or 0.0)


def _changes_nothing(state: RunState, event: Event) -> bool:
    """Does `observe` leave the state as it is? Asked first, since nearly all of a long log is of this kind."""
    return event.kind is Kind.PROGRESS or (event.kind is Kind.QUORUM and state.collective)


@dataclass(frozen=True)
class Commit:
    """One step that torchft tried to commit, as one replica saw it. `again`: the work of the one before, which was
    not committed, once more."""

    t: float
    replica: int
    step: int
    committed: bool
    train_step: int | None
    lost: int
    again: bool = False


@dataclass
class Attempt:
    """One start of a replica's ranks. `first` and `newest` are its first and newest signs of progress, `end` is
    when it failed or ended."""

    replica: int
    number: int
    started: float
    rung: str = ""
    first: float | None = None
    newest: float | None = None
    end: float | None = None
    ended_well: bool = False
    commits: list[Commit] = field(default_factory=list)
    samples: list[tuple[float, int]] = field(default_factory=list)

    def saw_progress(self, t: float) -> None:
        self.first = t if self.first is None else min(self.first, t)
        self.newest = t if self.newest is None else max(self.newest, t)


@dataclass
class Session:
    """One Slurm job's share of a run. `last` is the time of its newest event."""

    started: float
    last: float
    replicas: int
    attempts: dict[tuple[int, int], Attempt] = field(default_factory=dict)
    ended: float | None = None
    code: int | None = None

    @property
    def first_progress(self) -> float | None:
        return min((a.first for a in self.attempts.values() if a.first is not None), default=None)

    @property
    def last_progress(self) -> float | None:
        return max((a.newest for a in self.attempts.values() if a.newest is not None), default=None)


@dataclass
class Facts:
    """What a replica said of itself in this session."""

    step: int | None = None
    loss: float | None = None
    phase: str = ""
    quorum_id: int | None = None
    committed: set[int] = field(default_factory=set)
    timeouts: dict[str, float] = field(default_factory=dict)


class Ledger:
    """Everything the events of a run tell, and the state that they lead to."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.state = RunState()
        self.about: dict[str, Any] = {}
        self.began: float | None = None
        self.last: float | None = None
        self.end_reason = ""
        self.sessions: list[Session] = []
        self.facts: dict[int, Facts] = {}
        self.tokens: dict[int, int] = {}
        self.incidents = IncidentBook()
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        before = self.state
        try:
            self.state = before if _changes_nothing(before, event) else observe(before, event)
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError):
            return
        self.last = event.t if self.last is None else max(self.last, event.t)
        if event.kind is Kind.RUN_STARTED:
            self._new_session(event)
        elif event.kind is Kind.HEAD_STARTED and self.sessions:
            self.about["head_host"] = event.data.get("host", "")
        elif event.kind is Kind.RUN_ENDED:
            self.end_reason = str(event.data.get("why", ""))
        if self.sessions:
            self._note(before, event)

    def _new_session(self, event: Event) -> None:
        self.incidents.session_ended(event.t)
        self.began = event.t if self.began is None else self.began
        self.about = dict(event.data)
        self.end_reason = ""
        self.sessions.append(Session(event.t, event.t, len(self.state.replicas)))
        self.facts = {replica.id: Facts() for replica in self.state.replicas}

    def _note(self, before: RunState, event: Event) -> None:
        session = self.sessions[-1]
        session.last = max(session.last, event.t)
        if event.kind is Kind.RUN_ENDED:
            session.ended, session.code = event.t, self.state.ended
        commit = self._note_replica(session, before, event) if event.replica in self.facts else None
        self.incidents.add(before, event, self.state, happened(event), commit)

    def _note_replica(self, session: Session, before: RunState, event: Event) -> Commit | None:
        assert event.replica is not None
        facts, data, kind = self.facts[event.replica], event.data, event.kind
        attempt = self._attempt(session, event)
        if kind is Kind.PHASE:
            facts.phase = str(data.get("phase", ""))
        elif kind is Kind.QUORUM:
            facts.quorum_id = whole(data, "quorum_id")
        elif kind is Kind.MEMBER:
            told = data.get("timeouts")
            facts.timeouts = (
                {n: v for n in told if (v := number(told, n)) is not None} if isinstance(told, dict) else {}
            )
        elif kind is Kind.PROGRESSED and attempt:
            attempt.saw_progress(happened(event))
        elif kind is Kind.PROGRESS:
            self._progress(facts, attempt, event)
        elif kind is Kind.COMMIT:
            return self._commit(facts, attempt, event)
        self._end_attempt(session, before, event)
        return None

    def _attempt(self, session: Session, event: Event) -> Attempt | None:
        """The attempt that an event speaks of; `ranks_started` begins it."""
        assert event.replica is not None
        which = whole(event.data, "attempt")
        if which is None:
            return None
        key = (event.replica, which)
        if event.kind is Kind.RANKS_STARTED and key not in session.attempts:
            session.attempts[key] = Attempt(event.replica, which, event.t, str(event.data.get("rung", "")))
        return session.attempts.get(key)

    def _progress(self, facts: Facts, attempt: Attempt | None, event: Event) -> None:
        self._measured(facts, event, whole(event.data, "step"))
        if attempt is not None:
            attempt.saw_progress(happened(event))
            if (step := whole(event.data, "step")) is not None:
                attempt.samples.append((happened(event), step))

    def _measured(self, facts: Facts, event: Event, step: int | None) -> None:
        """Keep what a replica measured: its training step, loss and tokens."""
        assert event.replica is not None
        facts.step = facts.step if step is None else step
        loss = measured(event.data, "loss")
        facts.loss = facts.loss if loss is None else loss
        tokens = whole(event.data, "tokens") or 0
        self.tokens[event.replica] = max(tokens, self.tokens.get(event.replica, 0))

    def _commit(self, facts: Facts, attempt: Attempt | None, event: Event) -> Commit:
        assert event.replica is not None
        data = event.data
        commit = Commit(
            t=happened(event),
            replica=event.replica,
            step=whole(data, "step") or 0,
            committed=data.get("committed") is True,
            train_step=whole(data, "train_step"),
            lost=max(0, whole(data, "lost") or 0),
            again=data.get("again") is True,
        )
        self._measured(facts, event, commit.train_step)
        if commit.committed:
            facts.committed.add(commit.step)
        if attempt is not None:
            attempt.saw_progress(commit.t)
            attempt.commits.append(commit)
        return commit

    def _end_attempt(self, session: Session, before: RunState, event: Event) -> None:
        """An attempt ends when its replica stops running ranks, however that came."""
        assert event.replica is not None
        was, now = before.replicas[event.replica], self.state.replicas[event.replica]
        if was.state in RANKS_RUN and now.state not in RANKS_RUN:
            attempt = session.attempts.get((was.id, was.attempt))
            if attempt is not None and attempt.end is None:
                attempt.end = happened(event)
                attempt.ended_well = now.state is State.FINISHED
