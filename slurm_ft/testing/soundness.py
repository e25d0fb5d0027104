"""Is a run sound, by its own events? What must hold of any torchft run, whatever was done to it. Pure.

Each function gives sentences, one for each thing that is wrong; none when all is well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from slurm_ft.events import Event, Kind
from slurm_ft.observe.incidents import HEAD, Incident


def commits(events: Iterable[Event]) -> list[Event]:
    return [event for event in events if event.kind is Kind.COMMIT and event.data.get("committed")]


def gaps(events: Iterable[Event]) -> list[str]:
    """Every step from the first to the last was committed by at least one replica."""
    steps = {int(event.data["step"]) for event in commits(events)}
    missing = sorted(set(range(min(steps), max(steps))) - steps) if steps else []
    return [f"no replica committed step {step}" for step in missing]


def doubles(events: Iterable[Event]) -> list[str]:
    """No replica committed a step twice, and no step was committed in two quorums: that would be two trainings."""
    wrong = []
    times: dict[tuple[int | None, int], int] = defaultdict(int)
    quorums: dict[int, set[object]] = defaultdict(set)
    for event in commits(events):
        step = int(event.data["step"])
        times[event.replica, step] += 1
        quorums[step].add(event.data.get("quorum_id"))
    for (replica, step), count in sorted(times.items(), key=str):
        if count > 1:
            wrong.append(f"replica {replica} committed step {step} {count} times")
    for step, ids in sorted(quorums.items()):
        if len(ids) > 1:
            wrong.append(f"step {step} was committed in {len(ids)} quorums: {sorted(map(str, ids))}")
    return wrong


def unexplained(incidents: Sequence[Incident]) -> list[str]:
    """Every incident says what happened, and comes from a fault on purpose, or from a repair of one that failed.

    The head is lost on purpose with the host of a replica that is killed on purpose.
    """
    wrong, failed_again = [], set[int]()
    struck = {incident.host for incident in incidents if incident.injected}
    for incident in incidents:
        with_its_host = incident.replica == HEAD and incident.host in struck
        known = incident.injected or with_its_host or incident.replica in failed_again
        if not incident.what or not incident.cause or not known:
            who = f"replica {incident.replica}, attempt {incident.attempt}"
            wrong.append(f"{who}: `{incident.what}` ({incident.cause}) has no known cause")
        (failed_again.add if incident.outcome == "failed again" else failed_again.discard)(incident.replica)
    return wrong
