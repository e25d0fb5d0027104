"""The report of a run: how its replicas ended, every incident and its repair, goodput, and advice.

It is computed from the events alone, as plain data first (`compute`) and then as text (`lines`) or JSON
(`to_json`). What was not measured is not shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from slurm_ft.controller.state import Failure, State
from slurm_ft.observe import text
from slurm_ft.observe.explain import failure_json, failure_lines
from slurm_ft.observe.goodput import Goodput, measure
from slurm_ft.observe.incidents import OUTCOMES, STAGES, Incident
from slurm_ft.observe.ledger import Ledger, Session
from slurm_ft.observe.status import RIGHT, Snapshot, from_ledger, headline, values
from slurm_ft.observe.words import exit_meaning
from slurm_ft.spec import Policy

COLUMNS = ("REPLICA", "STATE", "HOSTS", "ATTEMPT", "RESTARTS", "STEP", "LOSS", "COMMITTED", "TOKENS")
SHARES = ("useful", "waiting", "lost", "finished", "away")
MOST_ADVICE = 3
GOOD_ENOUGH = 95.0


@dataclass(frozen=True)
class Steps:
    """How many steps were committed of those that were tried: training steps, or torchft's own where a script does
    not tell its training step."""

    committed: int
    tried: int
    unit: str


@dataclass(frozen=True)
class Report:
    """All that the report shows."""

    snapshot: Snapshot
    sessions: int
    incidents: tuple[Incident, ...]
    goodput: Goodput
    tokens: int
    steps: Steps | None
    failures: tuple[tuple[int, Failure], ...]
    end_reason: str
    advice: tuple[str, ...]


def compute(ledger: Ledger, policy: Policy | None = None) -> Report:
    """The report of a run, so far or at its end."""
    snapshot = from_ledger(ledger, ledger.last or 0.0, policy)
    goodput = measure(ledger)
    incidents = tuple(ledger.incidents.all)
    failed = [r for r in ledger.state.replicas if r.state is State.FAILED]
    return Report(
        snapshot=snapshot,
        sessions=len(ledger.sessions),
        incidents=incidents,
        goodput=goodput,
        tokens=sum(ledger.tokens.values()),
        steps=_steps(ledger.sessions),
        failures=tuple((r.id, r.first_failure) for r in failed if r.first_failure is not None),
        end_reason=ledger.end_reason,
        advice=tuple(advise(incidents, goodput, snapshot))[:MOST_ADVICE],
    )


def _steps(sessions: Iterable[Session]) -> Steps | None:
    attempts = [attempt for session in sessions for attempt in session.attempts.values()]
    commits = [commit for attempt in attempts for commit in attempt.commits]
    if not commits:
        return None
    if all(commit.train_step is None for commit in commits):
        return Steps(len({c.step for c in commits if c.committed}), len({c.step for c in commits}), "torchft")
    tried = [c.train_step for c in commits if c.train_step is not None]
    tried += [step for attempt in attempts for _, step in attempt.samples]
    committed = [c.train_step for c in commits if c.committed and c.train_step is not None]
    return Steps(max(committed, default=0), max(tried), "training")


# --- advice ----------------------------------------------------------------------------------------------------


def advise(incidents: tuple[Incident, ...], goodput: Goodput, snapshot: Snapshot) -> list[str]:
    """What would have helped, the most useful first."""
    found = [_same_host(incidents), _given_up(incidents), _no_start(incidents), _trouble(snapshot)]
    # What was done on purpose needs no advice, and a replica that was given up has its own.
    if any(not incident.injected for incident in incidents) and not _given_up(incidents):
        found.append(_time(goodput))
    return [words for words in found if words]


def _same_host(incidents: tuple[Incident, ...]) -> str:
    hosts = Counter(incident.host for incident in incidents if incident.host and not incident.injected)
    if len(incidents) < 3 or not hosts:
        return ""
    host, count = hosts.most_common(1)[0]
    if count < 3 or count * 2 <= len(incidents):
        return ""
    return f"{count} of {len(incidents)} incidents were on {host}: leave it out with sbatch's --exclude={host}"


def _given_up(incidents: tuple[Incident, ...]) -> str:
    lost = next((incident for incident in incidents if incident.outcome == "given up"), None)
    if lost is None:
        return ""
    same = [incident for incident in incidents if incident.replica == lost.replica]
    if len({incident.cause for incident in same}) == 1 and not any(i.outcome == "healed" for i in same):
        return f"replica {lost.replica} failed in the same way each time: see `slurm-ft logs {lost.replica}`"
    return f"replica {lost.replica} was given up: --restarts-in-place and --restarts-by-step allow more repairs"


def _no_start(incidents: tuple[Incident, ...]) -> str:
    """A repair that waits for imports can be seen in its time line."""
    shares = []
    for incident in incidents:
        end = incident.stages.get("committed", incident.stages.get("progressed"))
        imported, launched = incident.stages.get("imported"), incident.stages.get("relaunched")
        if end and imported is not None and launched is not None:
            shares.append((imported - launched) / end)
    if not shares or max(shares) < 0.5:
        return ""
    return (
        f"importing took up to {100 * max(shares):.0f} % of a repair: keep the environment on the hosts' own disks "
        "(sbatch's --bcast, or sbcast)"
    )


def _time(goodput: Goodput) -> str:
    percent = goodput.percent
    if percent is None or percent >= GOOD_ENOUGH:
        return ""
    name, seconds = max(
        (("away", goodput.away), ("waiting", goodput.waiting), ("lost", goodput.lost)), key=lambda item: item[1]
    )
    share = 100.0 * seconds / goodput.possible
    return {
        "away": f"{share:.0f} % of the time replicas were away: smaller ones (--nodes-per-replica) lose fewer hosts "
        "with each failure",
        "waiting": f"{share:.0f} % of the time healthy replicas waited: see `slurm-ft explain` for the time-outs",
        "lost": f"{share:.0f} % of the time went into work that did not last: {_OFTENER[goodput.basis == 'commits']}",
    }[name]


_OFTENER = {True: "commit more often (with DiLoCo, a smaller sync_steps)", False: "save checkpoints more often"}


def _trouble(snapshot: Snapshot) -> str:
    if snapshot.ended == 75:
        return "the run can go on: requeue it, or submit it again with the same --run-dir"
    return ""


# --- text ------------------------------------------------------------------------------------------------------


def lines(report: Report, alive: bool | None = None) -> list[str]:
    """The report as text. `alive` is as in `Snapshot.state`."""
    snapshot = report.snapshot
    now = snapshot.t or 0.0
    shown = [headline(snapshot, now, alive)]
    if snapshot.ended is not None:
        why = f": {report.end_reason}" if report.end_reason else ""
        shown.append(text.clean(f"exit code {snapshot.ended}, {exit_meaning(snapshot.ended)}{why}"))
    rows = [text.cells(COLUMNS, values(row, now)) for row in snapshot.replicas]
    shown += ["", *text.table(COLUMNS, rows, RIGHT), ""]
    shown.append(f"incidents: {len(report.incidents)}")
    for incident in report.incidents:
        shown += incident_lines(incident, len(snapshot.replicas) > 1 and report.goodput.basis == "commits")
    shown += [_goodput_line(report), *_time_lines(report.goodput, report.sessions)]
    for replica, failure in report.failures:
        shown += ["", *failure_lines(replica, failure)]
    if report.advice:
        shown += ["", *(f"advice: {text.clean(words)}" for words in report.advice)]
    return shown


def incident_lines(incident: Incident, survivors: bool) -> list[str]:
    """An incident's time line and, where the replicas train together, what the others did meanwhile."""
    stages = [f"{name} {text.short(incident.stages[name])}" for name in _shown_stages(incident)]
    parts = [f"{incident.label} {incident.cause}", *stages]
    if incident.rung:
        parts.append(f"({incident.rung})")
    line = "  " + "  ".join(parts)
    if incident.outcome != "healed":
        line += f"  {OUTCOMES[incident.outcome]}" + (f": {incident.why}" if incident.why else "")
    if not survivors:
        return [text.clean(line)]
    return [_kept(line) + f"   survivors lost {_lost_words(incident)}", _survivors(incident)]


def _kept(line: str) -> str:
    return "  " + text.clean(line.strip())


def _lost_words(incident: Incident) -> str:
    return f"up to {text.plural(incident.lost, 'step')} each" if incident.lost else "0 steps"


def _survivors(incident: Incident) -> str:
    count = incident.survivor_commits
    if not count:
        return f"      no survivor committed while replica {incident.replica} was away"
    commits = text.plural(count, "commit")
    return f"      survivors kept committing: {commits} while replica {incident.replica} was away"


def _shown_stages(incident: Incident) -> list[str]:
    """All that was measured; the first progress only where nothing commits."""
    return [name for name in STAGES if name in incident.stages and not (name == "progressed" and _commits(incident))]


def _commits(incident: Incident) -> bool:
    return "joined" in incident.stages or "committed" in incident.stages


def _goodput_line(report: Report) -> str:
    percent = report.goodput.percent
    parts = ["goodput: not measured" if percent is None else f"goodput: {percent:.1f} %"]
    if report.tokens:
        parts.append(f"tokens {report.tokens}")
    if report.steps is not None:
        unit = "" if report.steps.unit == "training" else f" ({report.steps.unit}'s)"
        parts.append(f"committed steps {report.steps.committed}/{report.steps.tried}{unit}")
    return "   ".join(parts)


def _time_lines(goodput: Goodput, sessions: int) -> list[str]:
    if goodput.percent is None:
        return []
    shares = ((getattr(goodput, name), name) for name in SHARES)
    spent = "  ".join(f"{name} {seconds:.1f}" for seconds, name in shares)
    edges = [
        f"{name} {text.short(seconds)}"
        for name, seconds in (("start-up", goodput.startup), ("shut-down", goodput.shutdown))
        if seconds is not None
    ]
    if sessions > 1:
        edges.append(f"sessions {sessions}")
    return [f"replica-seconds: {spent}", "  ".join(edges)]


# --- JSON ------------------------------------------------------------------------------------------------------


def to_json(report: Report, alive: bool | None = None) -> dict[str, Any]:
    """The form of `slurm-ft report --json`, schema 1."""
    snapshot = report.snapshot
    return {
        "schema": 1,
        "run": {
            "name": snapshot.name,
            "job_id": snapshot.job_id,
            "cluster": snapshot.cluster,
            "state": snapshot.state(alive).partition(":")[0],
            "exit_code": snapshot.ended,
            "end_reason": report.end_reason,
            "started": text.iso(snapshot.started),
            "elapsed": text.rounded(snapshot.elapsed(snapshot.t or 0.0)),
            "sessions": report.sessions,
            "restarts": snapshot.restarts,
        },
        "replicas": [_replica_json(report, index) for index in range(len(snapshot.replicas))],
        "incidents": [incident_json(incident) for incident in report.incidents],
        "goodput": _goodput_json(report.goodput),
        "tokens": report.tokens,
        "steps": None if report.steps is None else vars(report.steps),
        "advice": list(report.advice),
    }


def _replica_json(report: Report, index: int) -> dict[str, Any]:
    row = report.snapshot.replicas[index]
    return {
        "replica": row.id,
        "state": row.state,
        "hosts": list(row.hosts),
        "attempt": row.attempt,
        "restarts": row.restarts,
        "step": row.step,
        "loss": text.finite(row.loss),
        "committed": row.committed,
        "tokens": row.tokens,
        "reason": row.reason,
        "first_failure": failure_json(dict(report.failures).get(row.id)),
    }


def incident_json(incident: Incident) -> dict[str, Any]:
    return {
        "replica": incident.replica,
        "rank": incident.rank,
        "attempt": incident.attempt,
        "host": incident.host,
        "what": incident.what,
        "cause": incident.cause,
        "injected": incident.injected,
        "failed": text.iso(incident.failed),
        "stages": {name: text.rounded(incident.stages[name]) for name in STAGES if name in incident.stages},
        "rung": incident.rung,
        "outcome": incident.outcome,
        "why": incident.why,
        "survivor_commits": incident.survivor_commits,
        "survivor_lost_steps": incident.lost,
        "log": incident.log,
        "traceback": incident.traceback,
    }


def _goodput_json(goodput: Goodput) -> dict[str, Any]:
    return {
        "percent": text.rounded(goodput.percent),
        "basis": goodput.basis,
        "possible": text.rounded(goodput.possible),
        "useful": text.rounded(goodput.useful),
        "waiting": text.rounded(goodput.waiting),
        "lost": text.rounded(goodput.lost),
        "finished": text.rounded(goodput.finished),
        "away": text.rounded(goodput.away),
        "startup": text.rounded(goodput.startup),
        "shutdown": text.rounded(goodput.shutdown),
    }
