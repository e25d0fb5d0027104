"""The client's side of a mesh: what each host and process is doing, and who hears of what.

Everything here happens in the mesh's own thread and loop (`slurm_ft.mesh.remote.loop`); `supervise` says
what is to be done about a loss, this does it.

    process   STARTING ──> UP ──lost──> REPAIRING ──> UP
                                            ├──> LEFT     handled by the owner: calls get a SupervisionError
                                            ├──> FAILED   propagated: calls raise its MeshFailure
                                            └──> OUT      the mesh shrank: calls go to the others
    host      the same; its processes follow it

A call to a process that is starting or being repaired waits for it, at most as long as the call's time-out
allows. No wait is without an end: a repair is bounded by its own time-out, and repairs by their budgets.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from slurm_ft.agent.process import signal_name
from slurm_ft.errors import LaunchError
from slurm_ft.launch.base import Launcher, StepHandle
from slurm_ft.mesh.errors import CallTimeout, MeshFailure, SupervisionError
from slurm_ft.mesh.extent import Extent, Region
from slurm_ft.mesh.layout import Layout
from slurm_ft.mesh.remote.calls import Answer, Call, numbers
from slurm_ft.mesh.remote.step import MeshStep, worker_log
from slurm_ft.mesh.remote.wire import ClientEnd, Header
from slurm_ft.mesh.supervision import Action, Decision, Loss, Repair, decide, follow
from slurm_ft.mesh.values import log
from slurm_ft.paths import RunPaths
from slurm_ft.spec import Policy

LOOK = 0.5
"""Seconds between two looks for hosts that fell silent."""
HANDLER_WITHIN = 60.0
"""Seconds that a handler of failures may take before the ladder is climbed without its answer."""
STEP_ENDS_WITHIN = 15.0
GIVEN_UP = (Action.PROPAGATE, Action.LEAVE, Action.SHRINK)

Handler = Callable[[MeshFailure], object]


class State(StrEnum):
    """Of a process or a host; see the module's table."""

    STARTING = "starting"
    UP = "up"
    REPAIRING = "repairing"
    LEFT = "lost, handled"
    FAILED = "failed"
    OUT = "taken out"


@dataclass
class Process:
    """One process. `sent` holds the calls that it has and has not answered, `queue` those it is to get."""

    index: int
    state: State = State.STARTING
    incarnation: int = 0
    pid: int = 0
    failure: MeshFailure | None = None
    sent: dict[int, Call] = field(default_factory=dict)
    queue: list[tuple[Call | None, Header, bytes]] = field(default_factory=list)
    asked_to_end: bool = False


@dataclass
class Slot:
    """One host of the mesh, whichever host it is just now. `epoch` changes when older news does not count."""

    number: int
    host: str
    state: State = State.STARTING
    incarnation: int = 0
    peer: bytes = b""
    step: StepHandle | None = None
    seen: float = 0.0


@dataclass(frozen=True)
class ActorRecord:
    """An actor of the mesh, as it is made anew in a process that was repaired."""

    number: int
    header: Header
    payload: bytes
    made: Call


@dataclass
class Meeting:
    """Processes of one call that wait for each other, and the value that one of them brings."""

    wanted: set[int]
    here: set[int] = field(default_factory=set)
    value: str | None = None


class Core:
    """A running mesh. `owner` may have a `__supervise__(failure)`; `fault_hook` hears of what nobody repairs."""

    def __init__(
        self,
        name: str,
        mesh_id: str,
        paths: RunPaths,
        layout: Layout,
        extent: Extent,
        launcher: Launcher,
        policy: Policy,
        owner: object,
        fault_hook: Callable[[MeshFailure], object],
    ) -> None:
        self.name, self.paths, self.layout, self.extent, self.policy = name, paths, layout, extent, policy
        self._id, self._launcher, self._owner, self._fault_hook = mesh_id, launcher, owner, fault_hook
        self.per_host = layout.ranks_per_host
        hosts = [host for replica in layout.replicas for host in replica]
        self.slots = [Slot(number, host) for number, host in enumerate(hosts)]
        self.processes = [Process(index) for index in range(extent.size)]
        self.handlers: list[Handler] = []
        self.failed: dict[int, MeshFailure] = {}
        self.repairs: list[Repair] = []
        self.generation = 0
        self.stopping = False
        self._calls: dict[int, Call] = {}
        self._actors: dict[int, ActorRecord] = {}
        self._meetings: dict[str, Meeting] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._started: list[Call] = []

    # Start and end.

    def start(self, address: str, started: Call) -> None:
        """Listen and launch the hosts. Raises LaunchError when that is not possible."""
        self._end = ClientEnd(self.paths, address, self._from_host)
        self._started.append(started)
        self._remember(started)
        for slot in self.slots:
            self._launch(slot)
        self._spawn(self._watch())

    async def stop(self, grace: float) -> None:
        """End all processes: idle ones at once, busy ones after `grace` seconds."""
        if self.stopping:
            return
        self.stopping = True
        for slot in self.slots:
            if slot.peer:
                self._end.send(slot.peer, {"k": "stop", "grace": grace})
        await asyncio.gather(*(self._ended(slot, grace + 3.0) for slot in self.slots))
        await asyncio.gather(*self._ending, return_exceptions=True)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        gone = MeshFailure(self.name, (self.extent.point(0),), self.slots[0].host, "the mesh was stopped")
        for call in list(self._calls.values()):
            for index in list(call.waiting):
                call.fail(index, SupervisionError(call.point(index), gone))
        self._end.close()

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
            log.error("mesh %s: a fault of slurm-ft itself", self.name, exc_info=error)

    # Calls.

    def submit(self, call: Call, header: Header, payload: bytes, timeout: float | None, wait: bool) -> None:
        """Send a call to all its places that are up; the others get it when they are, if `wait`."""
        self._remember(call)
        if call.over:  # cancelled before it was sent
            return
        if timeout is not None:
            call.timer = asyncio.get_running_loop().call_later(timeout, self._timed_out, call, timeout).cancel
        self._distribute(call, call.points, header, payload, wait)
        call.settle()

    def _remember(self, call: Call) -> None:
        number = call.number  # the call must not hold itself, or its bytes would stay for long
        self._calls[number] = call
        call.raw.add_done_callback(lambda _: self._calls.pop(number, None))

    def broadcast(self, region: Region, header: Header, payload: bytes) -> None:
        """Send without waiting for answers."""
        self._distribute(None, region, header, payload, True)

    def spawn(self, record: ActorRecord) -> None:
        """Make an actor in its places, now and after each repair."""
        self._actors[record.number] = record
        self._remember(record.made)
        up = [index for index in record.made.points if self.processes[index].state is State.UP]
        self._distribute(record.made, up, record.header, record.payload, True)
        for index in set(record.made.points) - set(up):
            if self.processes[index].state in (State.LEFT, State.FAILED, State.OUT):
                self._give_up_call(record.made, index)
        record.made.settle()

    def drop(self, number: int) -> None:
        """Forget an actor here and in its processes."""
        record = self._actors.pop(number, None)
        if record is not None:
            up = [index for index in record.made.points if self.processes[index].state is State.UP]
            self._distribute(None, up, {"k": "drop", "i": 0, "a": number}, b"", True)

    def _distribute(self, call: Call | None, points: Iterable[int], header: Header, payload: bytes, wait: bool) -> None:
        ready = []
        for index in points:
            process = self.processes[index]
            if process.state is State.UP:
                ready.append(index)
                if call is not None:
                    process.sent[call.number] = call
            elif process.state is State.STARTING or (process.state is State.REPAIRING and wait):
                process.queue.append((call, header, payload))
            elif call is not None:
                self._give_up_call(call, index)
        for slot, locals_ in numbers(ready, self.per_host).items():
            self._end.send(self.slots[slot].peer, {**header, "to": locals_}, [payload])

    def _give_up_call(self, call: Call, index: int) -> None:
        process = self.processes[index]
        if process.state is State.OUT:
            call.leave_out(index)
            return
        failure = process.failure
        assert failure is not None
        call.fail(index, SupervisionError(call.point(index), failure))

    def _timed_out(self, call: Call, seconds: float) -> None:
        waiting = list(call.waiting)
        self._cancel_remote(call, waiting)
        for index in waiting:
            call.fail(index, CallTimeout(call.what, call.point(index), seconds))

    def cancel(self, call: Call) -> None:
        """The future was cancelled: have the processes stop too."""
        if call.cancelled:
            return
        call.cancelled = True
        call.raw.set_running_or_notify_cancel()
        if call.timer is not None:
            call.timer()
        waiting = list(call.waiting)
        call.waiting.clear()
        self._cancel_remote(call, waiting)

    def _cancel_remote(self, call: Call, indices: list[int]) -> None:
        sent = []
        for index in indices:
            process = self.processes[index]
            process.queue = [item for item in process.queue if item[0] is not call]
            if process.sent.pop(call.number, None) is not None and process.state is State.UP:
                sent.append(index)
        for slot, locals_ in numbers(sent, self.per_host).items():
            self._end.send(self.slots[slot].peer, {"k": "cancel", "i": call.number, "to": locals_})

    # What hosts tell.

    def _from_host(self, peer: bytes, header: Header, parts: list[bytes]) -> None:
        kind = header["k"]
        if kind == "hello":
            self._hello(peer, header)
            return
        slot = self._slot_of(peer)
        if slot is None:
            return
        slot.seen = time.monotonic()
        if kind == "rs":
            for result, payload in zip(header["rs"], parts, strict=True):
                self._result(slot, result, payload)
        elif kind == "up":
            self._up(slot, header)
        elif kind == "died":
            self._died(slot, header)

    def _slot_of(self, peer: bytes) -> Slot | None:
        """The host that is meant, None when another has taken its place meanwhile."""
        slot = self.slots[int(peer.partition(b".")[0])]
        return slot if slot.peer == peer else None

    def _hello(self, peer: bytes, header: Header) -> None:
        slot = self.slots[header["slot"]]
        if self.stopping or header["incarnation"] != slot.incarnation or slot.state in (State.FAILED, State.OUT):
            self._end.send(peer, {"k": "stop", "grace": 0.0})
            return
        slot.peer, slot.state, slot.seen = peer, State.UP, time.monotonic()

    def _result(self, slot: Slot, header: Header, payload: bytes) -> None:
        index = slot.number * self.per_host + header["local"]
        if header["k"] == "meet":
            self._meet(index, header)
            return
        call = self.processes[index].sent.pop(header["i"], None)
        refusal = header if "error" in header else None
        if call is not None:
            call.answer(index, Answer(payload, refusal, slot.host))
        elif refusal is not None and refusal.get("quiet"):
            log.error("mesh %s: at %s: %s", self.name, self.extent.point(index), refusal["error"])

    def _up(self, slot: Slot, header: Header) -> None:
        process = self.processes[slot.number * self.per_host + header["local"]]
        if process.incarnation != header["incarnation"] or process.state not in (State.STARTING, State.REPAIRING):
            if process.state is State.OUT:
                self._end.send(slot.peer, {"k": "kill", "local": header["local"]})
            return
        process.state, process.pid, process.failure = State.UP, header["pid"], None
        self.failed.pop(process.index, None)
        for record in self._actors.values():
            if process.index in record.made.places:
                # Who waits for the actor is answered once; a later making of it is nobody's call.
                waits = process.index in record.made.waiting
                header = record.header if waits else {**record.header, "quiet": True}
                self._distribute(record.made if waits else None, [process.index], header, record.payload, True)
        queue, process.queue = process.queue, []
        for call, queued, payload in queue:
            if call is None or process.index in call.waiting:
                self._distribute(call, [process.index], queued, payload, True)
        for call in self._started:
            call.answer(process.index, Answer(NONE))
        self._started = [call for call in self._started if not call.over]

    def _died(self, slot: Slot, header: Header) -> None:
        process = self.processes[slot.number * self.per_host + header["local"]]
        if self.stopping or process.incarnation != header["incarnation"] or process.state not in (
            State.STARTING, State.UP, State.REPAIRING,
        ):  # fmt: skip
            return
        code = header["code"]
        if process.asked_to_end:
            process.asked_to_end = False
            self._lost([process], "it was restarted on request", slot, "process", signal=-code if code < 0 else None)
            self._apply(Loss(slot.number, process.index), Decision(Action.RESTART, 0.0, "on request"))
            return
        cause = f"killed by {signal_name(-code)}" if code < 0 else f"it exited with code {code}"
        failure = self._lost(
            [process], cause, slot, "process", code=code if code >= 0 else None, signal=-code if code < 0 else None
        )
        self._spawn(self._supervise(Loss(slot.number, process.index), failure))

    # Losses and repairs.

    def _lost(self, lost: list[Process], cause: str, slot: Slot, kind: str, **seen: Any) -> MeshFailure:
        """Tell the calls that wait for these processes, and have later ones wait for the repair."""
        points = tuple(self.extent.point(process.index) for process in lost)
        log_file = worker_log(self.paths.root, lost[0].index, lost[0].incarnation)
        failure = MeshFailure(
            self.name, points, slot.host, cause, kind=kind, incarnation=lost[0].incarnation, log=str(log_file), **seen
        )
        for process in lost:
            process.state, process.failure, process.pid = State.REPAIRING, failure, 0
            sent, process.sent = process.sent, {}
            for call in sent.values():
                call.fail(process.index, SupervisionError(call.point(process.index), failure))
                self._end_meetings(call, process.index, failure)
        return failure

    def _processes_of(self, slot: Slot) -> list[Process]:
        return self.processes[slot.number * self.per_host : (slot.number + 1) * self.per_host]

    def _host_lost(self, slot: Slot, cause: str, silent: bool = False) -> None:
        if self.stopping or slot.state in (State.FAILED, State.OUT, State.LEFT, State.REPAIRING):
            return
        slot.state, slot.peer = State.REPAIRING, b""
        alive = [p for p in self._processes_of(slot) if p.state is not State.OUT]
        if alive:
            failure = self._lost(alive, cause, slot, "host")
            self._spawn(self._supervise(Loss(slot.number, None, silent), failure))

    async def _supervise(self, loss: Loss, failure: MeshFailure) -> None:
        slot = self.slots[loss.slot]
        concerned = self._concerned(loss)
        mark = [(process.incarnation, process.failure) for process in concerned], slot.incarnation

        def overtaken() -> bool:
            return self.stopping or mark != ([(p.incarnation, p.failure) for p in concerned], slot.incarnation)

        log.warning("%s", failure.report())
        decision = await self._ask(loss, failure)
        if overtaken():
            return
        if decision is None:
            decision = decide(time.monotonic(), loss, self.repairs, self.policy, len(self.layout.spares))
        failure.why = decision.why
        await asyncio.sleep(decision.delay)
        if not overtaken():
            log.warning("mesh %s: %s: %s", self.name, decision.action, decision.why)
            self._apply(loss, decision)

    def _concerned(self, loss: Loss) -> list[Process]:
        slot = self.slots[loss.slot]
        found = self._processes_of(slot) if loss.index is None else [self.processes[loss.index]]
        return [process for process in found if process.state is not State.OUT]

    async def _ask(self, loss: Loss, failure: MeshFailure) -> Decision | None:
        """What the user's handlers say, the youngest first, then the owner."""
        hook = getattr(self._owner, "__supervise__", None)
        for handler in [*reversed(self.handlers), *([hook] if hook is not None else [])]:
            answer = await _in_thread(handler, failure)
            spares = len(self.layout.spares)
            found = follow(answer, time.monotonic(), loss, self.repairs, self.policy, spares)
            if found is not None:
                return found
        return None

    def _apply(self, loss: Loss, decision: Decision) -> None:
        slot, action = self.slots[loss.slot], decision.action
        if action in GIVEN_UP:
            self._give_up(loss, action)
            return
        self.repairs.append(Repair(time.monotonic(), action, loss.slot, loss.index))
        self.generation += 1
        if action is Action.RESTART and loss.index is not None and slot.state is State.UP:
            self._restart(slot, self.processes[loss.index])
        else:
            self._spawn(self._restart_host(slot, replace=action is Action.REPLACE))

    def _restart(self, slot: Slot, process: Process) -> None:
        process.incarnation = self.generation
        local = process.index % self.per_host
        self._end.send(slot.peer, {"k": "fork", "local": local, "incarnation": process.incarnation})
        self._spawn(self._must_come_up(slot, process, process.incarnation))

    async def _must_come_up(self, slot: Slot, process: Process, incarnation: int) -> None:
        await asyncio.sleep(self.policy.launch_timeout)
        if process.incarnation == incarnation and process.state is State.REPAIRING and slot.peer:
            self._end.send(slot.peer, {"k": "kill", "local": process.index % self.per_host})

    async def _restart_host(self, slot: Slot, replace: bool) -> None:
        old, slot.peer, slot.state, slot.step = slot.step, b"", State.REPAIRING, None
        alive = [process for process in self._processes_of(slot) if process.state is not State.OUT]
        others = [process for process in alive if process.state is not State.REPAIRING]
        if others:
            self._lost(others, "its host is started again", slot, "host")
        slot.incarnation = self.generation
        for process in alive:
            process.incarnation = slot.incarnation
        if replace:
            self.layout = self.layout.without(slot.host)
            replica, place = divmod(slot.number, len(self.layout.replicas[0]))
            slot.host = self.layout.hosts_of(replica)[place]
            if old is not None:
                self._end_in_background(old)  # its host may not answer: nobody waits for it
        elif old is not None:
            await _end_step(old)
        if not self.stopping:
            self._launch(slot)

    def _end_in_background(self, step: StepHandle) -> None:
        task = asyncio.get_running_loop().create_task(_end_step(step))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _launch(self, slot: Slot) -> None:
        request = MeshStep(self.paths, self._id, slot.number, slot.incarnation, slot.host)
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
        await asyncio.sleep(self.policy.launch_timeout)
        late = [
            process
            for process in self._processes_of(slot)
            if process.state in (State.STARTING, State.REPAIRING)
            and process.incarnation == incarnation
            and (process.failure is None or process.failure.incarnation < incarnation)
        ]
        if slot.incarnation == incarnation and late:
            self._host_lost(slot, f"it was not up within {self.policy.launch_timeout:g} s")

    async def _watch(self) -> None:
        """Look for silent hosts. A look that comes late itself says nothing about the hosts."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(LOOK)
            now = time.monotonic()
            for slot in self.slots:
                if now - last > 4 * LOOK:
                    slot.seen = now
                elif slot.state is State.UP and now - slot.seen > self.policy.agent_timeout:
                    self._host_lost(slot, f"nothing was heard of it for {self.policy.agent_timeout:g} s", silent=True)
            last = now

    def _give_up(self, loss: Loss, action: Action) -> None:
        slot = self.slots[loss.slot]
        state = {Action.LEAVE: State.LEFT, Action.PROPAGATE: State.FAILED, Action.SHRINK: State.OUT}[action]
        concerned = self._unit(loss) if action is Action.SHRINK else self._concerned(loss)
        for process in concerned:
            process.failure = process.failure or self._concerned(loss)[0].failure
            if process.state is State.UP:
                self._end.send(self.slots[process.index // self.per_host].peer,
                               {"k": "kill", "local": process.index % self.per_host})  # fmt: skip
            process.state = state
            self._let_go(process)
        if action is Action.SHRINK:
            self.generation += 1
        if action is Action.PROPAGATE:
            self.failed.update({p.index: p.failure for p in concerned if p.failure is not None})
            failure = concerned[0].failure
            assert failure is not None
            self._spawn(_tell(self._fault_hook, failure))
        if loss.index is None:
            slot.state, slot.peer = state, b""
            if slot.step is not None:
                self._end_in_background(slot.step)
                slot.step = None

    def _let_go(self, process: Process) -> None:
        """Answer whoever still waits for a process that does not come back."""
        sent, process.sent, process.queue = process.sent, {}, []
        for call in [*sent.values(), *self._calls.values()]:
            if process.index in call.waiting:
                self._give_up_call(call, process.index)

    def _unit(self, loss: Loss) -> list[Process]:
        """What goes when the mesh shrinks: the replica, or the host or the process if there is but one of it."""
        replica, _ = divmod(loss.slot, len(self.layout.replicas[0]))
        in_replica = len(self.layout.replicas[0]) * self.per_host
        if len(self.layout.replicas) > 1:
            return self.processes[replica * in_replica : (replica + 1) * in_replica]
        if len(self.slots) > 1 or loss.index is None:
            return self._processes_of(self.slots[loss.slot])
        return [self.processes[loss.index]]

    # What the user asks for.

    def restart(self, region: Region) -> None:
        """End these processes and start them again, also those that were given up."""
        for slot_number, locals_ in numbers(region, self.per_host).items():
            slot = self.slots[slot_number]
            if slot.state is not State.UP:
                if slot.state is not State.STARTING and slot.state is not State.REPAIRING:
                    self._revive(self._processes_of(slot))
                    self._apply(Loss(slot_number), Decision(Action.RESTART_HOST, 0.0, "on request"))
                continue
            for process in (self.processes[slot_number * self.per_host + local] for local in locals_):
                if process.state is State.UP:
                    process.asked_to_end = True
                    self._end.send(slot.peer, {"k": "kill", "local": process.index % self.per_host})
                elif process.state in (State.LEFT, State.FAILED, State.OUT):
                    self._revive([process])
                    self._apply(Loss(slot_number, process.index), Decision(Action.RESTART, 0.0, "on request"))

    def _revive(self, processes: list[Process]) -> None:
        for process in processes:
            process.state = State.REPAIRING
            self.failed.pop(process.index, None)

    def wait_up(self, call: Call) -> None:
        """Answer the call when each of its places is up."""
        self._remember(call)
        for index in call.points:
            state = self.processes[index].state
            if state is State.UP and not self.processes[index].asked_to_end:
                call.answer(index, Answer(NONE))
            elif state in (State.LEFT, State.FAILED, State.OUT):
                self._give_up_call(call, index)
        if not call.over:
            self._started.append(call)

    # Meetings of the processes of one call.

    def _meet(self, index: int, header: Header) -> None:
        """One more process has come to a meeting. All hear the value when the last has come."""
        call, key, wanted = self._calls.get(header["i"]), header["key"], set(header["of"])
        lost = next((call.lost[place] for place in wanted if place in call.lost), None) if call is not None else None
        if call is None or lost is not None:
            self._met([index], {"key": key, "error": lost.report() if lost is not None else "the call is over"})
            return
        if key not in self._meetings:
            self._meetings[key] = Meeting(wanted)
            call.raw.add_done_callback(lambda _: self._meetings.pop(key, None))
        meeting = self._meetings[key]
        meeting.here.add(index)
        if header["v"] is not None:
            meeting.value = header["v"]
        if meeting.here >= wanted and meeting.value is not None:
            self._met(wanted, {"key": key, "v": meeting.value})

    def _end_meetings(self, call: Call, index: int, failure: MeshFailure) -> None:
        call.lost[index] = failure
        for key, meeting in self._meetings.items():
            if key.startswith(f"{call.number}/") and index in meeting.wanted:
                self._met(meeting.here, {"key": key, "error": failure.report()})

    def _met(self, indices: Iterable[int], header: Header) -> None:
        up = [index for index in indices if self.processes[index].state is State.UP]
        for slot, locals_ in numbers(up, self.per_host).items():
            self._end.send(self.slots[slot].peer, {"k": "met", **header, "to": locals_})


NONE = b"\x80\x05N."
"""None, pickled."""


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
