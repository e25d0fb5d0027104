"""Slots of worker loops over pretended steps. Monarch itself is not needed for them."""

from __future__ import annotations

import asyncio
import concurrent.futures
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from slurm_ft.launch.base import Ended
from slurm_ft.monarch.slots import Slot, Slots
from slurm_ft.paths import RunPaths
from tests.waiting import wait_until


class Step:
    """A step that ends when it is told to."""

    def __init__(self) -> None:
        self.ended: concurrent.futures.Future[Ended] = concurrent.futures.Future()

    async def wait(self) -> Ended:
        return await asyncio.shield(asyncio.wrap_future(self.ended))

    async def kill(self) -> None:
        self.end()

    def end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(Ended(1, "the step exited with code 1"))


class Steps:
    def __init__(self) -> None:
        self.started: list[Step] = []

    def launch(self, request: object) -> Step:
        self.started.append(Step())
        return self.started[-1]


def test_a_replacement_that_is_lost_again_is_not_handed_out_but_the_next_one(tmp_path: Path) -> None:
    steps: Any = Steps()
    slots = Slots(RunPaths(tmp_path / "run"), lambda: steps, ["h0"], 1, "127.0.0.1", silence=60.0)

    def up(incarnation: int) -> Slot:
        wait_until(lambda: len(steps.started) > incarnation)
        slot = slots._slots[0]
        assert slot.incarnation == incarnation
        slot.up.set_result(None)
        return slot

    def lose(slot: Slot) -> None:
        steps.started[slot.incarnation].end()
        slot.lost.result(10)

    try:
        first = up(0)
        lose(first)
        lose(up(1))
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(slots.replacement, first, 20.0)  # the third is begun a moment later
            third = up(2)
            assert asked.result(20) is third
        lose(third)
    finally:
        slots.close()
        wait_until(lambda: not slots._loop.is_running())
        slots._loop.close()
    assert len(steps.started) == 3, "a step was started although the job is closed"
