"""A step whose srun client was killed is cancelled by its id and awaited; no other step is touched."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path

import pytest

from slurm_ft.launch.base import StepRequest, Watched
from slurm_ft.launch.srun import SrunStep
from slurm_ft.paths import RunPaths
from slurm_ft.slurm.client import Done, StepView, Unknown, Unreachable


class FakeSlurm:
    """Lists two steps; ours goes at its second KILL. Its first answer is none at all."""

    def __init__(self) -> None:
        self.left, self.asked = 2, 0
        self.signals: list[tuple[str, int, signal.Signals]] = []

    def steps(self, job_id: str) -> list[StepView] | Unknown | Unreachable:
        self.asked += 1
        if self.asked == 1:
            return Unreachable("Socket timed out")
        ours = [StepView("7.3", "sft-r1-s2", "node2")] if self.left else []
        return [StepView("7.batch", "batch", "node1"), StepView("7.2", "sft-r1-s1", "node1"), *ours]

    def signal_step(self, job_id: str, step_id: int, number: signal.Signals) -> Done:
        self.signals.append((job_id, step_id, number))
        self.left -= 1
        return Done()


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    async def at_once(seconds: float) -> None:
        return None

    monkeypatch.setattr("slurm_ft.launch.srun.asyncio.sleep", at_once)
    return FakeSlurm()


def test_a_step_whose_client_was_killed_is_killed_by_its_id_until_it_is_gone(slurm: FakeSlurm, tmp_path: Path) -> None:
    async def story() -> int | None:
        client = subprocess.Popen(["sleep", "600"])
        step = SrunStep(StepRequest(RunPaths(tmp_path), 1, 2, ("node2",)), "7", Watched(client.pid, client))
        step._slurm = slurm  # type: ignore[assignment]
        client.kill()
        return (await step.wait()).code

    assert asyncio.run(story()) == -signal.SIGKILL
    assert slurm.signals == [("7", 3, signal.SIGKILL)] * 2


def test_no_answer_of_slurm_is_not_taken_for_the_end_of_the_step(slurm: FakeSlurm, tmp_path: Path) -> None:
    step = SrunStep(StepRequest(RunPaths(tmp_path), 1, 2, ("node2",)), "7", Watched(0))
    step._slurm = slurm  # type: ignore[assignment]
    assert asyncio.run(step._step_ids()) is None
    assert asyncio.run(step._step_ids()) == ["7.3"]
