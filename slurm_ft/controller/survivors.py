"""Who must be told that a replica is gone. Pure.

The kernel tells the peers of a process that dies. Nobody tells those of a host that is cut off, and in a ring
of four or more only two notice at once. The controller knows, and has the agents of the others tell their
ranks (slurm_ft.train.survivors), before anything is repaired. A replica is named by the id under which it is in
torchft's quorums: whoever has no such member in its present quorum is not concerned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurm_ft.controller.state import RANKS_RUN, Replica, RunState, State

WELL = RANKS_RUN | {State.FINISHED, State.DONE}


@dataclass(frozen=True)
class Gone:
    """A replica whose attempt is over before its time, its id in quorums, and who still runs."""

    replica: int
    member: str
    survivors: tuple[int, ...]


def gone(state: RunState, members: Mapping[int, str]) -> list[Gone]:
    """The replicas that are gone, of those in `members` (replica -> its id in quorums).

    Nobody is told in a run that is being stopped: there is nothing to go on with.
    """
    if state.stop or state.ended is not None:
        return []
    running = [r.id for r in state.replicas if r.state in RANKS_RUN]
    return [
        Gone(r.id, members[r.id], tuple(running))
        for r in state.replicas
        if r.id in members and r.state not in WELL and not _has_finished(r)
    ]


def _has_finished(replica: Replica) -> bool:
    return replica.state is State.ENDING and replica.then is State.DONE
