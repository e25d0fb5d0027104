"""The controller's hold on the run: it renews the lease while it can do its job, and stops when it has lost it.

A process may be stopped, or its host cut off, at any point, and be replaced meanwhile without knowing. So
whatever cannot be undone (a step that is started or ended, a line in the log) is asked for here first: a
controller that has not looked at its lease for LOOK_AFTER seconds looks again before it acts. What remains is
a stop between that look and the act itself; a line that is written then is dropped by readers, because its
epoch is over, an agent does not obey it, and a step that is started then is turned away by the new controller.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from slurm_ft.lease import RENEW, Claim, Lease

LOOK_AFTER = 3.0

log = logging.getLogger("slurm_ft.controller")


def _clock() -> float:
    """Seconds that go on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Tenure:
    """One term of office. `lease` is None where nobody can take over (in tests)."""

    def __init__(self, lease: Lease | None = None, clock: Callable[[], float] = _clock) -> None:
        self._lease, self._clock = lease, clock
        self._looked = self._asked = clock()
        self._looking = False
        self.over = 0
        """The epoch that has deposed us, or 0."""

    @property
    def epoch(self) -> int:
        return self._lease.epoch if self._lease else 0

    @property
    def claim(self) -> Claim:
        return self._lease.claim if self._lease else Claim(0)

    def may_act(self) -> bool:
        """Do we still hold the lease, as far as can be known?

        While `keep` hangs on a file system that is away, this does not hang beside it: nobody can claim
        anything there meanwhile. Unless this process itself was stopped: then it looks in any case.
        """
        now, before = self._clock(), self._asked
        self._asked = now
        if now - self._looked > LOOK_AFTER and (now - before > LOOK_AFTER or not self._looking):
            self._look()
        return not self.over

    def heard_of(self, epoch: int) -> None:
        """Somebody knows of a head of this epoch."""
        if self._lease is not None and epoch > self.epoch:
            self.over = max(self.over, epoch)

    def _look(self) -> None:
        if self._lease is None:
            return
        try:
            self.heard_of(self._lease.deposed_by())
            self._looked = self._clock()
        except OSError as error:
            # Nobody else can claim anything in a folder that is away; agents go by whom they hear.
            log.warning("the lease cannot be looked at: %s", error)

    async def keep(self, able: Callable[[], bool], deposed: Callable[[], None]) -> None:
        """Renew the lease for as long as we hold it and are `able` to do our job; then call `deposed`."""
        while not self.over:
            self._looking = True
            await asyncio.to_thread(self._look)
            if self._lease is not None and not self.over and able():
                try:
                    await asyncio.to_thread(self._lease.renew)
                except OSError as error:
                    log.warning("the lease cannot be renewed: %s", error)
            self._looking = False
            await asyncio.sleep(RENEW)
        deposed()
