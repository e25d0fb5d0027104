"""A step whose srun client is gone: it is left alone, and its end is learnt of in other ways."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from slurm_ft.launch import srun
from slurm_ft.launch.base import Ended, StepRequest, Watched
from slurm_ft.launch.helper import Allocation
from slurm_ft.launch.srun import Listing, SrunStep, head_argv
from slurm_ft.paths import RunPaths
from slurm_ft.slurm.client import Done, StepView, Unknown, Unreachable
from tests.waiting import until, wait_until


class Slurm:
    """The steps that Slurm lists (None: it does not answer), and what was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, listed: dict[str, str] | None) -> None:
        self.listed, self.asked = listed, list[str]()
        self.signals: list[tuple[str, int, signal.Signals]] = []
        monkeypatch.setattr(srun, "LOOKS", (0.0, 0.01))

    def steps(self, job_id: str) -> list[StepView] | Unknown | Unreachable:
        self.asked.append("squeue")
        if self.listed is None:
            return Unreachable("Socket timed out")
        return [StepView(step_id, name, "node1") for step_id, name in self.listed.items()]

    def signal_step(self, job_id: str, step_id: int, number: signal.Signals) -> Done:
        self.asked.append("scancel")
        self.signals.append((job_id, step_id, number))
        self.listed = {}
        return Done()


LISTED = {"12.3": "sft-r0-s1", "12.4": "sft-r1-s1", "12.batch": "batch"}


Story = Callable[[SrunStep, Slurm], Awaitable[None]]


def detached(
    folder: Path, monkeypatch: pytest.MonkeyPatch, listed: dict[str, str] | None, story: Story
) -> tuple[Ended, Slurm]:
    """How the step ended after the story, which begins when its client was killed."""

    async def within() -> Ended:
        client = subprocess.Popen(["sleep", "60"])
        listing = Listing("12", slurm)  # type: ignore[arg-type]
        step = SrunStep(StepRequest(RunPaths(folder), 0, 1, ("node1",)), listing, Watched(client.pid, client))
        waiting = asyncio.ensure_future(step.wait())
        client.kill()
        async with asyncio.timeout(10):
            await story(step, slurm)
            return await waiting

    slurm = Slurm(monkeypatch, listed)
    return asyncio.run(within()), slurm


async def _looked_twice(step: SrunStep, slurm: Slurm) -> None:
    await until(lambda: slurm.asked.count("squeue") >= 1)
    await asyncio.sleep(0.05)
    assert "scancel" not in slurm.asked


def test_it_is_left_alone_until_its_agents_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(step: SrunStep, slurm: Slurm) -> None:
        await _looked_twice(step, slurm)
        step.left()

    ended, slurm = detached(tmp_path, monkeypatch, LISTED, story)
    assert ended == Ended(None, "its agents have left")
    assert "scancel" not in slurm.asked


def test_no_answer_of_slurm_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(step: SrunStep, slurm: Slurm) -> None:
        await _looked_twice(step, slurm)
        step.left()

    assert detached(tmp_path, monkeypatch, None, story)[0].what == "its agents have left"


def test_a_step_that_went_with_its_client_is_found_out_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(step: SrunStep, slurm: Slurm) -> None:
        pass

    ended, _ = detached(tmp_path, monkeypatch, {"12.4": "sft-r1-s1"}, story)
    assert ended == Ended(None, "Slurm no longer has the step, whose srun was killed by SIGKILL")


def test_it_is_ended_by_its_id_and_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(step: SrunStep, slurm: Slurm) -> None:
        await _looked_twice(step, slurm)
        await step.kill()

    ended, slurm = detached(tmp_path, monkeypatch, LISTED, story)
    assert ended == Ended(None, "the step was ended")
    assert set(slurm.signals) == {("12", 3, signal.SIGKILL)} and slurm.asked[-1] == "squeue"


def test_many_steps_ask_slurm_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> list[list[str] | None]:
        listing = Listing("12", slurm)  # type: ignore[arg-type]
        return await asyncio.gather(*(listing.ids(f"sft-r{number}-s1", 0.5) for number in range(50)))

    slurm = Slurm(monkeypatch, LISTED)
    assert asyncio.run(ask())[:3] == [["12.3"], ["12.4"], []]
    assert slurm.asked == ["squeue"]


@pytest.mark.parametrize(
    ("code", "words", "unanswered"),
    [
        (97, "srun: error: Unable to confirm allocation for job 1: Unable to contact slurm controller", True),
        (97, "srun: error: Unable to create step for job 1: Socket timed out on send/recv operation", True),
        (97, "srun: error: Unable to create step for job 1: Requested node configuration is not available", False),
        (1, "srun: error: Unable to contact slurm controller", False),
    ],
)
def test_an_srun_that_found_no_slurm_is_told_apart(tmp_path: Path, code: int, words: str, unanswered: bool) -> None:
    request = StepRequest(RunPaths(tmp_path), 0, 1, ("node1",))
    request.log.parent.mkdir(parents=True)
    request.log.write_text(f"{words}\nsrun: Check SLURM_JOB_ID environment variable. Expired or invalid job 1\n")

    async def within() -> Ended:
        client = subprocess.Popen(["sh", "-c", f"exit {code}"])
        return await SrunStep(request, Listing("1"), Watched(client.pid, client)).wait()

    assert asyncio.run(within()).unanswered is unanswered


def test_an_srun_that_ended_leaves_no_thread(tmp_path: Path) -> None:
    request = StepRequest(RunPaths(tmp_path), 0, 1, ("node1",))

    async def within() -> Ended:
        client = subprocess.Popen(["sh", "-c", "exit 1"])
        return await SrunStep(request, Listing("1"), Watched(client.pid, client)).wait()

    assert asyncio.run(within()).code == 1
    wait_until(lambda: not any(thread.name == "words" for thread in threading.enumerate()))


GUARDED = """
import os, sys, time
r, w = os.pipe()
if os.fork() == 0:
    os.close(w)
    os.read(r, 1)  # ends when the first process does
    open(sys.argv[1], "w").write("the step was ended")
    os._exit(0)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("way", ["as we do", "as anybody does"])
def test_a_client_is_ended_without_its_guard_ending_the_step(tmp_path: Path, way: str) -> None:
    client = subprocess.Popen([sys.executable, "-c", GUARDED, str(tmp_path / "ended")], stdout=subprocess.PIPE)
    assert client.stdout is not None
    with client.stdout:
        client.stdout.readline()
        if way == "as we do":
            srun.let_go(client.pid)
            assert client.wait(10) == -signal.SIGKILL
            assert not (tmp_path / "ended").exists()
        else:
            client.kill()
            client.wait(10)
            wait_until(lambda: (tmp_path / "ended").exists())


def test_a_head_gets_a_step_of_its_own_with_the_hosts_cpus_and_none_of_its_gpus() -> None:
    argv = head_argv("node2", 3, Allocation("12", 8, 4), ["python", "-m", "head"])
    options = {"--jobid=12", "--job-name=sft-head-3", "--nodelist=node2", "--nodes=1", "--ntasks=1", "--overlap",
               "--exact", "--mem=0", "--cpus-per-task=8", "--gres=none", "--input=none"}  # fmt: skip
    assert argv[0] == "srun" and options <= set(argv)
    assert argv[-3:] == ["python", "-m", "head"]
