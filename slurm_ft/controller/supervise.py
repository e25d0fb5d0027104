"""What to do when something breaks: pure functions over the state of a run.

    state = observe(state, event)                     what an event means
    actions, reasons = decide(now, state, policy)     what to do now, and why

Nothing here has a clock, a process or a file; time is an argument, in seconds since the epoch. `decide`
looks at the whole state each time and asks for whatever is missing, so it does not matter which event woke
it up. The loop carries an action out and records it as an event, which `observe` then takes in like any
other. So the event log alone gives the state again, and a restarted controller goes on where the last one
stopped.

A replica is in one of these states:

    PENDING    no step; one is started as soon as it is due
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
changes nothing. Repairs climb a ladder: in place (READY again, no Slurm call), then by step (PENDING again,
on the same hosts), each with a budget; then on a spare in the place of the bad host, as long as there are
spares; then the replica is given up, and the run goes on while `min_replicas` are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import reduce
from typing import Any

from slurm_ft.errors import EXIT_DONE, EXIT_FAILED, EXIT_LAUNCH, EXIT_PERMANENT
from slurm_ft.events import Event, Kind
from slurm_ft.spec import Budget, Policy


class State(StrEnum):
    """The states of a replica; see the module's table."""

    PENDING = "PENDING"
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
STEP_EXISTS = frozenset(State) - FINAL - {State.PENDING}

LONG = 600.0
"""Seconds after which a program that reports nothing is taken to have got on."""

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


@dataclass(frozen=True)
class Replica:
    """All that is known of one replica.

    `attempt` counts the starts of its ranks and `step` those of its step, both from 1, 0 before the first.
    `agents` maps the index of each reported host to the port it offers for the next attempt.
    `restarts` keeps the time and rung of every repair. `streak` counts failures since the last progress.
    `suspects` are the hosts whose agents fell silent, or did not report when the last step was started.
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
    committed: bool = False
    suspects: tuple[str, ...] = ()
    why: str = ""

    @property
    def ranks(self) -> int:
        return len(self.hosts) * self.ranks_per_host

    @property
    def complete(self) -> bool:
        return len(self.agents) == len(self.hosts)

    def to(self, state: State, t: float, **changes: Any) -> Replica:
        return replace(self, state=state, since=t, **changes)


@dataclass(frozen=True)
class RunState:
    """The state of a run, as its events tell it. `collective` means that a torchft quorum was seen."""

    replicas: tuple[Replica, ...] = ()
    started: float = 0.0
    stop: str = ""
    stop_code: int = EXIT_DONE
    collective: bool = False
    first_done: float | None = None
    ended: int | None = None
    spares: tuple[str, ...] = ()

    def with_replica(self, replica: Replica) -> RunState:
        return replace(self, replicas=tuple(replica if replica.id == r.id else r for r in self.replicas))


# --- what an event means -------------------------------------------------------------------------------


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
        suspects=(),
        restarts=r.restarts + repair,
    )


def _agent_joined(r: Replica, e: Event) -> Replica:
    index = int(e.data["index"])
    r = replace(
        r,
        agents={**r.agents, index: int(e.data["port"])},
        addresses={**r.addresses, index: str(e.data.get("address", ""))},
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
        committed=False,
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
    silent: tuple[str, ...] = ()
    if failure.launch and r.pid is not None:  # without a first process the launcher failed, and no host
        silent = tuple(host for index, host in enumerate(r.hosts) if index not in r.agents)
        if len(silent) > 1 and len(silent) == len(r.hosts):
            silent = ()  # one bad host keeps the whole step from starting, and nobody knows which
    return replace(
        r,
        failure=failure,
        first_failure=r.first_failure or failure,
        streak=r.streak + 1,
        suspects=silent,
        agents={},
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


def _rank_done(r: Replica, e: Event) -> Replica:
    done = r.done_ranks | {int(e.data["rank"])}
    r = replace(r, done_ranks=done)
    return r.to(State.FINISHED, e.t) if len(done) == r.ranks else r


def _clearing(r: Replica, e: Event) -> Replica:
    return r.to(State.CLEARING, e.t, agents={})


def _agent_cleared(r: Replica, e: Event) -> Replica:
    r = replace(r, agents={**r.agents, int(e.data["index"]): int(e.data["port"])})
    return r.to(State.READY, e.t) if r.complete else r


def _step_ending(r: Replica, e: Event) -> Replica:
    then, why = State(e.data["then"]), str(e.data.get("why", ""))
    if r.state is State.LAUNCHING and then is State.PENDING:  # it never came up: that is a failure too
        r = _with_failure(r, Failure(t=e.t, what=why, launch=True))
    return r.to(then if r.pid is None else State.ENDING, e.t, then=then, why=why)


def _host_replaced(r: Replica, e: Event) -> Replica:
    """A spare stands at the bad host's place. What failed on the bad host does not count against it."""
    hosts = tuple(str(e.data["spare"]) if host == e.data["bad"] else host for host in r.hosts)
    return replace(r, hosts=hosts, suspects=(), streak=0, restarts=(*r.restarts, (e.t, SPARE)))


def _step_gone(r: Replica, e: Event) -> Replica:
    """The step left without being asked. All its ranks are gone with it."""
    failed: Replica = _failed(State.PENDING)(r, e)
    return replace(failed, pid=None)


def _step_gone_after_failure(r: Replica, e: Event) -> Replica:
    return r.to(State.PENDING, e.t, pid=None, agents={})


def _step_ended(r: Replica, e: Event) -> Replica:
    return r.to(r.then, e.t, pid=None, agents={})


def _step_done(r: Replica, e: Event) -> Replica:
    return r.to(State.DONE, e.t, pid=None, agents={})


_END = {Kind.STEP_ENDING: _step_ending}

TRANSITIONS: dict[State, dict[Kind, Any]] = {
    State.PENDING: {Kind.STEP_LAUNCHED: _step_launched, Kind.HOST_REPLACED: _host_replaced, **_END},
    State.LAUNCHING: {
        Kind.AGENT_JOINED: _agent_joined,
        Kind.AGENT_LOST: _agent_lost,
        Kind.STEP_EXITED: _step_gone,
        **_END,
    },
    State.READY: {
        Kind.RANKS_STARTED: _ranks_started,
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
        Kind.AGENT_LOST: _agent_lost,
        Kind.STEP_EXITED: _step_gone_after_failure,
        **_END,
    },
    State.CLEARING: {
        Kind.AGENT_CLEARED: _agent_cleared,
        Kind.AGENT_LOST: _agent_lost,
        Kind.STEP_EXITED: _step_gone_after_failure,
        **_END,
    },
    State.LOST: {Kind.STEP_EXITED: _step_gone_after_failure, **_END},
    State.FINISHED: {Kind.STEP_EXITED: _step_done, **_END},
    State.ENDING: {Kind.STEP_EXITED: _step_ended, Kind.STEP_ENDING: _step_ending},
    State.DONE: {},
    State.FAILED: {},
    State.STOPPED: {},
}

_OF_AN_ATTEMPT = frozenset({Kind.PROGRESSED, Kind.RANK_FAILED, Kind.RANK_DONE, Kind.AGENT_CLEARED, Kind.COMMIT})
_OF_A_STEP = frozenset({Kind.AGENT_JOINED, Kind.AGENT_LOST, Kind.STEP_EXITED})


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
        return state if state.stop else replace(state, stop=str(data["why"]), stop_code=int(data["code"]))
    if kind is Kind.RUN_ENDED:
        return replace(state, ended=int(data["code"]))
    if kind is Kind.QUORUM:
        return replace(state, collective=True)
    if event.replica is None or not 0 <= event.replica < len(state.replicas):
        return state
    replica = state.replicas[event.replica]
    if _is_late(replica, event):
        return state
    if kind is Kind.COMMIT:
        return state.with_replica(replace(replica, committed=True)) if data.get("committed") else state
    handler = TRANSITIONS[replica.state].get(kind)
    if handler is None:
        return state
    after = state.with_replica(handler(replica, event))
    if kind is Kind.HOST_REPLACED:
        return replace(after, spares=tuple(host for host in state.spares if host != data["spare"]))
    done = after.replicas[event.replica].state in (State.FINISHED, State.DONE)
    return replace(after, first_done=event.t) if done and after.first_done is None else after


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


# --- what to do ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LaunchStep:
    """Start the replica's step: one agent on each of its hosts."""

    replica: int


@dataclass(frozen=True)
class TakeSpare:
    """Put a spare in the place of a bad host of the replica, which has no step now."""

    replica: int
    bad: str
    spare: str


@dataclass(frozen=True)
class StartRanks:
    """Tell the replica's agents to start its ranks. `rung` is IN_PLACE for a repair on rung 1, else ''."""

    replica: int
    attempt: int
    rung: str


@dataclass(frozen=True)
class ClearRanks:
    """Tell the replica's agents to end what is left of its ranks."""

    replica: int


@dataclass(frozen=True)
class EndStep:
    """End the replica's step: ranks first (TERM, `grace` seconds, KILL), then agents, then the step."""

    replica: int
    then: State
    why: str
    grace: float


@dataclass(frozen=True)
class EndRun:
    """All is over: leave with this exit code."""

    code: int
    why: str


Action = LaunchStep | TakeSpare | StartRanks | ClearRanks | EndStep | EndRun
Choice = tuple[Action | None, str]


def used(replica: Replica, rung: str, budget: Budget, now: float) -> int:
    """How many repairs of this rung count, since the replica has its present hosts: those within the budget's
    time, and all since it last made progress, or one that fails slowly would be repaired for ever."""
    present = max((t for t, name in replica.restarts if name == SPARE), default=float("-inf"))
    times = [t for t, name in replica.restarts if name == rung and t >= present]
    return sum(1 for t in times if now - t < budget.seconds or t > replica.progressed)


def due(replica: Replica, policy: Policy) -> float:
    """When the repair of a replica may begin: at once after its first failure, later with each one that
    follows without progress in between."""
    if replica.streak <= 1 or replica.failure is None:
        return replica.since
    doublings = min(replica.streak - 2, 60)  # more would overflow a float
    return max(replica.since, replica.failure.t + min(policy.backoff * 2.0**doublings, policy.backoff_max))


def decide(now: float, state: RunState, policy: Policy) -> tuple[list[Action], dict[int, str]]:
    """What to do now, and for each replica one sentence that says why it is where it is."""
    reasons: dict[int, str] = {}
    if state.ended is not None or not state.replicas:
        return [], reasons
    doomed = _doom(state, policy)
    actions: list[Action] = []
    spares = state.spares
    for replica in state.replicas:
        action, reasons[replica.id] = _choose(now, replica, replace(state, spares=spares), policy, doomed)
        if action is not None:
            actions.append(action)
        if isinstance(action, TakeSpare):
            spares = spares[1:]
    if all(r.state in FINAL for r in state.replicas):
        actions.append(_verdict(state))
    return actions, reasons


def _doom(state: RunState, policy: Policy) -> str:
    """Why the run cannot go on, or ''."""
    if state.stop:
        return state.stop
    failed = [r.id for r in state.replicas if r.state is State.FAILED or r.then is State.FAILED]
    left = len(state.replicas) - len(failed)
    if failed and left < policy.min_replicas:
        return f"only {left} of {len(state.replicas)} replicas are left and --min-replicas is {policy.min_replicas}"
    return ""


def _choose(now: float, r: Replica, state: RunState, policy: Policy, doomed: str) -> Choice:
    if r.state in FINAL:
        return None, r.why or _final_reason(r)
    if r.state is State.ENDING:
        return None, f"its step is being ended: {r.why}"
    if r.state is State.FINISHED:
        return EndStep(r.id, State.DONE, "all its ranks ended well", policy.stop_grace), "all its ranks ended well"
    late = doomed or _left_behind(now, r, state, policy)
    if late:
        grace = policy.stop_grace if r.state in RANKS_RUN else policy.kill_grace
        return EndStep(r.id, State.STOPPED, late, grace), late
    return _BY_STATE[r.state](now, r, policy, state.spares)


def _left_behind(now: float, r: Replica, state: RunState, policy: Policy) -> str:
    """Why a replica need not be repaired or waited for, now that others have finished; or ''.

    In a torchft run all replicas train one model. When one of them is done, the training is; a replica
    that starts again would find no peer to heal from and would train from nothing.
    """
    if not state.collective or state.first_done is None:
        return ""
    if r.state in RANKS_RUN and r.committed:
        return ""  # it has a part in what was finished, and may be writing it down
    if r.state not in RANKS_RUN or r.attempt > 1:
        return "the training was finished by its peers"
    if now - state.first_done >= policy.finish_grace:
        return f"its peers finished the training {policy.finish_grace:g} s ago"
    return ""


def _final_reason(r: Replica) -> str:
    return "all its ranks ended well" if r.state is State.DONE else "it was stopped"


def _pending(now: float, r: Replica, policy: Policy, spares: Sequence[str]) -> Choice:
    if r.failure is None:
        return LaunchStep(r.id), "its step is being started"
    return _repair_by_step(now, r, policy, spares)


def _repair_by_step(now: float, r: Replica, policy: Policy, spares: Sequence[str]) -> Choice:
    """Rungs 2 and 3, from any state: end the step if there is one, start it again when it is due, on a spare
    if a host is bad; or give up."""
    count, limit = used(r, BY_STEP, policy.step, now), policy.step.restarts
    what = r.failure.what if r.failure else "its step is gone"
    bad = _bad_host(r, count, count >= limit) if spares else ""
    if count >= limit and not bad:
        why = f"{what}; {len(r.restarts)} restarts are used up"
        return EndStep(r.id, State.FAILED, why, policy.kill_grace), why
    if r.state is not State.PENDING:
        return EndStep(r.id, State.PENDING, what, policy.kill_grace), f"{what}; its step is started again"
    if bad:
        return TakeSpare(r.id, bad, spares[0]), f"{what}; the spare {spares[0]} takes the place of {bad}"
    wait = due(r, policy) - now
    if wait > 0:
        return None, f"{what}; its step is started again in {wait:.1f} s ({count} of {limit} step restarts used)"
    return LaunchStep(r.id), f"{what}; its step is started again ({count} of {limit} step restarts used)"


def _bad_host(r: Replica, count: int, used_up: bool) -> str:
    """The host that a spare should replace, or ''. `count` step restarts have been used on the present hosts.

    One whose agent fell silent, or did not come up a second time: a busy Slurm may refuse a step once. Or,
    when the restarts are used up, the one on which the replica failed last; a program that has never got on
    anywhere fails on every host, and takes no spare.
    """
    if r.suspects and (count or used_up or not (r.failure and r.failure.launch)):
        return r.suspects[0]
    host = r.failure.host if r.failure else ""
    return host if used_up and r.ever_joined and host in r.hosts else ""


def _launching(now: float, r: Replica, policy: Policy, spares: Sequence[str]) -> Choice:
    missing = len(r.hosts) - len(r.agents)
    if now - r.since < policy.launch_timeout:
        return None, f"its step was started, {missing} of {len(r.hosts)} agents have not reported"
    why = f"{missing} agents did not report within {policy.launch_timeout:g} s"
    return EndStep(r.id, State.PENDING, why, policy.kill_grace), why


def _ready(now: float, r: Replica, policy: Policy, spares: Sequence[str]) -> Choice:
    if r.failure is None or r.failure.attempt != r.attempt or r.attempt == 0:
        return StartRanks(r.id, r.attempt + 1, ""), "its ranks are being started"
    if r.restarts and r.restarts[-1][1] != IN_PLACE and r.restarts[-1][0] > r.failure.t:
        return StartRanks(r.id, r.attempt + 1, ""), "its ranks are being started in a new step"
    count, limit = used(r, IN_PLACE, policy.in_place, now), policy.in_place.restarts
    if count >= limit:
        return _repair_by_step(now, r, policy, spares)
    wait = due(r, policy) - now
    if wait > 0:
        return None, f"{r.failure.what}; restarted in place in {wait:.1f} s ({count} of {limit} used)"
    return StartRanks(r.id, r.attempt + 1, IN_PLACE), f"{r.failure.what}; restarted in place"


def _running(now: float, r: Replica, policy: Policy, spares: Sequence[str]) -> Choice:
    return None, f"its ranks run since {now - r.since:.0f} s and have reported no progress yet"


def _training(now: float, r: Replica, policy: Policy, spares: Sequence[str]) -> Choice:
    return None, f"it trains since {now - r.since:.0f} s"


def _broken(now: float, r: Replica, policy: Policy, spares: Sequence[str]) -> Choice:
    what = r.failure.what if r.failure else "a rank failed"
    return ClearRanks(r.id), f"{what}; what is left of the attempt is being ended"


def _clearing_choice(now: float, r: Replica, policy: Policy, spares: Sequence[str]) -> Choice:
    limit = policy.kill_grace + policy.agent_timeout
    if now - r.since < limit:
        return None, "what is left of its ranks is being ended"
    return _repair_by_step(now, r, policy, spares)


_BY_STATE = {
    State.PENDING: _pending,
    State.LAUNCHING: _launching,
    State.READY: _ready,
    State.RUNNING: _running,
    State.TRAINING: _training,
    State.BROKEN: _broken,
    State.CLEARING: _clearing_choice,
    State.LOST: _repair_by_step,
}


def _verdict(state: RunState) -> EndRun:
    """The exit code of a run whose replicas are all in a final state."""
    done = [r for r in state.replicas if r.state is State.DONE]
    failed = [r for r in state.replicas if r.state is State.FAILED]
    why = f"{len(done)} of {len(state.replicas)} replicas finished"
    # In a torchft run the replicas train one model: when one has finished, the training is finished.
    if len(done) == len(state.replicas) or (done and state.collective):
        return EndRun(EXIT_DONE, why)
    if state.stop:
        return EndRun(state.stop_code, state.stop)
    if done and not failed:
        return EndRun(EXIT_DONE, why)
    if all(r.failure is not None and r.failure.launch for r in failed):
        return EndRun(EXIT_LAUNCH, "no step could be started")
    if not any(r.ever_joined for r in failed):
        return EndRun(EXIT_PERMANENT, "it failed again and again without any progress")
    return EndRun(EXIT_FAILED, f"{len(failed)} of {len(state.replicas)} replicas failed")
