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

import asyncio
import os
from collections.abc import Callable, Mapping

from slurm_ft.controller.state import RunState
from slurm_ft.events import Clock
from slurm_ft.launch import probe

INTERVAL = 0.5
FIRST = 10.0
MOST = 300.0
SECONDS = 30.0
"""For one look."""


class ReturnWatch:
    """`state` gives the run's state, `job_id` its Slurm job; `take` records that a host works again."""

    def __init__(
        self,
        cluster: str,
        clock: Clock,
        job_id: Callable[[], str],
        state: Callable[[], RunState],
        take: Callable[[str], None],
    ) -> None:
        self._cluster, self._clock = cluster, clock
        self._job_id, self._state, self._take = job_id, state, take
        self._looked: dict[str, tuple[int, float]] = {}

    async def run(self) -> None:
        """Look at the hosts that were lost, one after the other, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL)
            lost = {host: about.t for host, about in self._state().lost.items() if about.away}
            for host in due(lost, self._looked, self._clock()):
                await self._look(host)

    async def _look(self, host: str) -> None:
        if await probe.works(probe.probe_argv(self._cluster, self._job_id(), host), os.environ, SECONDS):
            self._looked.pop(host, None)
            self._take(host)
        else:
            self._looked[host] = (self._looked.get(host, (0, 0.0))[0] + 1, self._clock())


def due(lost: Mapping[str, float], looked: Mapping[str, tuple[int, float]], now: float) -> list[str]:
    """The hosts to look at now. `lost` holds when each was lost, `looked` how often it was looked at in vain and
    when last; all times in seconds on one clock. Pure."""
    return [host for host, since in lost.items() if now >= _next(since, looked.get(host))]


def _next(since: float, looked: tuple[int, float] | None) -> float:
    if looked is None or looked[1] < since:  # it was lost again after it had come back
        return since + FIRST
    times, last = looked
    return last + min(FIRST * 2.0 ** min(times, 30), MOST)
