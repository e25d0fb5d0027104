"""Calls over any history of losses and repairs: each one ends, with one answer a place, and none is mixed up."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import random
from typing import Any

import pytest

from slurm_ft.mesh.errors import MeshFailure, SupervisionError
from slurm_ft.mesh.extent import Extent
from slurm_ft.mesh.layout import assign
from slurm_ft.mesh.remote.calls import Call, value_mesh
from slurm_ft.mesh.remote.repairs import Repairs
from slurm_ft.mesh.remote.state import GIVEN_UP, Crew, Process, State
from slurm_ft.mesh.remote.switchboard import ActorRecord, Switchboard
from slurm_ft.mesh.supervision import Action, Loss
from slurm_ft.paths import RunPaths
from slurm_ft.spec import Policy

HOSTS, PER_HOST = 2, 2
SIZE = HOSTS * PER_HOST


class World:
    """A switchboard whose wire leads to pretended processes: what each has been sent and has not answered."""

    def __init__(self) -> None:
        layout = assign([f"h{n}" for n in range(HOSTS)], 1, HOSTS, ranks_per_host=PER_HOST)
        self.extent = Extent(("replica", "host", "gpu"), (1, HOSTS, PER_HOST))
        self.crew = Crew("m", RunPaths("/nowhere"), layout, self.extent, Policy())
        self.crew.end = self  # type: ignore[assignment]
        for slot in self.crew.slots:
            slot.peer = str(slot.number).encode()
        self.board = Switchboard(self.crew)
        self.inbox: list[list[dict[str, Any]]] = [[] for _ in range(SIZE)]
        self.made: list[list[int]] = [[] for _ in range(SIZE)]
        self.calls: list[Call] = []
        self.cancelled: set[int] = set()
        self.numbers = itertools.count(1)

    def send(self, peer: bytes, header: dict[str, Any], parts: list[bytes] = ()) -> None:  # type: ignore[assignment]
        for local in header["to"]:
            index = int(peer) * PER_HOST + local
            assert self.crew.processes[index].state is State.UP
            if header["k"] == "cancel":
                self.inbox[index] = [sent for sent in self.inbox[index] if sent["i"] != header["i"]]
            else:
                self.inbox[index].append(header)

    def call(self, wait: bool) -> None:
        call = Call(next(self.numbers), self.extent.region, "f")
        self.calls.append(call)
        self.board.submit(call, {"k": "call", "i": call.number}, b"", None, wait)

    def spawn(self) -> None:
        number = next(self.numbers)
        made = Call(number, self.extent.region, "actor")
        self.calls.append(made)
        self.board.spawn(ActorRecord(number, {"k": "spawn", "i": number, "a": number, "what": "actor"}, b"", made))

    def cancel(self) -> None:
        for call in self.calls:
            if not call.over and call.raw.cancel():
                self.board.cancel(call)
                return

    def answer(self, index: int) -> None:
        """The process answers the oldest of what it was sent."""
        if not self.inbox[index]:
            return
        header = self.inbox[index].pop(0)
        if header["k"] == "spawn":
            self.made[index].append(header["a"])
        slot = self.crew.slots[index // PER_HOST]
        reply = {"k": "r", "i": header["i"], "local": index % PER_HOST}
        if not header.get("quiet"):
            self.board.result(slot, reply, pickle.dumps((header["i"], index)))

    def up(self, index: int) -> None:
        process = self.crew.processes[index]
        if process.state in (State.STARTING, State.REPAIRING):
            process.state = State.UP
            self.board.up(process)

    def lose(self, index: int) -> None:
        process = self.crew.processes[index]
        if process.state is State.UP:
            process.state = State.REPAIRING
            process.failure = MeshFailure("m", (self.extent.point(index),), "h", "killed")
            self.inbox[index], self.made[index] = [], []
            self.board.lost(process, process.failure)

    def give_up(self, index: int, state: State) -> None:
        process = self.crew.processes[index]
        if process.state is State.REPAIRING:
            process.state = state
            self.board.let_go(process)


def history(seed: int) -> list[tuple[Any, ...]]:
    """40 steps, mostly about one process, so that much happens to it. Seeded lists: drawn ones take far longer."""
    chance = random.Random(seed)

    def step() -> tuple[Any, ...]:
        index = chance.choice([1, 1, *range(SIZE)])
        return chance.choice(
            [
                ("call", chance.random() < 0.7),
                ("spawn",),
                ("cancel",),
                *[("answer", index), ("up", index), ("lose", index)] * 2,
                ("give_up", index, chance.choice(GIVEN_UP)),
            ]
        )

    return [step() for _ in range(40)]


@pytest.mark.parametrize("seed", range(0, 400, 50))
def test_every_call_ends_with_one_answer_a_place_whatever_happens(seed: int) -> None:
    for one in range(seed, seed + 50):
        world = World()
        for name, *arguments in history(one):
            getattr(world, name)(*arguments)
        for index in range(SIZE):
            world.up(index)
            while world.inbox[index]:
                world.answer(index)
        for call in world.calls:
            assert call.over, call.number
            if call.raw.cancelled():
                continue
            values = value_mesh(call, call.raw.result())
            assert all(value == (call.number, point.rank) for point, value in values.ok())
            assert all(isinstance(error, SupervisionError) for _, error in values.failed())
            places = {point.rank for point, _ in values.ok()} | {point.rank for point, _ in values.failed()}
            missing = set(range(SIZE)) - places
            assert all(world.crew.processes[index].state is State.OUT for index in missing)


def test_a_call_of_an_actor_that_was_stopped_while_its_process_was_repaired_is_answered() -> None:
    """The new process never hears of the actor: an async call would wait for it there for ever."""
    world = World()
    for index in range(SIZE):
        world.up(index)
    world.spawn()
    number = next(iter(world.board._actors))
    for index in range(SIZE):
        world.answer(index)
    world.lose(0)

    def called() -> Call:
        call = Call(next(world.numbers), world.extent.region, "f")
        world.board.submit(call, {"k": "call", "i": call.number, "a": number, "what": "actor.f"}, b"", None, True)
        return call

    queued = called()
    world.board.drop(number)
    later = called()
    assert later.over
    assert [answer.refusal["error"] for answer in later.raw.result().values() if answer.refusal] == [
        "UsageError: the actor of actor.f was stopped"
    ] * SIZE
    world.up(0)
    for index in range(1, SIZE):
        while world.inbox[index]:
            world.answer(index)
    assert queued.over and queued.raw.result()[0].refusal is not None


def test_who_waits_for_an_actor_that_is_stopped_before_its_process_is_up_is_answered() -> None:
    world = World()
    world.up(0)
    world.spawn()
    (made,) = world.calls
    world.board.drop(made.number)
    for index in range(SIZE):
        world.up(index)
        while world.inbox[index]:
            world.answer(index)
    assert made.over
    answers = made.raw.result()
    assert answers[0].refusal is None and world.made == [[made.number], [], [], []]
    refusals = [answers[index].refusal for index in range(1, SIZE)]
    assert [refusal and refusal["error"] for refusal in refusals] == ["UsageError: the actor of actor was stopped"] * 3


def test_a_meeting_does_not_wait_for_a_process_that_was_given_up() -> None:
    world = World()
    for index in range(SIZE):
        world.up(index)
    world.lose(0)
    world.give_up(0, State.LEFT)
    world.call(wait=True)
    (call,) = world.calls
    header = {"i": call.number, "key": f"{call.number}/x", "of": list(range(SIZE)), "v": None, "k": "meet", "local": 1}
    world.board.result(world.crew.slots[0], header, b"")
    assert [sent["k"] for sent in world.inbox[1]] == ["call", "met"] and "killed" in world.inbox[1][1]["error"]


def test_whoever_sees_that_a_process_failed_or_is_up_finds_its_failure_or_none() -> None:
    """Other threads read both: a state may not be ahead of what a call then meets."""
    world = World()
    seen: list[tuple[object, bool]] = []

    class Seen(Process):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "state":
                seen.append((value, self.index in world.crew.failed))
            super().__setattr__(name, value)

    process = world.crew.processes[1]
    process.__class__ = Seen

    async def story() -> None:
        launcher: Any = None
        repairs = Repairs(world.crew, world.board, "m", launcher, None, lambda failure: None)
        world.up(1)
        world.lose(1)
        repairs._give_up(Loss(0, 1), Action.PROPAGATE)
        repairs._revive([process])
        repairs.up(world.crew.slots[0], {"local": 1, "incarnation": 0, "pid": 7})
        await asyncio.gather(*repairs._tasks)

    asyncio.run(story())
    told = [State.UP, State.REPAIRING, State.FAILED, State.REPAIRING, State.UP]
    assert seen == [(state, state is State.FAILED) for state in told]


@pytest.mark.parametrize("seed", range(0, 400, 50))
def test_a_process_that_is_up_has_every_actor_once(seed: int) -> None:
    for one in range(seed, seed + 50):
        world = World()
        spawned = 0
        for name, *arguments in history(one):
            if name == "cancel":
                continue
            spawned += name == "spawn"
            getattr(world, name)(*arguments)
        for index in range(SIZE):
            world.up(index)
            while world.inbox[index]:
                world.answer(index)
            if world.crew.processes[index].state is State.UP:
                assert len(world.made[index]) == len(set(world.made[index])) == spawned
