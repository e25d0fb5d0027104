"""The status of a run: a snapshot, its table and its JSON.

A snapshot comes from `state.json`, which the controller replaces at most once a second, or, where that file
is missing or damaged, from the events. Both give the same data, so nothing behind this point cares.

Every field may be missing: a reader shows `-` for what it does not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slurm_ft.controller.state import FINAL, RANKS_RUN, Replica, State
from slurm_ft.controller.supervise import decide
from slurm_ft.errors import UsageError
from slurm_ft.observe import text
from slurm_ft.observe.ledger import Facts, Ledger, measured, number, whole
from slurm_ft.spec import Policy

COLUMNS = ("REPLICA", "STATE", "HOSTS", "STEP", "ATTEMPT", "RESTARTS", "COMMITTED", "LOSS", "REASON")
RIGHT = ("REPLICA", "STEP", "ATTEMPT", "RESTARTS", "COMMITTED", "LOSS", "TOKENS", "QUORUM", "TIME")
STALE_SECONDS = 10.0
"""A running controller writes its state every second; after this long without news something is wrong."""


@dataclass(frozen=True)
class ReplicaRow:
    """One replica, as far as it is known."""

    id: int
    state: str = "?"
    hosts: tuple[str, ...] = ()
    step: int | None = None
    attempt: int | None = None
    restarts: int | None = None
    committed: int | None = None
    loss: float | None = None
    tokens: int | None = None
    phase: str = ""
    since: float | None = None
    reason: str = ""
    quorum_id: int | None = None


@dataclass(frozen=True)
class Snapshot:
    """A run at the time `t`. `ended` is its exit code, None while it runs; `stop` says why it is stopped."""

    t: float | None
    name: str = ""
    job_id: str = ""
    cluster: str = ""
    host: str = ""
    started: float | None = None
    ended: int | None = None
    stop: str = ""
    note: str = ""
    replicas: tuple[ReplicaRow, ...] = ()

    @property
    def restarts(self) -> int:
        return sum(row.restarts or 0 for row in self.replicas)

    @property
    def step(self) -> int | None:
        return max((row.step for row in self.replicas if row.step is not None), default=None)

    def age(self, now: float) -> float | None:
        """Seconds since the last news."""
        return None if self.t is None else max(0.0, now - self.t)

    def elapsed(self, now: float, alive: bool | None = None) -> float | None:
        """Seconds since the start: until now, or until the last news of a run that has ended or was left."""
        if self.started is None:
            return None
        over = self.ended is not None or alive is False
        return max(0.0, (self.t if over and self.t is not None else now) - self.started)

    def state(self, alive: bool | None = None) -> str:
        """One word, with the exit code of a run that has ended: `RUNNING`, `STOPPING`, `DONE:0`, `FAILED:1`.

        `alive` says whether somebody looks after the run, where that was tested; without it a run that has
        not ended counts as running.
        """
        if self.ended is not None:
            word = "DONE" if self.ended == 0 else "STOPPED" if self.stop else "FAILED"
            return f"{word}:{self.ended}"
        if alive is False:
            return "WAITING" if self.started is None else "DEAD"
        if self.started is None:
            return "WAITING"
        return "STOPPING" if self.stop else "RUNNING"


# --- where a snapshot comes from -------------------------------------------------------------------------


def from_state(value: Mapping[str, Any]) -> Snapshot:
    """The snapshot in a `state.json`."""
    replicas = value.get("replicas")
    rows = [_row(i, item) for i, item in enumerate(replicas if isinstance(replicas, list) else [])]
    return Snapshot(
        t=number(value, "t"),
        name=_text(value, "name"),
        job_id=_text(value, "job_id"),
        cluster=_text(value, "cluster"),
        host=_text(value, "head_host") or _text(value, "host"),
        started=number(value, "started"),
        ended=whole(value, "ended"),
        stop=_text(value, "stop"),
        note=_text(value, "note"),
        replicas=tuple(rows),
    )


def _text(value: Mapping[str, Any], name: str) -> str:
    found = value.get(name)
    return "" if found is None else str(found)


def _row(position: int, value: Any) -> ReplicaRow:
    if not isinstance(value, Mapping):
        return ReplicaRow(position)
    hosts = value.get("hosts")
    identity = whole(value, "id")
    return ReplicaRow(
        id=position if identity is None else identity,
        state=_text(value, "state") or "?",
        hosts=tuple(map(str, hosts)) if isinstance(hosts, list) else (),
        step=whole(value, "step"),
        attempt=whole(value, "attempt"),
        restarts=whole(value, "restarts"),
        committed=whole(value, "committed"),
        loss=measured(value, "loss"),
        tokens=whole(value, "tokens"),
        phase=_text(value, "phase"),
        since=number(value, "since"),
        reason=_text(value, "reason"),
        quorum_id=whole(value, "quorum_id"),
    )


def from_ledger(ledger: Ledger, now: float, policy: Policy | None = None) -> Snapshot:
    """The snapshot that the events of a run lead to."""
    reasons = explain_all(ledger, now, policy or Policy())
    about = ledger.about
    return Snapshot(
        t=ledger.last,
        name=_text(about, "name"),
        job_id=_text(about, "job_id"),
        cluster=_text(about, "cluster"),
        host=_text(about, "head_host"),
        started=ledger.began,
        ended=ledger.state.ended,
        stop=ledger.state.stop,
        replicas=tuple(_row_of(r, ledger, reasons.get(r.id, "")) for r in ledger.state.replicas),
    )


def _row_of(replica: Replica, ledger: Ledger, reason: str) -> ReplicaRow:
    facts = ledger.facts.get(replica.id, Facts())
    return ReplicaRow(
        id=replica.id,
        state=str(replica.state),
        hosts=replica.hosts,
        step=facts.step,
        attempt=replica.attempt,
        restarts=len(replica.restarts),
        committed=len(facts.committed),
        loss=facts.loss,
        tokens=ledger.tokens.get(replica.id),
        phase=facts.phase,
        since=replica.since,
        reason=reason,
        quorum_id=facts.quorum_id,
    )


def explain_all(ledger: Ledger, now: float, policy: Policy) -> dict[int, str]:
    """Why each replica is where it is: the controller's own reasons, or what the end of the run left."""
    _, reasons = decide(now, ledger.state, policy)
    if reasons:
        return reasons
    return {r.id: _after_the_end(r, ledger.end_reason) for r in ledger.state.replicas}


def _after_the_end(replica: Replica, end_reason: str) -> str:
    if replica.state in FINAL:
        return replica.why or ("all its ranks ended well" if replica.state is State.DONE else "it was stopped")
    return f"the run ended while it was {replica.state}" + (f": {end_reason}" if end_reason else "")


def select(snapshot: Snapshot, selector: str | None) -> Snapshot:
    """The snapshot with the replicas of a selector only. Raises UsageError for one that there is not."""
    if selector is None:
        return snapshot
    wanted = text.selected(selector)
    missing = sorted(wanted - {row.id for row in snapshot.replicas})
    if missing:
        there = f"0 to {len(snapshot.replicas) - 1}" if snapshot.replicas else "none yet"
        raise UsageError(
            f"there is no replica {missing[0]}", f"the replicas are {there}; and no run has this name or job id"
        )
    return replace(snapshot, replicas=tuple(row for row in snapshot.replicas if row.id in wanted))


# --- what is shown -----------------------------------------------------------------------------------------


def headline(snapshot: Snapshot, now: float, alive: bool | None = None) -> str:
    """The line above the table."""
    parts = [snapshot.name or "run"]
    if snapshot.job_id:
        parts.append(f"job {snapshot.job_id}")
    parts.append(snapshot.state(alive))
    if snapshot.started is not None:
        parts.append(f"elapsed {text.elapsed(snapshot.elapsed(now, alive))}")
    parts.append(text.plural(snapshot.restarts, "restart"))
    age = snapshot.age(now)
    if snapshot.ended is None and age is not None and age > STALE_SECONDS:
        parts.append(f"no news for {age:.0f} s" if age < 600 else f"no news for {text.elapsed(age)}")
    if snapshot.stop and snapshot.ended is None:
        parts.append(snapshot.stop)
    if snapshot.note:
        parts.append(snapshot.note)
    return text.clean("  ".join(parts))


def values(row: ReplicaRow, now: float | None = None) -> dict[str, str]:
    """All columns of a replica. The first ones are COLUMNS; `--format` can ask for the others."""
    since = None if row.since is None or now is None else max(0.0, now - row.since)
    return {
        "REPLICA": str(row.id),
        "STATE": row.state,
        "HOSTS": text.hostlist(row.hosts),
        "STEP": text.number(row.step, 0),
        "ATTEMPT": text.number(row.attempt, 0),
        "RESTARTS": text.number(row.restarts, 0),
        "COMMITTED": text.number(row.committed, 0),
        "LOSS": text.number(row.loss, 4),
        "REASON": row.reason or text.NOTHING,
        "TOKENS": text.number(row.tokens, 0),
        "PHASE": row.phase or text.NOTHING,
        "QUORUM": text.number(row.quorum_id, 0),
        "TIME": text.elapsed(since),
    }


def table(
    rows: Iterable[ReplicaRow], now: float | None = None, columns: Sequence[str] = COLUMNS, header: bool = True
) -> list[str]:
    """The table of these replicas. Raises UsageError for an unknown column."""
    body = [text.cells(columns, values(row, now)) for row in rows]
    if not body:
        text.cells(columns, values(ReplicaRow(0)))
    return text.table(columns, body, RIGHT, header)


def colour(state: str) -> str:
    """Which colour a state may have, beside its word."""
    if state in (State.FAILED, State.LOST, State.BROKEN) or state.startswith(("FAILED", "DEAD")):
        return "bad"
    if state in RANKS_RUN or state in (State.DONE, State.FINISHED) or state.startswith(("RUNNING", "DONE")):
        return "good"
    return "warn"


def to_json(snapshot: Snapshot, now: float, alive: bool | None = None, folder: str = "") -> dict[str, Any]:
    """The form of `slurm-ft status --json`, schema 1."""
    return {
        "schema": 1,
        "run": {
            "name": snapshot.name,
            "folder": folder,
            "job_id": snapshot.job_id,
            "cluster": snapshot.cluster,
            "host": snapshot.host,
            "state": snapshot.state(alive).partition(":")[0],
            "started": text.iso(snapshot.started),
            "elapsed": text.rounded(snapshot.elapsed(now, alive)),
            "news_age": text.rounded(snapshot.age(now)),
            "exit_code": snapshot.ended,
            "stop": snapshot.stop,
            "restarts": snapshot.restarts,
        },
        "replicas": [_row_json(row) for row in snapshot.replicas],
    }


def _row_json(row: ReplicaRow) -> dict[str, Any]:
    return {
        "replica": row.id,
        "state": row.state,
        "hosts": list(row.hosts),
        "step": row.step,
        "attempt": row.attempt,
        "restarts": row.restarts,
        "committed": row.committed,
        "loss": text.finite(row.loss),
        "tokens": row.tokens,
        "phase": row.phase,
        "since": text.iso(row.since),
        "quorum_id": row.quorum_id,
        "reason": row.reason,
    }
