"""The steps that exist: started or adopted through the launcher, awaited, and ended politely first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from slurm_ft.controller.peers import Peers
from slurm_ft.controller.state import Replica
from slurm_ft.launch import Launcher, StepHandle, StepRequest
from slurm_ft.launch.base import Ended
from slurm_ft.paths import RunPaths

ESCALATE_AFTER = 10.0
"""Seconds that a step may take to end after each of: shutdown by its agents, TERM, KILL."""

Do = Callable[[Coroutine[Any, Any, None]], None]
Exited = Callable[[int, int, Ended], None]


class Steps:
    """The step of each replica. `do` runs a task of the controller; `exited(replica, step, ended)` hears of ends."""

    def __init__(self, paths: RunPaths, launcher: Launcher, peers: Peers, do: Do, exited: Exited) -> None:
        self._paths, self._launcher, self._peers = paths, launcher, peers
        self._do, self._exited = do, exited
        self._steps: dict[int, tuple[StepHandle, asyncio.Event]] = {}
        self._numbers: dict[int, int] = {}

    def launch(self, replica: Replica, step: int) -> int:
        """Start a step; gives the number of its first process. Raises LaunchError."""
        handle = self._launcher.launch(self._request(replica, step))
        self._watch(replica.id, step, handle)
        return handle.pid

    def adopt(self, replica: Replica, pid: int) -> None:
        """Take over the step that an earlier controller has started."""
        request = self._request(replica, replica.step)
        self._watch(replica.id, replica.step, self._launcher.adopt(request, pid))

    def end(self, replica: Replica, grace: float) -> None:
        """End a step: by its agents, then by TERM, then by KILL; at once by KILL when no agent answers."""
        self._do(self._escalate(replica, grace))

    def left(self, replica: int, step: int) -> None:
        """All agents of a step have said that they leave."""
        if self._numbers.get(replica) == step:
            self._steps[replica][0].left()

    def let_go(self) -> None:
        """The steps belong to somebody else now: end what we have of them here, and nothing of theirs."""
        for handle, _ in self._steps.values():
            handle.let_go()

    def _request(self, replica: Replica, step: int) -> StepRequest:
        return StepRequest(self._paths, replica.id, step, replica.hosts)

    def _watch(self, replica: int, step: int, handle: StepHandle) -> None:
        over = asyncio.Event()
        self._steps[replica], self._numbers[replica] = (handle, over), step
        self._do(self._await(replica, step, handle, over))

    async def _await(self, replica: int, step: int, handle: StepHandle, over: asyncio.Event) -> None:
        ended = await handle.wait()
        # What the agents said last may still be on its way: it names the cause, the step's end does not.
        await asyncio.sleep(0)
        over.set()
        self._exited(replica, step, ended)

    async def _escalate(self, replica: Replica, grace: float) -> None:
        handle, over = self._steps[replica.id]
        if self._peers.tell(replica, {"type": "shutdown", "grace": grace}):
            if await _within(grace + ESCALATE_AFTER, over):
                return
            await handle.terminate()
            if await _within(ESCALATE_AFTER, over):
                return
        await handle.kill()


async def _within(seconds: float, over: asyncio.Event) -> bool:
    try:
        await asyncio.wait_for(over.wait(), seconds)
    except TimeoutError:
        return False
    return True
