"""`state.json`: the run at a glance, for readers that do not want to fold the event log. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurm_ft.controller.book import Book
from slurm_ft.controller.state import Replica, RunState

SCHEMA = 1
FACTS = ("session", "name", "job_id", "cluster", "head_host", "started", "min_replicas")


def snapshot(
    now: float, state: RunState, facts: Mapping[str, Any], book: Book, reasons: Mapping[int, str]
) -> dict[str, Any]:
    """The object that is written; times are seconds since the epoch."""
    return {
        "schema": SCHEMA,
        "t": now,
        **{name: facts.get(name) for name in FACTS},
        "spares": list(state.spares),
        "lost_hosts": {host: {"t": about.t, "why": about.why} for host, about in state.lost.items()},
        "unfit": dict(state.unfit),
        "ended": state.ended,
        "stop": state.stop,
        "replicas": [_row(replica, book, reasons.get(replica.id, "")) for replica in state.replicas],
    }


def _row(replica: Replica, book: Book, reason: str) -> dict[str, Any]:
    page = book.page(replica.id)
    return {
        "id": replica.id,
        "state": str(replica.state),
        "hosts": list(replica.hosts),
        "step": page.step,
        "attempt": replica.attempt,
        "restarts": len(replica.restarts),
        "committed": page.committed,
        "loss": page.loss,
        "tokens": page.tokens,
        "phase": replica.phases.get(0),
        "since": replica.since,
        "quorum_id": page.quorum_id,
        "reason": reason,
    }
