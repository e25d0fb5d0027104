"""What each event means for a run: pure functions.

    state = observe(state, event)

The event log alone gives the state again (`fold`), so a restarted controller goes on where the last one
stopped. Some events are news of the whole run (`OF_THE_RUN`); the others are of one replica, for which
transitions.py has the table, and change the run only through what became of that replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import reduce

from slurm_ft.controller import sameness, saving
from slurm_ft.controller.requests import STOP_WORDS
from slurm_ft.controller.state import LONG, RANKS_RUN, LostHost, Replica, RunState, State
from slurm_ft.controller.transitions import TRANSITIONS, is_late
from slurm_ft.errors import EXIT_TRY_AGAIN
from slurm_ft.events import Event, Kind


def fold(events: Iterable[Event]) -> RunState:
    """The state of a run from its log."""
    return reduce(observe, events, RunState())


def observe(state: RunState, event: Event) -> RunState:
    """The state after this event. Never raises for an event that the log can hold."""
    if event.kind in OF_THE_RUN:
        return OF_THE_RUN[event.kind](state, event)
    if event.kind in (Kind.HOST_UNFIT, Kind.HOST_FIT):
        state = _of_a_host(state, event)
    if event.replica is None or not 0 <= event.replica < len(state.replicas):
        return state
    replica = state.replicas[event.replica]
    return state if is_late(replica, event) else _of_a_replica(state, replica, event)


def _run_started(_: RunState, event: Event) -> RunState:
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


def _stop_requested(state: RunState, event: Event) -> RunState:
    """The first one counts; but who asks for a stop means it, also while the run ends for its time limit to come
    back."""
    why, code = str(event.data["why"]), int(event.data["code"])
    if state.stop and not (state.stop_code == EXIT_TRY_AGAIN and why == STOP_WORDS):
        return state
    return replace(state, stop=why, stop_code=code)


def _save_goes_on(state: RunState, event: Event) -> RunState:
    return replace(state, save=saving.observe(state.save, event)) if state.save else state


def _host_returned(state: RunState, event: Event) -> RunState:
    host = str(event.data.get("host", ""))
    if host not in state.lost:
        return state
    lost = {name: about for name, about in state.lost.items() if name != host}
    return replace(state, lost=lost, spares=(*state.spares, host))


OF_THE_RUN: Mapping[Kind, Callable[[RunState, Event], RunState]] = {
    Kind.RUN_STARTED: _run_started,
    Kind.STOP_REQUESTED: _stop_requested,
    Kind.RUN_ENDED: lambda state, event: replace(state, ended=int(event.data["code"])),
    Kind.QUORUM: lambda state, _: replace(state, collective=True),
    Kind.SAVE_REQUESTED: lambda state, event: replace(state, save=saving.requested(event)),
    Kind.SAVE_ASKED: _save_goes_on,
    Kind.SAVED: _save_goes_on,
    Kind.SAVE_ENDED: lambda state, _: replace(state, save=None),
    Kind.HOST_RETURNED: _host_returned,
}


def _of_a_host(state: RunState, event: Event) -> RunState:
    host = str(event.data.get("host", ""))
    others = {name: what for name, what in state.unfit.items() if name != host}
    if event.kind is Kind.HOST_UNFIT:
        others[host] = str(event.data.get("what", ""))
    return replace(state, unfit=others)


def _of_a_replica(state: RunState, replica: Replica, event: Event) -> RunState:
    if event.kind is Kind.COMMIT:
        return _committed(state, replica, event)
    if event.kind is Kind.PHASE:
        return _said(state, replica, int(event.data.get("rank", 0)), str(event.data.get("phase", "")))
    if event.kind is Kind.AGENT_JOINED:  # it has passed its check
        state = _of_a_host(state, event)
    if event.kind is Kind.RANK_DONE:
        state = _said(state, replica, int(event.data["rank"]), "")
        replica = state.replicas[replica.id]
    handler = TRANSITIONS[replica.state].get(event.kind)
    if handler is None:
        return state
    after = handler(replica, event)
    state = _after_failure(state.with_replica(after), replica, after, event)
    return _after_news(state, replica, after, event)


def _committed(state: RunState, replica: Replica, event: Event) -> RunState:
    step = event.data.get("step")
    if not event.data.get("committed") or not isinstance(step, int):
        return state
    further = replica.committed is not None and step > replica.committed  # so it does not write any more
    phases = {} if further and replica.writing else replica.phases
    return state.with_replica(replace(replica, committed=step, phases=phases))


def _said(state: RunState, before: Replica, rank: int, phase: str) -> RunState:
    """A rank says what it does; '' when it has ended well."""
    if before.state not in RANKS_RUN | {State.ENDING}:
        return state
    replica = replace(before, phases={**before.phases, rank: phase})
    written = before.writing and not replica.writing
    return replace(state.with_replica(replica), broken_off=None if written else state.broken_off)


def _after_failure(state: RunState, before: Replica, after: Replica, event: Event) -> RunState:
    """A failure leaves a mark; and the checkpoint that was being written when its replica ended is not whole."""
    failed = after.failure is not before.failure
    stopped = event.kind is Kind.STEP_ENDING and before.state in RANKS_RUN
    if (failed or stopped) and before.writing and before.committed is not None:
        state = replace(state, broken_off=(before.id, before.committed))
    if failed:
        state = replace(state, marks=(*state.marks, _mark(before, event))[-sameness.KEPT :])
    return state


def _mark(before: Replica, event: Event) -> sameness.Mark:
    """The mark of a failure that this event is."""
    data = event.data
    ran_long = data.get("train_step") is None and before.state in RANKS_RUN and event.t - before.since > LONG
    sign = sameness.sign(data, ran_long) if event.kind is Kind.RANK_FAILED else ""
    step = data.get("train_step")
    return sameness.Mark(event.t, before.id, str(data.get("host", "")), sign, step if isinstance(step, int) else None)


def _after_news(state: RunState, before: Replica, after: Replica, event: Event) -> RunState:
    """What became of a replica can be news of its hosts, and of the end of the run."""
    match event.kind:
        case Kind.RANK_DONE if state.stop and state.save and state.save.asked(after.id, after.attempt):
            return replace(state, left=state.left | {after.id})
        case Kind.HOST_REPLACED:
            return _host_replaced(state, before, event)
        case Kind.PARKED:
            why = str(event.data.get("why", ""))
            return replace(state, lost={**state.lost, **{host: LostHost(event.t, why) for host in before.suspects}})
    done = after.state in (State.FINISHED, State.DONE)
    return replace(state, first_done=event.t) if done and state.first_done is None else state


def _host_replaced(state: RunState, before: Replica, event: Event) -> RunState:
    bad, spare = str(event.data["bad"]), event.data["spare"]
    state = replace(state, spares=tuple(host for host in state.spares if host != spare))
    if bad == spare:
        return state
    about = LostHost(event.t, before.failure.what if before.failure else "", bad in before.suspects)
    return replace(state, lost={**state.lost, bad: about})
