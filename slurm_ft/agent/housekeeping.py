"""What attempts leave behind on a host: memory that is remembered while they run, and swept up after them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from slurm_ft.agent.leftovers import Attempt, SharedMemory, sweep
from slurm_ft.aside import Aside
from slurm_ft.native import probes

SWEEP_WITHIN = 5.0
GPU_WITHIN = 30.0
MEMORY_INTERVAL = 10.0


class Housekeeping:
    """For the ranks of one replica on this host. `pids` gives those that run now, `has_gpus` whether they use GPUs."""

    def __init__(
        self, run: Path, host: str, replica: int, pids: Callable[[], list[int]], has_gpus: Callable[[], bool]
    ) -> None:
        self._run, self._host, self._replica = run, host, replica
        self._pids, self._has_gpus = pids, has_gpus
        self._proc = Aside("leftovers")  # the entry in /proc of a process that hangs can hang its reader
        self._memory = SharedMemory()

    async def sweep(self, attempt: int) -> str:
        """End what attempts before this one have left on this host, and wait for their GPU memory; in words."""
        whose = Attempt(str(self._run), self._host, self._replica, attempt)
        with contextlib.suppress(TimeoutError):
            work = self._proc.do(partial(sweep, whose, self._memory, SWEEP_WITHIN))
            swept = await asyncio.wait_for(work, 2 * SWEEP_WITHIN)
            held = await _gpu_memory_held(swept.ended) if self._has_gpus() and swept.ended else ""
            return "; ".join(words for words in (swept.words, held) if words)
        return f"what is left could not be looked for within {2 * SWEEP_WITHIN:.0f} s"

    async def remember(self) -> None:
        """Remember the files in /dev/shm that the ranks map now."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._proc.do(partial(self._memory.look, self._pids())), SWEEP_WITHIN)

    async def watch(self) -> None:
        """Remember again and again."""
        while True:
            await asyncio.sleep(MEMORY_INTERVAL)
            await self.remember()


async def _gpu_memory_held(pids: list[int]) -> str:
    """Wait until these processes hold no GPU memory; who still does after a while, in words."""
    until = time.monotonic() + GPU_WITHIN
    while True:
        holders = await asyncio.to_thread(probes.holders)
        held = [holder for holder in holders if holder.pid in pids]
        if not held:
            return ""
        if time.monotonic() > until:
            return f"dead processes still hold memory of the GPUs {', '.join(h.bus_id for h in held)}"
        await asyncio.sleep(1.0)
