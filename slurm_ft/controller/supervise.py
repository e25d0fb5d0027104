"""What to do when something breaks: pure functions over the state of a run.

    actions, reasons = decide(now, state, policy)     what to do now, and why

Nothing here has a clock, a process or a file; time is an argument, in seconds since the epoch. `decide`
looks at the whole state each time and asks for whatever is missing, so it does not matter which event woke
it up. The loop carries an action out and records it as an event, which `state.observe` then takes in like
any other.

Repairs climb a ladder: in place (READY again, no Slurm call), then by step (PENDING again, on the same
hosts), each with a budget; then on a spare in the place of the bad host, as long as there are spares; then
the replica is given up, and the run goes on while `min_replicas` are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slurm_ft.controller import sameness, saving
from slurm_ft.controller.state import BY_STEP, FINAL, IN_PLACE, RANKS_RUN, SPARE, Replica, RunState, State
from slurm_ft.errors import EXIT_DONE, EXIT_FAILED, EXIT_LAUNCH, EXIT_PERMANENT
from slurm_ft.spec import Budget, Policy


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
class Park:
    """Let the replica wait for its dead host, as no spare is left."""

    replica: int
    why: str


@dataclass(frozen=True)
class Delay:
    """Write down when the repair of a replica, which has to wait, may begin."""

    replica: int
    until: float
    why: str


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
class EndSave:
    """The save that was asked for is over."""

    id: str
    outcome: saving.Outcome


@dataclass(frozen=True)
class EndRun:
    """All is over: leave with this exit code."""

    code: int
    why: str


Action = LaunchStep | TakeSpare | Park | Delay | StartRanks | ClearRanks | EndStep | EndSave | EndRun
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
    if state.save and not saving.waits_for(state.save, state.running, now, bool(state.stop)):
        actions.append(EndSave(state.save.id, saving.outcome(state.save, state.collective)))
    spares = tuple(host for host in state.spares if host not in state.unfit)
    room = policy.launches_at_once - sum(r.state is State.LAUNCHING for r in state.replicas)
    for replica in state.replicas:
        action, reasons[replica.id] = _choose(now, replica, replace(state, spares=spares), policy, doomed)
        if isinstance(action, LaunchStep):
            room -= 1
            if room < 0:
                action = None
                reasons[replica.id] = f"its step waits: {policy.launches_at_once} others are being started"
        if action is not None:
            actions.append(action)
        if isinstance(action, TakeSpare):
            spares = tuple(host for host in spares if host != action.spare)
    if all(r.state in FINAL for r in state.replicas):
        actions.append(_verdict(state, policy))
    return actions, reasons


def _doom(state: RunState, policy: Policy) -> str:
    """Why the run cannot go on, or ''."""
    if state.stop:
        return state.stop
    again = _again_and_again(state, policy)
    if again:
        return again
    gone = (State.FAILED, State.PARKED)
    failed = [r.id for r in state.replicas if r.state in gone or r.then is State.FAILED]
    left = len(state.replicas) - len(failed)
    if failed and left < policy.min_replicas:
        return f"only {left} of {len(state.replicas)} replicas are left and --min-replicas is {policy.min_replicas}"
    return ""


def _again_and_again(state: RunState, policy: Policy) -> str:
    trying = [r.id for r in state.replicas if r.state is not State.DONE]
    return sameness.repeated(state.marks, trying, policy.same_failures)


def _choose(now: float, r: Replica, state: RunState, policy: Policy, doomed: str) -> Choice:
    if r.state in FINAL:
        return None, r.why or _final_reason(r)
    if r.state is State.ENDING:
        return None, f"its step is being ended: {r.why}"
    if r.state is State.FINISHED and r.id in state.left:
        return EndStep(r.id, State.STOPPED, state.stop, policy.stop_grace), state.stop
    if r.state is State.FINISHED:
        return EndStep(r.id, State.DONE, "all its ranks ended well", policy.stop_grace), "all its ranks ended well"
    late = doomed or _left_behind(now, r, state, policy)
    if late and r.state in RANKS_RUN and state.save and late == state.stop:
        return None, f"{late}; it has {max(0.0, state.save.due - now):.0f} s to save first"
    if late:
        grace = policy.stop_grace if r.state in RANKS_RUN else policy.kill_grace
        return EndStep(r.id, State.STOPPED, late, grace), late
    if state.spares and r.failure is not None:
        worn = sameness.worn_out(state.marks, now, policy.host).intersection(r.hosts)
        r = replace(r, suspects=(*sorted(worn), *r.suspects))
    if r.state is State.PARKED:
        return _parked(r, state, policy)
    action, reason = _BY_STATE[r.state](now, r, policy, state.spares)
    if isinstance(action, EndStep) and action.then is State.FAILED and _may_park(r, state, policy):
        if r.state is not State.PENDING:
            return replace(action, then=State.PENDING), reason
        return Park(r.id, reason), reason
    return action, reason


def _others(r: Replica, state: RunState) -> int:
    """How many other replicas have finished, or may yet."""
    gone = (State.FAILED, State.STOPPED, State.PARKED)
    return sum(x.id != r.id and x.state not in gone and x.then is not State.FAILED for x in state.replicas)


def _may_park(r: Replica, state: RunState, policy: Policy) -> bool:
    """Is it a host that is missing, while enough others go on?"""
    going_on = any(x.id != r.id and x.state not in FINAL and x.state is not State.PARKED for x in state.replicas)
    return bool(r.suspects) and going_on and _others(r, state) >= policy.min_replicas


def _parked(r: Replica, state: RunState, policy: Policy) -> Choice:
    if state.spares and r.suspects:
        spare = next((host for host in state.spares if host in r.suspects), state.spares[0])
        bad = spare if spare in r.suspects else r.suspects[0]
        return TakeSpare(r.id, bad, spare), f"the spare {spare} takes the place of {bad}"
    if not _may_park(r, state, policy):
        return EndStep(r.id, State.FAILED, f"{r.why}; its host did not come back", policy.kill_grace), r.why
    return None, f"{r.why}; there is no spare, so it waits for {', '.join(r.suspects)}, and the others go on"


def _delay(r: Replica, until: float, why: str) -> Delay | None:
    return Delay(r.id, until, why) if r.due != until else None


def _left_behind(now: float, r: Replica, state: RunState, policy: Policy) -> str:
    """Why a replica need not be repaired or waited for, now that others have finished; or ''.

    In a torchft run all replicas train one model. When one of them is done, the training is; a replica
    that starts again would find no peer to heal from and would train from nothing.
    """
    if not state.collective or state.first_done is None:
        return ""
    if r.state in RANKS_RUN and r.committed is not None and r.committed >= _finished_step(state) - 1:
        return ""  # it has a part in what was finished, and may be writing it down
    if r.state not in RANKS_RUN or r.attempt > 1:
        return "the training was finished by its peers"
    if now - state.first_done >= policy.finish_grace:
        return f"its peers finished the training {policy.finish_grace:g} s ago"
    return ""


def _finished_step(state: RunState) -> int:
    """The newest step that a replica which has finished has committed. One that has committed less, alone and from
    nothing, because it was started again when its peers were about to leave, has no part in it."""
    over = (State.FINISHED, State.DONE)
    return max((r.committed or 0 for r in state.replicas if r.state in over or r.then is State.DONE), default=0)


def _final_reason(r: Replica) -> str:
    return "all its ranks ended well" if r.state is State.DONE else "it was stopped"


def _pending(now: float, r: Replica, policy: Policy, spares: Sequence[str]) -> Choice:
    if now < r.launch_at:
        return None, f"Slurm does not answer; its step is started in {r.launch_at - now:.1f} s"
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
        return _delay(
            r, due(r, policy), what
        ), f"{what}; its step is started again in {wait:.1f} s ({count} of {limit} step restarts used)"
    return LaunchStep(r.id), f"{what}; its step is started again ({count} of {limit} step restarts used)"


def _bad_host(r: Replica, count: int, used_up: bool) -> str:
    """The host that a spare should replace, or ''. `count` step restarts have been used on the present hosts.

    One whose agent fell silent, or that failed its check, or whose agent did not come up a second time: a busy
    Slurm may refuse a step once. Or, when the restarts are used up, the one on which the replica failed last; a
    program that has never got on anywhere fails on every host, and takes no spare.
    """
    if r.suspects and (count or used_up or not (r.failure and r.failure.launch and not r.failure.unfit)):
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
    if count >= limit or (spares and r.suspects):
        return _repair_by_step(now, r, policy, spares)
    wait = due(r, policy) - now
    if wait > 0:
        return _delay(
            r, due(r, policy), r.failure.what
        ), f"{r.failure.what}; restarted in place in {wait:.1f} s ({count} of {limit} used)"
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


def _verdict(state: RunState, policy: Policy) -> EndRun:
    """The exit code of a run whose replicas are all in a final state."""
    done = [r for r in state.replicas if r.state is State.DONE]
    failed = [r for r in state.replicas if r.state is State.FAILED]
    why = f"{len(done)} of {len(state.replicas)} replicas finished"
    if done and state.collective and state.broken_off and state.broken_off[1] >= _finished_step(state) - 1:
        why += f", but replica {state.broken_off[0]} did not write the last checkpoint to its end"
        return EndRun(state.stop_code if state.stop else EXIT_FAILED, why)
    # In a torchft run the replicas train one model: when one has finished, the training is finished.
    if len(done) == len(state.replicas) or (done and state.collective):
        return EndRun(EXIT_DONE, why)
    if state.stop:
        return EndRun(state.stop_code, state.stop)
    again = _again_and_again(state, policy)
    if again:
        return EndRun(EXIT_PERMANENT, again)
    if not failed:  # those that waited for hosts were too many
        return EndRun(EXIT_FAILED, next((r.why for r in state.replicas if r.why), why))
    if any(r.ever_joined for r in failed):
        return EndRun(EXIT_FAILED, f"{len(failed)} of {len(state.replicas)} replicas failed")
    if all(r.failure is not None and r.failure.launch for r in failed):
        return EndRun(EXIT_LAUNCH, "no step could be started")
    return EndRun(EXIT_PERMANENT, "it failed again and again without any progress")
