"""The worker loops of a job, each in a step of its own: started, watched, replaced within the allocation.

A thread with an asyncio loop does all of it; the methods of `Slots` and `Slot` may be called from any other thread. A
slot is lost when its step ends, or when its loop has been silent for `silence` seconds; then its host is not used
again as long as there is another. It is started again at once, later with each failure that follows within
BUDGET.seconds, and given up after BUDGET.restarts of them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_ft.channel import Message, Server, make_keys
from slurm_ft.errors import LaunchError, RunFailed
from slurm_ft.launch import Launcher, StepHandle
from slurm_ft.paths import RunPaths
from slurm_ft.spec import Budget

BUDGET = Budget(5, 600.0)
BACKOFF = 0.5
START_SECONDS = 60.0
TICK = 0.1
LATE = 1.0
"""A look that comes this many seconds after the last one tells of a pause of this process."""


class SlotLost(RunFailed):
    """The worker loop of a slot is gone. What was called on it will not answer."""


@dataclass(frozen=True)
class WorkerRequest:
    """The step of one incarnation of a slot, for the launcher."""

    paths: RunPaths
    slot: int
    incarnation: int
    host: str

    @property
    def hosts(self) -> tuple[str, ...]:
        return (self.host,)

    @property
    def name(self) -> str:
        return f"sft-monarch-{self.slot}-{self.incarnation}"

    @property
    def log(self) -> Path:
        return self.paths.root / "workers" / f"{self.slot}-{self.incarnation}.log"

    def agent_argv(self) -> list[str]:
        place = [f"--run-dir={self.paths.root}", f"--slot={self.slot}", f"--incarnation={self.incarnation}"]
        return [sys.executable, "-m", "slurm_ft.monarch.worker", *place]


@dataclass
class Slot:
    """One incarnation of a worker loop. A replacement is another `Slot` with the same number."""

    number: int
    incarnation: int
    host: str
    address: str = ""
    pid: int = 0
    heard: float = 0.0
    up: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future)
    lost: concurrent.futures.Future[str] = field(default_factory=concurrent.futures.Future)
    _mesh: Any = None

    @property
    def host_mesh(self) -> Any:
        """Monarch's HostMesh of this one worker loop; attached when it is first asked for. Raises SlotLost."""
        if self._mesh is None:
            from monarch.actor import attach_to_workers

            name = f"slot{self.number}i{self.incarnation}"
            self._mesh = attach_to_workers(ca="trust_all_connections", workers=[self.address], name=name)
            self.race(self._mesh.initialized, START_SECONDS)
        return self._mesh

    def race(self, future: Any, timeout: float | None = None) -> Any:
        """The value of a Monarch future, or SlotLost as soon as this slot is lost; TimeoutError after `timeout` s.

        Monarch by itself lets a call to a lost host wait for about a minute.
        """
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def wait() -> None:
            try:
                answer.set_result(future.get())
            except BaseException as error:  # whatever the call raised is the caller's
                answer.set_exception(error)

        threading.Thread(target=wait, name="slurm-ft race", daemon=True).start()
        concurrent.futures.wait([answer, self.lost], timeout, concurrent.futures.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        if self.lost.done():
            raise SlotLost(f"slot {self.number} on {self.host} is lost: {self.lost.result()}")
        raise TimeoutError(f"slot {self.number} did not answer within {timeout:g} s")


class Slots:
    """`count` worker loops on the first of `hosts`; the others are spares."""

    def __init__(
        self,
        paths: RunPaths,
        launcher: Callable[[], Launcher],
        hosts: Sequence[str],
        count: int,
        address: str,
        silence: float = 3.0,
        tell: Callable[[str], None] = lambda words: None,
    ) -> None:
        """`address` is ours, as the workers reach it. `tell` hears, from another thread, of losses and
        replacements. Raises LaunchError when the loops do not come up."""
        self._paths, self._count, self._silence, self._tell = paths, count, silence, tell
        self._hosts = deque(hosts)
        self._bad: set[str] = set()
        self._slots: dict[int, Slot] = {}
        self._failures: dict[int, list[float]] = {}
        self._steps: dict[int, StepHandle] = {}
        self._replacing: dict[int, concurrent.futures.Future[Slot]] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="slurm-ft monarch", daemon=True).start()
        paths.create()
        (paths.root / "workers").mkdir(exist_ok=True)
        make_keys(paths)
        self._run(self._open(launcher, address))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self, launcher: Callable[[], Launcher], address: str) -> None:
        self._server = Server(self._paths, address)
        self._launcher = launcher()
        self._tasks = {asyncio.ensure_future(work) for work in (self._listen(), self._watch())}
        for number in range(self._count):
            self._start(number)

    # --- from any thread -------------------------------------------------------------------------------------

    def current(self, timeout: float = START_SECONDS) -> list[Slot]:
        """The slots as they are now, all up; one that is being replaced is waited for.

        Raises LaunchError when one does not come up in time, or has been given up.
        """
        give_up = time.monotonic() + timeout
        while True:
            slots = [self._slots[number] for number in range(self._count)]
            if all(slot.up.done() and not slot.lost.done() for slot in slots):
                return slots
            given_up = [slot.number for slot in slots if slot.number in self._given_up()]
            if given_up or time.monotonic() > give_up:
                which = given_up or [slot.number for slot in slots if not slot.up.done() or slot.lost.done()]
                why = "failed again and again" if given_up else f"did not come up within {timeout:g} s"
                raise LaunchError(f"the worker loops of slots {which} {why}", f"see {self._paths.root / 'workers'}")
            time.sleep(0.02)

    def replacement(self, slot: Slot, timeout: float = START_SECONDS) -> Slot:
        """What stands in the place of a slot that was lost, as soon as it is up; one that is lost again itself is not
        given out. Raises as `current` does."""
        give_up = time.monotonic() + timeout
        while (now := self._slots[slot.number]).incarnation <= slot.incarnation or not now.up.done() or now.lost.done():
            if slot.number in self._given_up() or time.monotonic() > give_up:
                raise LaunchError(f"slot {slot.number} was not replaced", f"see {self._paths.root / 'workers'}")
            time.sleep(0.02)
        return now

    def close(self) -> None:
        """End all worker loops and their steps."""
        if self._loop.is_running():
            self._run(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)

    # --- in our thread ---------------------------------------------------------------------------------------

    def _given_up(self) -> set[int]:
        return {number for number in self._failures if len(self._recent(number)) > BUDGET.restarts}

    def _recent(self, number: int) -> list[float]:
        now = time.monotonic()
        return [t for t in self._failures.get(number, []) if now - t < BUDGET.seconds]

    def _start(self, number: int) -> None:
        host = next((host for host in self._hosts if host not in self._bad), None) or self._hosts[0]
        self._hosts.remove(host)
        before = self._slots.get(number)
        slot = Slot(number, before.incarnation + 1 if before else 0, host, heard=time.monotonic())
        self._slots[number] = slot
        try:
            handle = self._launcher.launch(WorkerRequest(self._paths, number, slot.incarnation, host))
        except LaunchError as error:
            self._lose(slot, error.message)
            return
        self._steps[number] = handle
        self._do(self._await_step(slot, handle))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _await_step(self, slot: Slot, handle: StepHandle) -> None:
        ended = await handle.wait()
        self._lose(slot, ended.what)

    async def _listen(self) -> None:
        async for name, message in self._server.messages():
            self._hear(name, message)

    def _hear(self, name: bytes, message: Message) -> None:
        number, incarnation = (int(part) for part in name.decode().split("."))
        slot = self._slots.get(number)
        if slot is None or slot.incarnation != incarnation or slot.lost.done():
            self._server.send(name, {"type": "leave"})  # of an incarnation that was given up
            return
        slot.heard = time.monotonic()
        if message["type"] == "hello" and not slot.up.done():
            slot.address, slot.pid = str(message["address"]), int(message["pid"])
            slot.up.set_result(None)
            self._tell(f"slot {number} is up on {slot.host}")
        self._server.send(name, {"type": "alive"})

    async def _watch(self) -> None:
        """Look for silent slots. A look that comes late itself says nothing about them."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK)
            now, before, last = time.monotonic(), last, time.monotonic()
            for slot in self._slots.values():
                if now - before > LATE:
                    slot.heard = now
                limit = self._silence if slot.up.done() else START_SECONDS
                if not slot.lost.done() and now - slot.heard > limit:
                    self._bad.add(slot.host)
                    self._lose(slot, f"silent for {limit:g} s")

    def _lose(self, slot: Slot, why: str) -> None:
        if slot.lost.done():
            return
        slot.lost.set_result(why)
        self._hosts.appendleft(slot.host)
        self._tell(f"slot {slot.number} on {slot.host} is lost: {why}")
        self._failures.setdefault(slot.number, []).append(time.monotonic())
        self._do(self._replace(slot))

    async def _replace(self, slot: Slot) -> None:
        handle = self._steps.pop(slot.number, None)
        if handle is not None and slot.host in self._bad:
            self._do(handle.kill())  # its host may never answer: that is not waited for
        elif handle is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(START_SECONDS):  # wait_for may swallow that the job is closed meanwhile
                    await handle.kill()
        failures = len(self._recent(slot.number))
        if failures > BUDGET.restarts:
            self._tell(f"slot {slot.number} is given up after {failures} failures")
            return
        await asyncio.sleep(BACKOFF * 2 ** (failures - 2) if failures > 1 else 0.0)
        self._start(slot.number)

    async def _close(self) -> None:
        for slot in self._slots.values():
            if not slot.lost.done():
                slot.lost.set_result("the job was ended")
                self._server.send(f"{slot.number}.{slot.incarnation}".encode(), {"type": "leave"})
        endings = [asyncio.ensure_future(handle.wait()) for handle in self._steps.values()]
        if endings:
            await asyncio.wait(endings, timeout=2.0)
        await asyncio.gather(*(handle.kill() for handle in self._steps.values()), return_exceptions=True)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server.close()
