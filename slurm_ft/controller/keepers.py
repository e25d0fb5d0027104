"""The controller's care for keepers: start them with the run, start them again a few times, end them with the run.

Keepers help and nothing depends on them: whatever goes wrong is an event, and the training goes on without.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from slurm_ft.errors import LaunchError
from slurm_ft.events import Event, Kind
from slurm_ft.launch import StepHandle, keepers
from slurm_ft.launch.helper import Allocation
from slurm_ft.paths import RunPaths
from slurm_ft.spec import RunSpec

MOST_STARTS = 4
SOON = 1.0
END_WITHIN = 5.0
"""Seconds that keepers have to end after TERM, before KILL."""

Take = Callable[..., Any]


class Keepers:
    """The keepers of one run. `take(kind, **data)` records an event."""

    def __init__(self, paths: RunPaths, spec: RunSpec, allocation: Allocation | None, take: Take) -> None:
        self._paths, self._spec, self._take = paths, spec, take
        self._wanted = spec.replica.keeper != "off"
        self._allocation = allocation  # on this machine there is none
        self._running: dict[int, Mapping[str, Any]] = {}
        self._handles: list[StepHandle] = []
        self._watching: set[asyncio.Task[None]] = set()
        self._starts = 0
        self._ending = False

    def replay(self, events: Iterable[Event]) -> None:
        """What an earlier controller of this session has started, by the log."""
        for event in events:
            if event.kind is Kind.KEEPER:
                self._starts = max(self._starts, int(event.data.get("start", 0)))
                if event.data["what"] == "started":
                    self._running[event.data["pid"]] = event.data
                else:
                    self._running.pop(event.data.get("pid", 0), None)

    def start(self, hosts: Iterable[str]) -> None:
        """Take over the keepers that run; with none, start one on each of these hosts."""
        if not self._wanted:
            return
        for pid, data in self._running.items():
            request = self._request(data["hosts"], int(data["start"]))
            self._watch(keepers.adopt(request, self._allocation, pid), data["hosts"])
        if not self._running:
            self._launch(list(hosts))

    def _request(self, hosts: list[str], start: int) -> keepers.KeeperRequest:
        return keepers.KeeperRequest.of(self._paths, hosts, start, self._spec.policy.orphan_timeout)

    def _launch(self, hosts: list[str]) -> None:
        self._starts += 1
        groups = [hosts] if self._allocation is not None else [[host] for host in hosts]
        for group in groups:
            request = self._request(group, self._starts)
            try:
                if self._allocation is None:
                    handles = keepers.launch_here(request)
                else:
                    handles = keepers.launch_by_srun(request, self._allocation)
            except LaunchError as error:
                self._take(Kind.KEEPER, what="failed", hosts=group, why=error.message)
                continue
            for handle in handles:
                self._take(Kind.KEEPER, what="started", hosts=group, pid=handle.pid, start=self._starts)
                self._watch(handle, group)

    def _watch(self, handle: StepHandle, hosts: list[str]) -> None:
        self._handles.append(handle)
        task = asyncio.ensure_future(self._await(handle, hosts))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _await(self, handle: StepHandle, hosts: list[str]) -> None:
        ended = await handle.wait()
        self._handles.remove(handle)
        if self._ending:
            return
        self._take(Kind.KEEPER, what="ended", hosts=hosts, pid=handle.pid, why=ended.what)
        if self._starts < MOST_STARTS:
            await asyncio.sleep(SOON)
            if not self._ending:
                self._launch(hosts)

    def let_go(self) -> None:
        """Another head looks after them now."""
        self._ending = True
        for task in list(self._watching):
            task.cancel()
        for handle in self._handles:
            handle.let_go()

    async def end(self) -> None:
        """End all. Returns when they are gone, or have been told often enough."""
        self._ending = True
        for stop in ("terminate", "kill"):
            for handle in list(self._handles):
                with contextlib.suppress(Exception):
                    await getattr(handle, stop)()
            if self._watching:
                await asyncio.wait(self._watching, timeout=END_WITHIN)
        for task in list(self._watching):
            task.cancel()
