"""The state of a run, and what each event means for it: pure functions.

    state = observe(state, event)

The event log alone gives the state again (`fold`), so a restarted controller goes on where the last one
stopped. Nothing here has a clock, a process or a file; times are seconds since the epoch.

A replica is in one of these states:

    PENDING    no step; one is started as soon as it is due
    PARKED     a host of it is gone and there is no spare: it waits for the host, the run goes on without it
    LAUNCHING  its step was started, its agents have not all reported
    READY      all agents wait for the word to start the ranks
    RUNNING    ranks run, none has committed a step or reported progress
    TRAINING   ranks run and have shown that they get on
    BROKEN     a rank failed; the others have not been told yet
    CLEARING   the agents end what is left of the attempt
    LOST       an agent, or the step itself, is gone; the rest of the step must go too
    FINISHED   all ranks ended well; the step is still there
    ENDING     the step is being ended; `then` says what the replica is after that
    DONE, FAILED, STOPPED     final

`TRANSITIONS` is the whole table: state x event -> next state. A pair that is not in it is late news and
changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import reduce
from typing import Any

from slurm_ft.controller import sameness, saving
from slurm_ft.controller.requests import STOP_WORDS
from slurm_ft.errors import EXIT_DONE, EXIT_LAUNCH, EXIT_TRY_AGAIN
from slurm_ft.events import Event, Kind


class State(StrEnum):
    """The states of a replica; see the module's table."""

    PENDING = "PENDING"
    PARKED = "PARKED"
    LAUNCHING = "LAUNCHING"
    READY = "READY"
    RUNNING = "RUNNING"
    TRAINING = "TRAINING"
    BROKEN = "BROKEN"
    CLEARING = "CLEARING"
    LOST = "LOST"
    FINISHED = "FINISHED"
    ENDING = "ENDING"
    DONE = "DONE"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


FINAL = frozenset({State.DONE, State.FAILED, State.STOPPED})
RANKS_RUN = frozenset({State.RUNNING, State.TRAINING})
STEP_EXISTS = frozenset(State) - FINAL - {State.PENDING, State.PARKED}

NODE_FAILURE = re.compile(r"Node failure on ([\w.-]+)")
"""srun's words for a host that Slurm has given up."""
LONG = 600.0
"""Seconds after which a program that reports nothing is taken to have got on."""

UNANSWERED_FIRST = 2.0
UNANSWERED_MOST = 30.0
"""Seconds until a launch is tried again for which Slurm gave no answer: the first time, and at most."""
REFUSALS = 12
"""After so many tries in a row that Slurm's refusal is believed."""

CHECKPOINT = "checkpoint"
"""The phase of a rank that writes one; see slurm_ft.train.progress."""

IN_PLACE = "in place"
BY_STEP = "by step"
SPARE = "spare"


@dataclass(frozen=True)
class Failure:
    """The first failure of an attempt: what people are told, not what it caused elsewhere."""

    t: float
    what: str
    host: str = ""
    rank: int | None = None
    attempt: int = 0
    log: str = ""
    traceback: str = ""
    launch: bool = False
    hung: bool = False
    unfit: bool = False


@dataclass(frozen=True)
class Replica:
    """All that is known of one replica.

    `attempt` counts the starts of its ranks and `step` those of its step, both from 1, 0 before the first.
    `agents` maps the index of each reported host to the port it offers for the next attempt.
    `restarts` keeps the time and rung of every repair. `streak` counts failures since the last progress.
    `due` is when a repair that had to wait may begin. `committed` is the newest step that this attempt committed,
    and `phases` what each of its ranks said last that it does.
    `suspects` are the hosts whose agents fell silent, or did not report when the last step was started.
    `unanswered` counts launches in a row that failed because Slurm did not answer; the next is due at `launch_at`.
    """

    id: int
    hosts: tuple[str, ...]
    ranks_per_host: int = 1
    state: State = State.PENDING
    since: float = 0.0
    attempt: int = 0
    step: int = 0
    pid: int | None = None
    agents: Mapping[int, int] = field(default_factory=dict)
    addresses: Mapping[int, str] = field(default_factory=dict)
    done_ranks: frozenset[int] = frozenset()
    then: State = State.PENDING
    restarts: tuple[tuple[float, str], ...] = ()
    streak: int = 0
    failure: Failure | None = None
    first_failure: Failure | None = None
    ever_joined: bool = False
    progressed: float = 0.0
    committed: int | None = None
    phases: Mapping[int, str] = field(default_factory=dict)
    suspects: tuple[str, ...] = ()
    due: float = 0.0
    unanswered: int = 0
    launch_at: float = 0.0
    why: str = ""

    @property
    def ranks(self) -> int:
        return len(self.hosts) * self.ranks_per_host

    @property
    def writing(self) -> bool:
        """Did a rank say that it writes a checkpoint, and not yet that it does something else?"""
        return CHECKPOINT in self.phases.values()

    @property
    def complete(self) -> bool:
        return len(self.agents) == len(self.hosts)

    def to(self, state: State, t: float, **changes: Any) -> Replica:
        return replace(self, state=state, since=t, **changes)


@dataclass(frozen=True)
class LostHost:
    """A host in whose place a spare stands: when it was lost, and why. It is not used until it works again.

    `away`: nothing was heard of it. Where a replica failed again and again on a host that answers, that it answers
    is no reason to use it again; and a program that fails everywhere would never run out of spares.
    """

    t: float
    why: str
    away: bool = True


@dataclass(frozen=True)
class RunState:
    """The state of a run, as its events tell it. `collective` means that a torchft quorum was seen.

    `save` is the one that is going on. `left` are the replicas whose ranks ended well after they were asked to
    save because the run stops: they were told to leave, and have not finished. `marks` are the last failures.
    `lost` are the hosts that were replaced or are waited for; one that has returned is a spare.
    `broken_off` is a checkpoint that was not written to its end, and since then none was: the replica that
    failed in it, and the step that it had committed.
    """

    replicas: tuple[Replica, ...] = ()
    started: float = 0.0
    stop: str = ""
    stop_code: int = EXIT_DONE
    collective: bool = False
    first_done: float | None = None
    ended: int | None = None
    spares: tuple[str, ...] = ()
    lost: Mapping[str, LostHost] = field(default_factory=dict)
    unfit: Mapping[str, str] = field(default_factory=dict)
    save: saving.Save | None = None
    left: frozenset[int] = frozenset()
    marks: tuple[sameness.Mark, ...] = ()
    broken_off: tuple[int, int] | None = None

    @property
    def running(self) -> dict[int, int]:
        """The attempts of the replicas whose ranks run."""
        return {r.id: r.attempt for r in self.replicas if r.state in RANKS_RUN}

    def with_replica(self, replica: Replica) -> RunState:
        return replace(self, replicas=tuple(replica if replica.id == r.id else r for r in self.replicas))


def _step_launched(r: Replica, e: Event) -> Replica:
    last = r.restarts[-1] if r.restarts else None
    new_host = last is not None and last[1] == SPARE and r.failure is not None and last[0] > r.failure.t
    repair = ((e.t, BY_STEP),) if r.failure and not new_host else ()
    return r.to(
        State.LAUNCHING,
        e.t,
        step=int(e.data["step"]),
        pid=e.data.get("pid"),
        agents={},
        addresses={},
        restarts=r.restarts + repair,
        phases={},
    )


def _agent_joined(r: Replica, e: Event) -> Replica:
    index = int(e.data["index"])
    r = replace(
        r,
        suspects=tuple(host for host in r.suspects if r.hosts[index : index + 1] != (host,)),
        agents={**r.agents, index: int(e.data["port"])},
        addresses={**r.addresses, index: str(e.data.get("address", ""))},
        unanswered=0,
        launch_at=0.0,
    )
    return r.to(State.READY, e.t) if r.complete else r


def _ranks_started(r: Replica, e: Event) -> Replica:
    rung = e.data.get("rung")
    return r.to(
        State.RUNNING,
        e.t,
        attempt=int(e.data["attempt"]),
        done_ranks=frozenset(),
        restarts=r.restarts + (((e.t, str(rung)),) if rung == IN_PLACE else ()),
        committed=None,
        phases={},
    )


def _progressed(r: Replica, e: Event) -> Replica:
    return r.to(State.TRAINING, e.t, streak=0, ever_joined=True, progressed=e.t)


def _failure(e: Event, launch: bool = False) -> Failure:
    data = e.data
    return Failure(
        t=e.t - float(data.get("age", 0.0)),
        what=str(data.get("what", "it ended")),
        host=str(data.get("host", "")),
        rank=data.get("rank"),
        attempt=int(data.get("attempt", 0)),
        log=str(data.get("log", "")),
        traceback=str(data.get("traceback", "")),
        launch=launch,
        hung=data.get("hung") is True,
    )


def _with_failure(r: Replica, failure: Failure) -> Replica:
    silent = r.suspects if failure.launch else ()
    if failure.launch and r.pid is not None:  # without a first process the launcher failed, and no host
        silent = tuple(host for index, host in enumerate(r.hosts) if index not in r.agents)
        if len(silent) > 1 and len(silent) == len(r.hosts):
            silent = r.suspects  # one bad host keeps the whole step from starting: which, is known before or not
    return replace(
        r,
        failure=failure,
        first_failure=r.first_failure or failure,
        streak=r.streak + 1,
        suspects=silent,
        agents={},
        phases={},
    )


def _failed(state: State) -> Any:
    """A failure that ends the attempt: the first one of it is kept."""

    def handler(r: Replica, e: Event) -> Replica:
        failed = _with_failure(r, _failure(e, launch=r.state is State.LAUNCHING)).to(state, e.t)
        ran_long = r.state in RANKS_RUN and e.t - r.since > LONG
        return replace(failed, ever_joined=failed.ever_joined or ran_long)

    return handler


def _agent_lost(r: Replica, e: Event) -> Replica:
    """An agent is silent: its host is suspect, other than when its step has ended by itself."""
    lost = r.to(State.LOST, e.t) if r.state in (State.BROKEN, State.CLEARING) else _failed(State.LOST)(r, e)
    return replace(lost, suspects=(*lost.suspects, str(e.data["host"])) if "host" in e.data else lost.suspects)


def _one_more_lost(r: Replica, e: Event) -> Replica:
    """Another agent is silent while the step is being ended for the first."""
    host = str(e.data.get("host", ""))
    known = not host or host in r.suspects or (r.state is State.ENDING and r.then is not State.PENDING)
    return r if known else replace(r, suspects=(*r.suspects, host))


def _host_unfit(r: Replica, e: Event) -> Replica:
    """A host failed its check before ranks were started there: nothing is tried again on it."""
    host = str(e.data.get("host", r.hosts[0]))
    if r.state is State.LAUNCHING:
        failure = _failure(e, launch=True)
        r = _with_failure(r, replace(failure, what=f"{host} failed its check: {failure.what}", unfit=True))
    return r.to(State.LOST, e.t, suspects=(host,))


def _rank_done(r: Replica, e: Event) -> Replica:
    done = r.done_ranks | {int(e.data["rank"])}
    r = replace(r, done_ranks=done)
    return r.to(State.FINISHED, e.t) if len(done) == r.ranks else r


def _clearing(r: Replica, e: Event) -> Replica:
    return r.to(State.CLEARING, e.t, agents={})


def _cleared_already(r: Replica, e: Event) -> Replica:
    """Our predecessor had it cleared, and died before it could write that down."""
    return _agent_cleared(_clearing(r, e), e)


def _agent_cleared(r: Replica, e: Event) -> Replica:
    r = replace(r, agents={**r.agents, int(e.data["index"]): int(e.data["port"])})
    return r.to(State.READY, e.t) if r.complete else r


def _step_ending(r: Replica, e: Event) -> Replica:
    then, why = State(e.data["then"]), str(e.data.get("why", ""))
    if r.state is State.LAUNCHING and then is State.PENDING:  # it never came up: that is a failure too
        r = _with_failure(r, Failure(t=e.t, what=why, launch=True))
    return r.to(then if r.pid is None else State.ENDING, e.t, then=then, why=why)


def _delayed(r: Replica, e: Event) -> Replica:
    return replace(r, due=float(e.data.get("until", 0.0)))


def _parked(r: Replica, e: Event) -> Replica:
    return r.to(State.PARKED, e.t, why=str(e.data.get("why", "")))


def _host_replaced(r: Replica, e: Event) -> Replica:
    """A spare stands at the bad host's place. What failed on the bad host does not count against it."""
    hosts = tuple(str(e.data["spare"]) if host == e.data["bad"] else host for host in r.hosts)
    missing = tuple(host for host in r.suspects if host != e.data["bad"])
    return replace(r, hosts=hosts, suspects=missing, streak=0, restarts=(*r.restarts, (e.t, SPARE)))


def _unparked(r: Replica, e: Event) -> Replica:
    """It goes on when none of its hosts is missing any more."""
    replaced = _host_replaced(r, e)
    return replaced if replaced.suspects else replaced.to(State.PENDING, e.t, why="")


def _launch_failed(r: Replica, e: Event) -> Replica:
    """The step left before its agents had reported. When Slurm was away it was not started at all: that is no
    failure of the replica and no repair, and the launch is tried again later, and later each time."""
    # A Slurm that has just come back does not know all of its steps yet, and refuses some.
    just_back = 0 < r.unanswered < REFUSALS and e.data.get("code") == EXIT_LAUNCH
    if not e.data.get("unanswered") and not just_back:
        return _step_gone(r, e)
    repaired = r.restarts[-1:] == ((r.since, BY_STEP),)
    wait = min(UNANSWERED_FIRST * 2.0 ** min(r.unanswered, 10), UNANSWERED_MOST)
    return r.to(
        State.PENDING,
        e.t,
        pid=None,
        agents={},
        restarts=r.restarts[:-1] if repaired else r.restarts,
        unanswered=r.unanswered + 1,
        launch_at=e.t + wait,
    )


def _step_gone(r: Replica, e: Event) -> Replica:
    """The step left without being asked. All its ranks are gone with it."""
    failed: Replica = _failed(State.PENDING)(r, e)
    return replace(failed, pid=None, suspects=tuple(dict.fromkeys((*failed.suspects, *_given_up(r, e)))))


def _given_up(r: Replica, e: Event) -> tuple[str, ...]:
    """Those of several hosts of which Slurm says that they failed. Of a single one the next try tells."""
    named = NODE_FAILURE.findall(str(e.data.get("what", "")))
    return tuple(host for host in r.hosts if host in named) if len(r.hosts) > 1 else ()


def _step_gone_after_failure(r: Replica, e: Event) -> Replica:
    return r.to(State.PENDING, e.t, pid=None, agents={})


def _step_ended(r: Replica, e: Event) -> Replica:
    return r.to(r.then, e.t, pid=None, agents={})


def _step_done(r: Replica, e: Event) -> Replica:
    return r.to(State.DONE, e.t, pid=None, agents={})


_END = {Kind.STEP_ENDING: _step_ending}

TRANSITIONS: dict[State, dict[Kind, Any]] = {
    State.PENDING: {
        Kind.STEP_LAUNCHED: _step_launched,
        Kind.HOST_REPLACED: _host_replaced,
        Kind.DELAYED: _delayed,
        Kind.PARKED: _parked,
        **_END,
    },
    State.PARKED: {Kind.HOST_REPLACED: _unparked, **_END},
    State.LAUNCHING: {
        Kind.AGENT_JOINED: _agent_joined,
        Kind.HOST_UNFIT: _host_unfit,
        Kind.AGENT_LOST: _agent_lost,
        Kind.STEP_EXITED: _launch_failed,
        **_END,
    },
    State.READY: {
        Kind.RANKS_STARTED: _ranks_started,
        Kind.DELAYED: _delayed,
        Kind.AGENT_LOST: _agent_lost,
        Kind.STEP_EXITED: _step_gone,
        **_END,
    },
    State.RUNNING: {
        Kind.PROGRESSED: _progressed,
        Kind.RANK_FAILED: _failed(State.BROKEN),
        Kind.RANK_DONE: _rank_done,
        Kind.AGENT_LOST: _agent_lost,
        Kind.STEP_EXITED: _step_gone,
        **_END,
    },
    State.TRAINING: {
        Kind.RANK_FAILED: _failed(State.BROKEN),
        Kind.RANK_DONE: _rank_done,
        Kind.AGENT_LOST: _agent_lost,
        Kind.STEP_EXITED: _step_gone,
        **_END,
    },
    State.BROKEN: {
        Kind.CLEARING: _clearing,
        Kind.AGENT_CLEARED: _cleared_already,
        Kind.AGENT_LOST: _agent_lost,
        Kind.STEP_EXITED: _step_gone_after_failure,
        **_END,
    },
    State.CLEARING: {
        Kind.AGENT_CLEARED: _agent_cleared,
        Kind.HOST_UNFIT: _host_unfit,
        Kind.AGENT_LOST: _agent_lost,
        Kind.STEP_EXITED: _step_gone_after_failure,
        **_END,
    },
    State.LOST: {Kind.STEP_EXITED: _step_gone_after_failure, Kind.AGENT_LOST: _one_more_lost, **_END},
    State.FINISHED: {Kind.STEP_EXITED: _step_done, **_END},
    State.ENDING: {
        Kind.STEP_EXITED: _step_ended,
        Kind.STEP_ENDING: _step_ending,
        Kind.AGENT_LOST: _one_more_lost,
    },
    State.DONE: {},
    State.FAILED: {},
    State.STOPPED: {},
}

_OF_AN_ATTEMPT = frozenset(
    {Kind.PROGRESSED, Kind.RANK_FAILED, Kind.RANK_DONE, Kind.AGENT_CLEARED, Kind.COMMIT, Kind.PHASE}
)
_OF_A_STEP = frozenset({Kind.AGENT_JOINED, Kind.AGENT_LOST, Kind.STEP_EXITED, Kind.HOST_UNFIT})


def _is_late(r: Replica, e: Event) -> bool:
    """Is this news of an attempt or a step that is over?"""
    if e.kind in _OF_AN_ATTEMPT and e.data.get("attempt", r.attempt) != r.attempt:
        return True
    return e.kind in _OF_A_STEP and e.data.get("step", r.step) != r.step


def observe(state: RunState, event: Event) -> RunState:
    """The state after this event. Never raises for an event that the log can hold."""
    kind, data = event.kind, event.data
    if kind is Kind.RUN_STARTED:
        return _run_started(event)
    if kind is Kind.STOP_REQUESTED:
        # Who asks for a stop means it, also while the run ends for its time limit to come back.
        again = state.stop_code == EXIT_TRY_AGAIN and data["why"] == STOP_WORDS
        return state if state.stop and not again else replace(state, stop=str(data["why"]), stop_code=int(data["code"]))
    if kind is Kind.RUN_ENDED:
        return replace(state, ended=int(data["code"]))
    if kind is Kind.QUORUM:
        return replace(state, collective=True)
    if kind is Kind.SAVE_REQUESTED:
        return replace(state, save=saving.requested(event))
    if kind in (Kind.SAVE_ASKED, Kind.SAVED):
        return replace(state, save=saving.observe(state.save, event)) if state.save else state
    if kind is Kind.SAVE_ENDED:
        return replace(state, save=None)
    if kind is Kind.HOST_RETURNED:
        return _host_returned(state, str(data.get("host", "")))
    if kind in (Kind.HOST_UNFIT, Kind.HOST_FIT):
        state = _of_a_host(state, event)
    if event.replica is None or not 0 <= event.replica < len(state.replicas):
        return state
    replica = state.replicas[event.replica]
    if _is_late(replica, event):
        return state
    if kind is Kind.AGENT_JOINED:  # it has passed its check
        state = _of_a_host(state, event)
    if kind is Kind.COMMIT:
        step = data.get("step")
        if not data.get("committed") or not isinstance(step, int):
            return state
        further = replica.committed is not None and step > replica.committed  # so it does not write any more
        phases = {} if further and replica.writing else replica.phases
        return state.with_replica(replace(replica, committed=step, phases=phases))
    if kind is Kind.PHASE:
        return _said(state, replica, int(data.get("rank", 0)), str(data.get("phase", "")))
    if kind is Kind.RANK_DONE:
        state = _said(state, replica, int(data["rank"]), "")
        replica = state.replicas[event.replica]
    handler = TRANSITIONS[replica.state].get(kind)
    if handler is None:
        return state
    after = state.with_replica(handler(replica, event))
    failed = after.replicas[event.replica].failure is not replica.failure
    stopped = kind is Kind.STEP_ENDING and replica.state in RANKS_RUN
    if (failed or stopped) and replica.writing and replica.committed is not None:
        after = replace(after, broken_off=(replica.id, replica.committed))
    if failed:
        after = replace(after, marks=(*state.marks, _mark(replica, event))[-sameness.KEPT :])
    if kind is Kind.RANK_DONE and state.stop and state.save and state.save.asked(replica.id, replica.attempt):
        return replace(after, left=state.left | {replica.id})
    if kind is Kind.HOST_REPLACED:
        why = replica.failure.what if replica.failure else ""
        about = LostHost(event.t, why, data["bad"] in replica.suspects)
        lost = {} if data["bad"] == data["spare"] else {str(data["bad"]): about}
        spares = tuple(host for host in state.spares if host != data["spare"])
        return replace(after, spares=spares, lost={**state.lost, **lost})
    if kind is Kind.PARKED:
        waited_for = {host: LostHost(event.t, str(data.get("why", ""))) for host in replica.suspects}
        return replace(after, lost={**state.lost, **waited_for})
    done = after.replicas[event.replica].state in (State.FINISHED, State.DONE)
    return replace(after, first_done=event.t) if done and after.first_done is None else after


def _said(state: RunState, before: Replica, rank: int, phase: str) -> RunState:
    """A rank says what it does; '' when it has ended well."""
    if before.state not in RANKS_RUN | {State.ENDING}:
        return state
    replica = replace(before, phases={**before.phases, rank: phase})
    written = before.writing and not replica.writing
    return replace(state.with_replica(replica), broken_off=None if written else state.broken_off)


def _mark(before: Replica, event: Event) -> sameness.Mark:
    """The mark of a failure that this event is."""
    data = event.data
    ran_long = data.get("train_step") is None and before.state in RANKS_RUN and event.t - before.since > LONG
    sign = sameness.sign(data, ran_long) if event.kind is Kind.RANK_FAILED else ""
    step = data.get("train_step")
    return sameness.Mark(event.t, before.id, str(data.get("host", "")), sign, step if isinstance(step, int) else None)


def _host_returned(state: RunState, host: str) -> RunState:
    if host not in state.lost:
        return state
    lost = {name: about for name, about in state.lost.items() if name != host}
    return replace(state, lost=lost, spares=(*state.spares, host))


def _of_a_host(state: RunState, event: Event) -> RunState:
    host = str(event.data.get("host", ""))
    others = {name: what for name, what in state.unfit.items() if name != host}
    if event.kind is Kind.HOST_UNFIT:
        others[host] = str(event.data.get("what", ""))
    return replace(state, unfit=others)


def _run_started(event: Event) -> RunState:
    data = event.data
    return RunState(
        started=event.t,
        spares=tuple(data.get("spares", ())),
        replicas=tuple(
            Replica(
                id=i,
                hosts=tuple(hosts),
                ranks_per_host=int(data["ranks_per_host"]),
                since=event.t,
                # A run that was requeued goes on counting, so that no attempt's files are overwritten.
                attempt=int(data.get("attempts", {}).get(str(i), 0)),
                step=int(data.get("steps", {}).get(str(i), 0)),
            )
            for i, hosts in enumerate(data["replicas"])
        ),
    )


def fold(events: Iterable[Event]) -> RunState:
    """The state of a run from its log."""
    return reduce(observe, events, RunState())
