"""Calls on their way: to the processes that are up, to those that will be, and back.

A call to a process that is starting or being repaired waits for it, at most as long as the call's time-out
allows. No wait is without an end: a repair is bounded by its own time-out, and repairs by their budgets.
Used in the mesh's loop only.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field

from slurm_ft.errors import UsageError
from slurm_ft.mesh.errors import CallTimeout, MeshFailure, SupervisionError
from slurm_ft.mesh.extent import Region
from slurm_ft.mesh.remote.calls import Answer, Call, numbers
from slurm_ft.mesh.remote.framing import Header
from slurm_ft.mesh.remote.state import GIVEN_UP, Crew, Process, Slot, State
from slurm_ft.mesh.values import log

NONE = b"\x80\x05N."
"""None, pickled."""


def _was_stopped(header: Header) -> Answer:
    """What a process answers that knows no such actor."""
    error = UsageError(f"the actor of {header['what']} was stopped")
    return Answer(pickle.dumps(error), {"error": f"UsageError: {error.message}", "trace": ""})


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


class Switchboard:
    """The calls, actors and meetings of one mesh."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._calls: dict[int, Call] = {}
        self._actors: dict[int, ActorRecord] = {}
        self._meetings: dict[str, Meeting] = {}
        self._started: list[Call] = []

    def submit(self, call: Call, header: Header, payload: bytes, timeout: float | None, wait: bool) -> None:
        """Send a call to all its places that are up; the others get it when they are, if `wait`."""
        if not self._remember(call):
            return
        number = header.get("a")
        if number is not None and number not in self._actors:
            for index in call.points:
                call.answer(index, _was_stopped(header))
            return
        if timeout is not None:
            call.timer = asyncio.get_running_loop().call_later(timeout, self._timed_out, call, timeout).cancel
        self._distribute(call, call.points, header, payload, wait)
        call.settle()

    def broadcast(self, region: Region, header: Header, payload: bytes) -> None:
        """Send without waiting for answers."""
        if self._crew.stopping:
            return
        self._distribute(None, region, header, payload, True)

    def spawn(self, record: ActorRecord) -> None:
        """Make an actor in its places, now and after each repair."""
        self._actors[record.number] = record
        if not self._remember(record.made):
            return
        up = [index for index in record.made.points if self._crew.processes[index].state is State.UP]
        self._distribute(record.made, up, record.header, record.payload, True)
        for index in set(record.made.points) - set(up):
            if self._crew.processes[index].state in GIVEN_UP:
                self._give_up_call(record.made, index)
        record.made.settle()

    def drop(self, number: int) -> None:
        """Forget an actor here and in its processes."""
        record = self._actors.pop(number, None)
        if record is not None and not self._crew.stopping:
            up = [index for index in record.made.points if self._crew.processes[index].state is State.UP]
            self._distribute(None, up, {"k": "drop", "i": 0, "a": number}, b"", True)
            for index in set(record.made.points) - set(up):  # they will never hear of it
                self._refuse_queued(index, number)
                if index in record.made.waiting:
                    record.made.answer(index, _was_stopped(record.header))

    def _refuse_queued(self, index: int, number: int) -> None:
        """Answer the calls of an actor that was stopped while its process was being repaired."""
        process = self._crew.processes[index]
        stopped = [item for item in process.queue if item[1].get("a") == number]
        process.queue = [item for item in process.queue if item[1].get("a") != number]
        for call, header, _ in stopped:
            if call is not None and index in call.waiting:
                call.answer(index, _was_stopped(header))

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

    def wait_up(self, call: Call) -> None:
        """Answer the call when each of its places is up."""
        if not self._remember(call):
            return
        for index in call.points:
            state = self._crew.processes[index].state
            if state is State.UP and not self._crew.processes[index].asked_to_end:
                call.answer(index, Answer(NONE))
            elif state in GIVEN_UP:
                self._give_up_call(call, index)
        if not call.over:
            self._started.append(call)

    # What becomes of processes.

    def up(self, process: Process) -> None:
        """A process is up: make its actors, then send what waited for it."""
        for record in self._actors.values():
            if process.index in record.made.places:
                # Who waits for the actor is answered once; a later making of it is nobody's call.
                waits = process.index in record.made.waiting
                header = record.header if waits else {**record.header, "quiet": True}
                self._distribute(record.made if waits else None, [process.index], header, record.payload, True)
        queue, process.queue = process.queue, []
        for call, header, payload in queue:
            if call is None or process.index in call.waiting:
                self._distribute(call, [process.index], header, payload, True)
        for call in self._started:
            call.answer(process.index, Answer(NONE))
        self._started = [call for call in self._started if not call.over]

    def lost(self, process: Process, failure: MeshFailure) -> None:
        """A process is gone: tell the calls that it had. Those that it was still to get wait on."""
        sent, process.sent = process.sent, {}
        for call in sent.values():
            call.fail(process.index, SupervisionError(call.point(process.index), failure))
            self._end_meetings(call, process.index, failure)

    def let_go(self, process: Process) -> None:
        """Answer whoever still waits for a process that does not come back."""
        sent, process.sent, process.queue = process.sent, {}, []
        for call in [*sent.values(), *self._calls.values()]:
            if process.index in call.waiting:
                self._give_up_call(call, process.index)

    def result(self, slot: Slot, header: Header, payload: bytes) -> None:
        index = slot.number * self._crew.per_host + header["local"]
        if header["k"] == "meet":
            self._meet(index, header)
            return
        call = self._crew.processes[index].sent.pop(header["i"], None)
        refusal = header if "error" in header else None
        if call is not None:
            call.answer(index, Answer(payload, refusal, slot.host))
        elif refusal is not None and refusal.get("quiet"):
            log.error("mesh %s: at %s: %s", self._crew.name, self._crew.extent.point(index), refusal["error"])

    def fail_all(self) -> None:
        """The mesh has ended: so have all its calls."""
        for call in list(self._calls.values()):
            self._fail_stopped(call)

    def _fail_stopped(self, call: Call) -> None:
        crew = self._crew
        gone = MeshFailure(crew.name, (crew.extent.point(0),), crew.slots[0].host, "the mesh was stopped")
        for index in list(call.waiting):
            call.fail(index, SupervisionError(call.point(index), gone))

    # Within.

    def _remember(self, call: Call) -> bool:
        """False for a call that is over already: cancelled before it was sent, or the mesh has ended."""
        if self._crew.stopping:
            self._fail_stopped(call)
            return False
        number = call.number  # the call must not hold itself, or its bytes would stay for long
        self._calls[number] = call
        call.raw.add_done_callback(lambda _: self._calls.pop(number, None))
        return not call.over

    def _distribute(self, call: Call | None, points: Iterable[int], header: Header, payload: bytes, wait: bool) -> None:
        ready = []
        for index in points:
            process = self._crew.processes[index]
            if process.state is State.UP:
                ready.append(index)
                if call is not None:
                    process.sent[call.number] = call
            elif process.state is State.STARTING or (process.state is State.REPAIRING and wait):
                process.queue.append((call, header, payload))
            elif call is not None:
                self._give_up_call(call, index)
        for slot, locals_ in numbers(ready, self._crew.per_host).items():
            self._crew.end.send(self._crew.slots[slot].peer, {**header, "to": locals_}, [payload])

    def _give_up_call(self, call: Call, index: int) -> None:
        process = self._crew.processes[index]
        if process.failure is not None:
            self._end_meetings(call, index, process.failure)
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

    def _cancel_remote(self, call: Call, indices: list[int]) -> None:
        sent = []
        for index in indices:
            process = self._crew.processes[index]
            process.queue = [item for item in process.queue if item[0] is not call]
            if process.sent.pop(call.number, None) is not None and process.state is State.UP:
                sent.append(index)
        for slot, locals_ in numbers(sent, self._crew.per_host).items():
            self._crew.end.send(self._crew.slots[slot].peer, {"k": "cancel", "i": call.number, "to": locals_})

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
        for key, meeting in list(self._meetings.items()):  # a call may be cancelled meanwhile, in the user's thread
            if key.startswith(f"{call.number}/") and index in meeting.wanted:
                self._met(meeting.here, {"key": key, "error": failure.report()})

    def _met(self, indices: Iterable[int], header: Header) -> None:
        up = [index for index in indices if self._crew.processes[index].state is State.UP]
        for slot, locals_ in numbers(up, self._crew.per_host).items():
            self._crew.end.send(self._crew.slots[slot].peer, {"k": "met", **header, "to": locals_})
