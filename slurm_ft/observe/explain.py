"""Explains a run: why each replica is where it is, what comes next, what failed first, what the policy allows.

The reasons are the controller's own: those it stored in `state.json`, else those that the same `decide` gives
for the state that the events lead to. Nothing is guessed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurm_ft import timeouts
from slurm_ft.controller.state import BY_STEP, FINAL, IN_PLACE, RANKS_RUN, Failure, LostHost, Replica, RunState, State
from slurm_ft.controller.supervise import used
from slurm_ft.observe import text
from slurm_ft.observe.ledger import Ledger
from slurm_ft.observe.status import Snapshot, explain_all
from slurm_ft.observe.words import exit_meaning
from slurm_ft.spec import Policy

TRACEBACK_LINES = 40

TIMES = {
    "launch_timeout": "from the start of a step until its agents have reported",
    "agent_timeout": "an agent that is silent for so long is lost",
    "kill_grace": "between TERM and KILL when a broken replica is cleared",
    "save_within": "for ranks that can save, before the run is stopped",
    "stop_grace": "between TERM and KILL when the run is stopped",
    "finish_grace": "for the others, once the first replica has finished",
    "head_timeout": "agents that hear no controller for so long choose a new head among them",
    "orphan_timeout": "an agent without a controller ends its ranks and the job after so long",
    "hang_after": "a replica that stands still so long while its peers move has failed; 0: never",
    "backoff": "the wait before the second repair without progress; it doubles",
    "backoff_max": "the longest wait before a repair",
}


@dataclass(frozen=True)
class Explained:
    """One replica: where it is, why, what comes next, and what failed first in it."""

    replica: int
    state: str
    reason: str
    next: str
    failure: Failure | None


def explain(
    snapshot: Snapshot, ledger: Ledger, now: float, policy: Policy, alive: bool | None = None
) -> list[Explained]:
    """The replicas of a snapshot explained. Nothing comes next in a run that nobody looks after (`alive`)."""
    over = snapshot.ended is not None or alive is False
    states = {replica.id: replica for replica in ledger.state.replicas}
    reasons = explain_all(ledger, now, policy)
    explained = []
    for row in snapshot.replicas:
        replica = states.get(row.id)
        after = what_next(now, replica, policy, ledger.state) if replica and not over else ""
        first = replica.first_failure if replica else None
        reason = row.reason or reasons.get(row.id) or "no reason is known"
        explained.append(Explained(row.id, row.state, reason, after, first))
    return explained


def what_next(now: float, r: Replica, policy: Policy, state: RunState) -> str:
    """What will happen to a replica if nothing, or the next failure, comes; '' when nothing will."""
    if r.state in FINAL:
        return ""
    if r.state in RANKS_RUN:
        return f"if a rank fails, {_repair(now, r, policy, state)}"
    return {
        State.PENDING: "its step is launched on the same hosts",
        State.PARKED: "its step is started again when its host is back, or a spare is free",
        State.LAUNCHING: f"its ranks start when all agents have reported, within {policy.launch_timeout:g} s",
        State.READY: "its ranks start",
        State.BROKEN: "what is left of it is ended, then its ranks start again",
        State.CLEARING: f"its ranks start again once it is cleared, which takes {policy.kill_grace:g} s at most",
        State.LOST: "what is left of its step is ended, then the step is started again",
        State.FINISHED: "its step is ended",
        State.ENDING: f"when its step has ended, it is {r.then}",
    }.get(r.state, "")


def _repair(now: float, r: Replica, policy: Policy, state: RunState) -> str:
    for rung, budget, words in (
        (IN_PLACE, policy.in_place, "its ranks are restarted in place"),
        (BY_STEP, policy.step, "its step is started again"),
    ):
        count = used(r, rung, budget, now)
        if count < budget.restarts:
            return f"{words} ({count} of {budget.restarts} used in the last {budget.seconds:g} s)"
    spared = r.ever_joined and any(host not in state.unfit for host in state.spares)
    return f"{'a spare takes the place of its host' if spared else 'it is given up'}: all restarts are used up"


# --- text ------------------------------------------------------------------------------------------------------


def failure_lines(replica: int, failure: Failure) -> list[str]:
    """The first failure of a replica: what, where, the log, and the traceback."""
    where = f" on {failure.host}" if failure.host else ""
    lines = [text.clean(f"first failure of replica {replica}: {failure.what}{where}, attempt {failure.attempt}")]
    if failure.log:
        lines.append(f"  log: {text.clean(failure.log)}")
    traceback = failure.traceback.rstrip().splitlines()
    if len(traceback) > TRACEBACK_LINES:
        lines.append(f"  ... {len(traceback) - TRACEBACK_LINES} lines are left out")
    indented = (line.replace("\t", "    ") for line in traceback[-TRACEBACK_LINES:])
    return lines + [f"  {_printable(line)}" for line in indented]


def _printable(line: str) -> str:
    """Like `clean`, but the indentation stays."""
    body = line.lstrip(" ")
    return " " * (len(line) - len(body)) + text.clean(body)


def lines(
    explained: list[Explained], snapshot: Snapshot, policy: Policy, alive: bool | None = None, queue: str = ""
) -> list[str]:
    """The whole explanation below the headline. `queue` is what Slurm says of a job that has not started."""
    shown = []
    if snapshot.started is None:
        shown.append(text.clean(f"the run has not started yet{f': {queue}' if queue else ''}"))
    elif snapshot.ended is None and alive is False:
        shown.append("nobody looks after this run any more: its job ended, or its head was killed; what follows is")
        shown.append("how it was left. Submit it again with the same --run-dir to go on")
    for item in explained:
        after = f"; next: {item.next}" if item.next else ""
        shown.append(text.clean(f"replica {item.replica} is {item.state}: {item.reason}{after}"))
    for item in explained:
        if item.failure is not None:
            shown += ["", *failure_lines(item.replica, item.failure)]
    if snapshot.ended is not None:
        shown += ["", f"exit code {snapshot.ended}: {exit_meaning(snapshot.ended)}"]
    return [*shown, "", *policy_lines(policy)]


def policy_lines(policy: Policy) -> list[str]:
    budgets = [
        f"  {name:<15} {budget.restarts} in {budget.seconds:g} s: {words}"
        for name, budget, words in (
            ("in_place", policy.in_place, "restarts of a replica's ranks on their hosts"),
            ("step", policy.step, "restarts of a replica's step"),
        )
    ]
    times = [f"  {name:<15} {getattr(policy, name):g} s: {words}" for name, words in TIMES.items()]
    least = f"  {'min_replicas':<15} {policy.min_replicas}: with fewer left the run is ended"
    return ["policy:", least, *budgets, *times]


def timeout_rungs(policy: Policy, ledger: Ledger) -> tuple[list[timeouts.Rung], list[str]]:
    """The time-outs in the order in which they must come, and a sentence for each that breaks it.

    Where the replicas' programs have told their own values (they all run the same), those stand.
    """
    own = next((facts.timeouts for facts in ledger.facts.values() if facts.timeouts), None)
    rungs = timeouts.ladder(policy, own, in_a_job=ledger.about.get("cluster") != "local")
    return rungs, timeouts.troubles(rungs)


def timeout_lines(policy: Policy, ledger: Ledger) -> list[str]:
    rungs, troubles = timeout_rungs(policy, ledger)
    shown = [f"  {rung.name:<15} {rung.seconds:g} s: {rung.words} ({rung.setting})" for rung in rungs]
    return ["time-outs, each shorter than the next:", *shown, *(f"warning: {trouble}" for trouble in troubles)]


def lost_host_lines(lost: Mapping[str, LostHost]) -> list[str]:
    return [
        text.clean(
            f"{host} is not used since {text.iso(about.t)}: {about.why}"
            + ("; it is looked at again, and is a spare when it works" if about.away else "")
        )
        for host, about in sorted(lost.items())
    ]


def to_json(explained: list[Explained], policy: Policy) -> dict[str, Any]:
    """The part of `slurm-ft explain --json` that is beside `run`."""
    return {
        "replicas": [
            {
                "replica": item.replica,
                "state": item.state,
                "reason": item.reason,
                "next": item.next,
                "first_failure": failure_json(item.failure),
            }
            for item in explained
        ],
        "policy": {
            "min_replicas": policy.min_replicas,
            "in_place": {"restarts": policy.in_place.restarts, "seconds": policy.in_place.seconds},
            "step": {"restarts": policy.step.restarts, "seconds": policy.step.seconds},
            **{name: getattr(policy, name) for name in TIMES},
        },
    }


def ladder_json(policy: Policy, ledger: Ledger) -> dict[str, Any]:
    """Time-outs and lost hosts, for `slurm-ft explain --json`."""
    rungs, troubles = timeout_rungs(policy, ledger)
    return {
        "timeouts": [{"name": r.name, "seconds": r.seconds, "setting": r.setting} for r in rungs],
        "warnings": troubles,
        "lost_hosts": {host: {"since": text.iso(x.t), "why": x.why} for host, x in ledger.state.lost.items()},
    }


def failure_json(failure: Failure | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    return {
        "time": text.iso(failure.t),
        "what": failure.what,
        "host": failure.host,
        "rank": failure.rank,
        "attempt": failure.attempt,
        "log": failure.log,
        "traceback": failure.traceback,
    }
