"""What an event means for one replica: the whole table, state x event -> next state. Pure.

    replica = TRANSITIONS[replica.state][event.kind](replica, event)

A pair that is not in the table is late news and changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from slurm_ft.controller.state import BY_STEP, IN_PLACE, LONG, RANKS_RUN, SPARE, Failure, Replica, State
from slurm_ft.errors import EXIT_LAUNCH
from slurm_ft.events import Event, Kind

Handler = Callable[[Replica, Event], Replica]

NODE_FAILURE = re.compile(r"Node failure on ([\w.-]+)")
"""srun's words for a host that Slurm has given up."""

UNANSWERED_FIRST = 2.0
UNANSWERED_MOST = 30.0
"""Seconds until a launch is tried again for which Slurm gave no answer: the first time, and at most."""
REFUSALS = 12
"""After so many tries in a row that Slurm's refusal is believed."""


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


def _failed(state: State) -> Handler:
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
    failed = _failed(State.PENDING)(r, e)
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


_END: dict[Kind, Handler] = {Kind.STEP_ENDING: _step_ending}

TRANSITIONS: dict[State, dict[Kind, Handler]] = {
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


def is_late(r: Replica, e: Event) -> bool:
    """Is this news of an attempt or a step that is over?"""
    if e.kind in _OF_AN_ATTEMPT and e.data.get("attempt", r.attempt) != r.attempt:
        return True
    return e.kind in _OF_A_STEP and e.data.get("step", r.step) != r.step
