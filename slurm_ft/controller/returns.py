"""Do the hosts that replicas wait for come back? Slurm is asked, one call a minute, and only while one waits.

A host can be used again when Slurm reaches it and still counts it to the job. Slurm takes a dead host out of a
job (`--no-kill`) after SlurmdTimeout, and never puts one in again: one that comes back after that is not ours any
more. So this helps with a host that was away for less than that (its slurmd restarted, its network cut): it is in
the job still, and its replica is started there again instead of being given up.
"""

from __future__ import annotations

from collections.abc import Iterable

from slurm_ft.aside import Aside
from slurm_ft.controller.state import RunState, State
from slurm_ft.errors import SlurmFTError
from slurm_ft.slurm.client import SlurmClient

INTERVAL = 60.0


class Returns:
    """Asks for the job `job_id`; times are monotonic seconds."""

    def __init__(self, job_id: str, client: SlurmClient | None = None) -> None:
        self._job_id, self._client = job_id, client or SlurmClient()
        self._aside = Aside("returns")
        self._asked_at = float("-inf")

    async def back(self, state: RunState, now: float) -> list[tuple[int, str]]:
        """The replicas whose hosts are all back, with one of those hosts; asks at most once in INTERVAL."""
        parked = [replica for replica in state.replicas if replica.state is State.PARKED]
        if not parked or now - self._asked_at < INTERVAL:
            return []
        self._asked_at = now
        missing = sorted({host for replica in parked for host in replica.suspects})
        found = await self._aside.do(lambda: self._usable(missing))
        return [(r.id, r.suspects[0]) for r in parked if r.suspects and found.issuperset(r.suspects)]

    def _usable(self, hosts: Iterable[str]) -> frozenset[str]:
        try:
            ours, usable = self._client.hosts_of_job(self._job_id), self._client.usable(hosts)
        except SlurmFTError:
            return frozenset()
        if not isinstance(ours, tuple) or not isinstance(usable, frozenset):
            return frozenset()  # no answer is no answer
        return usable.intersection(ours)
