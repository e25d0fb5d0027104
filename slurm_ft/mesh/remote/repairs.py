"""Hosts and processes: started, watched, and repaired when they are lost.

`slurm_ft.mesh.supervision` says what is to be done about a loss, after the owner's handlers were asked;
this does it. Used in the mesh's loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from slurm_ft.agent.process import signal_name
from slurm_ft.errors import LaunchError
from slurm_ft.launch.base import Launcher, StepHandle
from slurm_ft.mesh.errors import MeshFailure
from slurm_ft.mesh.extent import Region
from slurm_ft.mesh.remote.calls import numbers
from slurm_ft.mesh.remote.framing import Header
from slurm_ft.mesh.remote.state import GIVEN_UP, Crew, Handler, Process, Slot, State
from slurm_ft.mesh.remote.step import MeshStep, worker_log
from slurm_ft.mesh.remote.switchboard import Switchboard
from slurm_ft.mesh.supervision import Action, Decision, Loss, Repair, decide, follow
from slurm_ft.mesh.values import log

LOOK = 0.5
"""Seconds between two looks for hosts that fell silent."""
HANDLER_WITHIN = 60.0
"""Seconds that a handler of failures may take before the ladder is climbed without its answer."""
STEP_ENDS_WITHIN = 15.0
AFTER = {Action.LEAVE: State.LEFT, Action.PROPAGATE: State.FAILED, Action.SHRINK: State.OUT}
"""What becomes of a process that is not repaired."""


class Repairs:
    """The hosts of one mesh. `owner` may have a `__supervise__(failure)`."""

    def __init__(
        self,
        crew: Crew,
        switchboard: Switchboard,
        mesh_id: str,
        launcher: Launcher,
        owner: object,
        fault_hook: Callable[[MeshFailure], object],
    ) -> None:
        self._crew, self._switchboard = crew, switchboard
        self._id, self._launcher, self._owner, self._fault_hook = mesh_id, launcher, owner, fault_hook
        self.handlers: list[Handler] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Launch all hosts."""
        for slot in self._crew.slots:
            self._launch(slot)
        self._spawn(self._watch())

    async def stop(self, grace: float) -> None:
        """End all hosts, and whatever is being done about them."""
        for slot in self._crew.slots:
            if slot.peer:
                self._crew.end.send(slot.peer, {"k": "stop", "grace": grace})
        await asyncio.gather(*(self._ended(slot, grace + 3.0) for slot in self._crew.slots))
        await asyncio.gather(*self._ending, return_exceptions=True)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ended(self, slot: Slot, seconds: float) -> None:
        if slot.step is None:
            return
        with contextlib.suppress(TimeoutError):
            if slot.peer:
                async with asyncio.timeout(seconds):
                    await slot.step.wait()
                    return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STEP_ENDS_WITHIN):
                await slot.step.kill()
                await slot.step.wait()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("mesh %s: a fault of slurm-ft itself", self._crew.name, exc_info=error)

    # What hosts tell.

    def hello(self, peer: bytes, header: Header) -> None:
        slot = self._crew.slots[header["slot"]]
        if self._crew.stopping or header["incarnation"] != slot.incarnation or slot.state in GIVEN_UP:
            self._crew.end.send(peer, {"k": "stop", "grace": 0.0})
            return
        slot.peer, slot.state, slot.seen = peer, State.UP, time.monotonic()

    def up(self, slot: Slot, header: Header) -> None:
        process = self._crew.at(slot, header["local"])
        if process.incarnation != header["incarnation"] or process.state not in (State.STARTING, State.REPAIRING):
            if process.state in GIVEN_UP:
                self._crew.end.send(slot.peer, {"k": "kill", "local": header["local"]})
            return
        self._crew.failed.pop(process.index, None)  # who sees that it is up may call it at once
        process.state, process.pid, process.failure = State.UP, header["pid"], None
        self._switchboard.up(process)

    def died(self, slot: Slot, header: Header) -> None:
        process = self._crew.at(slot, header["local"])
        if self._crew.stopping or process.incarnation != header["incarnation"] or process.state not in (
            State.STARTING, State.UP, State.REPAIRING,
        ):  # fmt: skip
            return
        code = header["code"]
        if process.asked_to_end:
            self._lost([process], "it was restarted on request", slot, "process", signal=-code if code < 0 else None)
            self._carry_out(Loss(slot.number, process.index), Action.RESTART)
            return
        cause = f"killed by {signal_name(-code)}" if code < 0 else f"it exited with code {code}"
        failure = self._lost(
            [process], cause, slot, "process", code=code if code >= 0 else None, signal=-code if code < 0 else None
        )
        loss = Loss(slot.number, process.index)
        self._spawn(self._surely(loss, self._supervise(loss, failure)))

    # Losses and what is done about them.

    def _lost(self, lost: list[Process], cause: str, slot: Slot, kind: str, **seen: Any) -> MeshFailure:
        """Tell the calls that wait for these processes, and have later ones wait for the repair."""
        points = tuple(self._crew.extent.point(process.index) for process in lost)
        log_file = worker_log(self._crew.paths.root, lost[0].index, lost[0].incarnation)
        failure = MeshFailure(
            self._crew.name,
            points,
            slot.host,
            cause,
            kind=kind,
            incarnation=lost[0].incarnation,
            log=str(log_file),
            **seen,
        )
        for process in lost:
            process.state, process.failure, process.pid = State.REPAIRING, failure, 0
            process.asked_to_end = False
            self._switchboard.lost(process, failure)
        return failure

    def _host_lost(self, slot: Slot, cause: str, silent: bool = False) -> None:
        if self._crew.stopping or slot.state in (*GIVEN_UP, State.REPAIRING):
            return
        slot.state, slot.peer = State.REPAIRING, b""
        alive = [p for p in self._crew.processes_of(slot) if p.state is not State.OUT]
        if alive:
            failure, loss = self._lost(alive, cause, slot, "host"), Loss(slot.number, None, silent)
            self._spawn(self._surely(loss, self._supervise(loss, failure)))
        else:
            self._let_host_go(slot, State.OUT)

    async def _surely(self, loss: Loss, repair: Coroutine[Any, Any, None]) -> None:
        """A repair that goes wrong by a fault of ours must not leave anybody waiting."""
        try:
            await repair
        except Exception:
            log.exception("mesh %s: a repair failed by a fault of slurm-ft itself", self._crew.name)
            self._give_up(loss, Action.PROPAGATE)

    async def _supervise(self, loss: Loss, failure: MeshFailure) -> None:
        slot = self._crew.slots[loss.slot]
        concerned = self._concerned(loss)
        mark = [(process.incarnation, process.failure) for process in concerned], slot.incarnation

        def overtaken() -> bool:
            now = [(p.incarnation, p.failure) for p in concerned], slot.incarnation
            waits = any(process.state is State.REPAIRING for process in concerned)
            return self._crew.stopping or mark != now or not waits

        log.warning("%s", failure.report())
        decision = await self._ask(loss, failure)
        if overtaken():
            return
        if decision is None:
            decision = decide(
                time.monotonic(), loss, self._crew.repairs, self._crew.policy, len(self._crew.layout.spares)
            )
        failure.why = decision.why
        if decision.delay:  # or no pause at all: between a decision and its spare nobody else may take that
            await asyncio.sleep(decision.delay)
        if not overtaken():
            log.warning("mesh %s: %s: %s", self._crew.name, decision.action, decision.why)
            self._apply(loss, decision)

    def _concerned(self, loss: Loss) -> list[Process]:
        slot = self._crew.slots[loss.slot]
        found = self._crew.processes_of(slot) if loss.index is None else [self._crew.processes[loss.index]]
        return [process for process in found if process.state is not State.OUT]

    async def _ask(self, loss: Loss, failure: MeshFailure) -> Decision | None:
        """What the user's handlers say, the youngest first, then the owner."""
        hook = getattr(self._owner, "__supervise__", None)
        for handler in [*reversed(self.handlers), *([hook] if hook is not None else [])]:
            answer = await _in_thread(handler, failure)
            spares = len(self._crew.layout.spares)
            found = follow(answer, time.monotonic(), loss, self._crew.repairs, self._crew.policy, spares)
            if found is not None:
                return found
        return None

    def _apply(self, loss: Loss, decision: Decision) -> None:
        action = decision.action
        if action in AFTER:
            self._give_up(loss, action)
            return
        self._crew.repairs.append(Repair(time.monotonic(), action, loss.slot, loss.index))
        self._carry_out(loss, action)

    def _carry_out(self, loss: Loss, action: Action) -> None:
        """Also what was asked for, which is no failure and uses up no budget."""
        slot = self._crew.slots[loss.slot]
        self._crew.generation += 1
        if action is Action.RESTART and loss.index is not None and slot.state is State.UP:
            self._restart(slot, self._crew.processes[loss.index])
        else:
            old, slot.step = slot.step, None
            self._renew(slot)
            if action is Action.REPLACE:
                self._take_spare(slot)
                if old is not None:
                    self._end_in_background(old)  # its host may not answer: nobody waits for it
                    old = None
            self._spawn(self._surely(Loss(slot.number), self._relaunch(slot, old)))

    def _take_spare(self, slot: Slot) -> None:
        self._crew.layout = self._crew.layout.without(slot.host)
        replica, place = divmod(slot.number, len(self._crew.layout.replicas[0]))
        slot.host = self._crew.layout.hosts_of(replica)[place]

    def _give_up(self, loss: Loss, action: Action) -> None:
        slot = self._crew.slots[loss.slot]
        state = AFTER[action]
        lost = self._concerned(loss)
        concerned = self._unit(loss) if action is Action.SHRINK else lost
        for process in concerned:
            process.failure = process.failure or next((other.failure for other in lost if other.failure), None)
            if process.state is State.UP:
                self._crew.end.send(self._crew.slots[process.index // self._crew.per_host].peer,
                               {"k": "kill", "local": process.index % self._crew.per_host})  # fmt: skip
            if action is Action.PROPAGATE and process.failure is not None:
                self._crew.failed[process.index] = process.failure  # before another thread sees the state
            process.state = state
            self._switchboard.let_go(process)
        if action is Action.SHRINK:
            self._crew.generation += 1
            for other in self._crew.slots:
                gone = all(process.state is State.OUT for process in self._crew.processes_of(other))
                if gone and other.state is State.REPAIRING:
                    self._let_host_go(other, State.OUT)
        if action is Action.PROPAGATE:
            failure = concerned[0].failure
            assert failure is not None
            self._spawn(_tell(self._fault_hook, failure))
        if loss.index is None:
            self._let_host_go(slot, state)

    def _let_host_go(self, slot: Slot, state: State) -> None:
        slot.state, slot.peer = state, b""
        if slot.step is not None:
            self._end_in_background(slot.step)
            slot.step = None

    def _unit(self, loss: Loss) -> list[Process]:
        """What goes when the mesh shrinks: the replica, or the host or the process if there is but one of it."""
        replica, _ = divmod(loss.slot, len(self._crew.layout.replicas[0]))
        in_replica = len(self._crew.layout.replicas[0]) * self._crew.per_host
        if len(self._crew.layout.replicas) > 1:
            return self._crew.processes[replica * in_replica : (replica + 1) * in_replica]
        if len(self._crew.slots) > 1 or loss.index is None:
            return self._crew.processes_of(self._crew.slots[loss.slot])
        return [self._crew.processes[loss.index]]

    def restart(self, region: Region) -> None:
        """End these processes and start them again, also those that were given up."""
        for slot_number, locals_ in numbers(region, self._crew.per_host).items():
            slot = self._crew.slots[slot_number]
            if slot.state is not State.UP:
                if slot.state is not State.STARTING and slot.state is not State.REPAIRING:
                    self._revive(self._crew.processes_of(slot))
                    self._carry_out(Loss(slot_number), Action.RESTART_HOST)
                continue
            for process in (self._crew.processes[slot_number * self._crew.per_host + local] for local in locals_):
                if process.state is State.UP:
                    process.asked_to_end = True
                    self._crew.end.send(slot.peer, {"k": "kill", "local": process.index % self._crew.per_host})
                elif process.state in GIVEN_UP:
                    self._revive([process])
                    self._carry_out(Loss(slot_number, process.index), Action.RESTART)

    def _revive(self, processes: list[Process]) -> None:
        for process in processes:
            self._crew.failed.pop(process.index, None)
            process.state = State.REPAIRING

    # Steps.

    def _restart(self, slot: Slot, process: Process) -> None:
        process.incarnation = self._crew.generation
        local = process.index % self._crew.per_host
        self._crew.end.send(slot.peer, {"k": "fork", "local": local, "incarnation": process.incarnation})
        self._spawn(self._must_come_up(slot, process, process.incarnation))

    async def _must_come_up(self, slot: Slot, process: Process, incarnation: int) -> None:
        await asyncio.sleep(self._crew.policy.launch_timeout)
        if process.incarnation == incarnation and process.state is State.REPAIRING and slot.peer:
            self._crew.end.send(slot.peer, {"k": "kill", "local": process.index % self._crew.per_host})

    def _renew(self, slot: Slot) -> None:
        """From now on, news of the host's processes as they were does not count."""
        slot.peer, slot.state = b"", State.REPAIRING
        alive = [process for process in self._crew.processes_of(slot) if process.state is not State.OUT]
        others = [process for process in alive if process.state is not State.REPAIRING]
        if others:
            self._lost(others, "its host is started again", slot, "host")
        slot.incarnation = self._crew.generation
        for process in alive:
            process.incarnation = slot.incarnation

    async def _relaunch(self, slot: Slot, old: StepHandle | None) -> None:
        if old is not None:
            await _end_step(old)
        if not self._crew.stopping:
            self._launch(slot)

    def _end_in_background(self, step: StepHandle) -> None:
        task = asyncio.get_running_loop().create_task(_end_step(step))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _launch(self, slot: Slot) -> None:
        request = MeshStep(self._crew.paths, self._id, slot.number, slot.incarnation, slot.host)
        slot.seen = time.monotonic()
        try:
            slot.step = self._launcher.launch(request)
        except LaunchError as error:
            slot.state = State.STARTING
            self._host_lost(slot, error.message)
            return
        slot.state = State.STARTING
        self._spawn(self._watch_step(slot, slot.step, request))
        self._spawn(self._host_must_come_up(slot, slot.incarnation))

    async def _watch_step(self, slot: Slot, step: StepHandle, request: MeshStep) -> None:
        ended = await step.wait()
        if slot.step is step:
            self._host_lost(slot, f"{ended.what}{_tail(request)}")

    async def _host_must_come_up(self, slot: Slot, incarnation: int) -> None:
        await asyncio.sleep(self._crew.policy.launch_timeout)
        late = [
            process
            for process in self._crew.processes_of(slot)
            if process.state in (State.STARTING, State.REPAIRING)
            and process.incarnation == incarnation
            and (process.failure is None or process.failure.incarnation < incarnation)
        ]
        if slot.incarnation == incarnation and late:
            self._host_lost(slot, f"it was not up within {self._crew.policy.launch_timeout:g} s")

    async def _watch(self) -> None:
        """Look for silent hosts. A look that comes late itself says nothing about the hosts."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(LOOK)
            now = time.monotonic()
            for slot in self._crew.slots:
                if now - last > 4 * LOOK:
                    slot.seen = now
                elif slot.state is State.UP and now - slot.seen > self._crew.policy.agent_timeout:
                    self._host_lost(
                        slot, f"nothing was heard of it for {self._crew.policy.agent_timeout:g} s", silent=True
                    )
            last = now


async def _end_step(step: StepHandle) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STEP_ENDS_WITHIN):
            await step.kill()
            await step.wait()


async def _in_thread(handler: Handler, failure: MeshFailure) -> object:
    """What a handler of the user's answers, from a thread of its own; None when it raises or takes too long."""
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[object] = loop.create_future()

    def run() -> None:
        answer: object = None
        try:
            answer = handler(failure)
        except Exception:
            log.exception("a handler of failures failed itself")
        with contextlib.suppress(RuntimeError):  # the mesh has ended meanwhile
            loop.call_soon_threadsafe(_set, answered, answer)

    threading.Thread(target=run, name="slurm-ft-handler", daemon=True).start()
    try:
        return await asyncio.wait_for(answered, HANDLER_WITHIN)
    except TimeoutError:
        log.error("a handler of failures has not answered within %g s", HANDLER_WITHIN)
        return None


def _set(future: asyncio.Future[object], value: object) -> None:
    if not future.done():
        future.set_result(value)


async def _tell(hook: Handler, failure: MeshFailure) -> None:
    await _in_thread(hook, failure)


def _tail(request: MeshStep) -> str:
    """The last line that a host process wrote, which says why it did not live."""
    try:
        lines = request.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return f": {lines[-1][:300]}" if lines else ""
