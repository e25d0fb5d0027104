"""Spares are looked at while they wait, so that a repair does not find a second broken host.

One after the other, every `spare_check` seconds: one small step on each spare, so n spares make n calls of srun in
that time. A spare that fails is not taken until it passes again. What is known of it is in the log (host_unfit,
host_fit), so a restarted controller knows it too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from slurm_ft import env
from slurm_ft.agent import fitness
from slurm_ft.controller.state import RunState
from slurm_ft.events import Kind
from slurm_ft.hostspec import HostSpec
from slurm_ft.launch import Launcher
from slurm_ft.launch.srun import UNANSWERED

SECONDS = 50.0
"""For one look; Slurm ends the step after a minute by itself."""


class SpareWatch:
    """`state` gives the run's state; `take` records an event of a host; `keeper` is the mode of the hosts' keepers,
    which are on spares too."""

    def __init__(
        self,
        spec: HostSpec,
        launcher: Launcher,
        state: Callable[[], RunState],
        take: Callable[[Kind, str, str], None],
        keeper: str = "off",
    ) -> None:
        self._spec, self._launcher, self._state, self._take = spec, launcher, state, take
        self._keeper = keeper

    async def run(self) -> None:
        """Look at the spares until cancelled."""
        if not self._spec.health_check or not self._spec.spare_check:
            return
        while True:
            for host in self._state().spares:
                await self.look(host)
            await asyncio.sleep(self._spec.spare_check)

    async def look(self, host: str) -> None:
        """Look at one spare, and record what has changed with it."""
        argv, environ = self._launcher.look(host, self._spec.health_check)
        what = await fitness.fault(argv, {**environ, env.KEEPER_MODE: self._keeper}, SECONDS)
        state = self._state()
        if host not in state.spares:  # it was taken meanwhile
            return
        if what.startswith("srun: ") and UNANSWERED.search(what):
            return  # Slurm did not answer, which says nothing of the host
        if what and state.unfit.get(host) != what:
            self._take(Kind.HOST_UNFIT, host, what)
        elif not what and host in state.unfit:
            self._take(Kind.HOST_FIT, host, "")
