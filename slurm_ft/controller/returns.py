"""Hosts that were lost are looked at again: one that works is a spare from then on.

That is said of hosts of which nothing was heard. One that answers, and on which a replica failed again and again,
stays lost.

The first look comes FIRST seconds after the loss; each one that fails doubles the time to the next, up to MOST. So
a host that stays away costs one srun in MOST seconds. What is known of a host is in the log (host_replaced,
host_returned), so a restarted controller knows it too.

Slurm takes a node that it has found to be dead out of the job for good, and refuses steps there: such a host never
comes back to this job, whatever becomes of it. One that was only cut off for a while does.
"""

from __future__ import annotations

from collections.abc import Mapping

FIRST = 10.0
MOST = 300.0
SECONDS = 30.0
"""For one look."""


def due(lost: Mapping[str, float], looked: Mapping[str, tuple[int, float]], now: float) -> list[str]:
    """The hosts to look at now. `lost` holds when each was lost, `looked` how often it was looked at in vain and
    when last; all times in seconds on one clock. Pure."""
    return [host for host, since in lost.items() if now >= _next(since, looked.get(host))]


def _next(since: float, looked: tuple[int, float] | None) -> float:
    if looked is None or looked[1] < since:  # it was lost again after it had come back
        return since + FIRST
    times, last = looked
    return last + min(FIRST * 2.0 ** min(times, 30), MOST)
