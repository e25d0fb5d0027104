"""Health checks as the agent and the controller run them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from slurm_ft.agent import fitness
from slurm_ft.controller.fold import observe
from slurm_ft.controller.spares import SpareWatch
from slurm_ft.controller.state import RunState
from slurm_ft.events import Event, Kind
from slurm_ft.hostspec import HostSpec
from slurm_ft.launch import Launcher
from slurm_ft.launch.helper import Allocation, helper_argv
from slurm_ft.launch.local import LocalLauncher
from slurm_ft.launch.srun import SrunLauncher, step_argv
from slurm_ft.paths import RunPaths
from tests.processes import lives
from tests.waiting import wait_until


def fault(command: str, seconds: float = 5.0) -> str:
    environ = fitness.check_environment(os.environ)
    return asyncio.run(fitness.fault(fitness.shell(command), environ, seconds, again=True))


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("warning\n", 0, ""),
        ("noise\nERROR: no GPUs\nERROR: no room\n", 1, "no GPUs (and 1 more)"),
        ("first\n\nlast words \n", 3, "last words"),
        ("", 3, "the check exited with code 3"),
    ],
)
def test_the_reason_is_the_first_error_of_the_checks_output(text: str, code: int, said: str) -> None:
    assert fitness.words(text, code) == said


def test_a_check_that_passes_is_silent_and_finds_our_own_program_without_a_module() -> None:
    environ = fitness.check_environment({"PATH": "/usr/bin:/bin"})
    assert asyncio.run(fitness.fault(fitness.shell("slurm-ft --version"), environ, 20.0)) == ""
    assert fitness.check_environment({})["PATH"].startswith(os.defpath)


def test_a_check_that_hangs_is_ended_with_all_it_has_started(tmp_path: Path) -> None:
    assert fault(f"sleep 600 & echo $! > {tmp_path}/pid; wait", 2.0) == "the check did not answer within 2 s"
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not lives(child), what="the check's child is gone")


def test_a_fault_that_goes_away_in_time_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fault("echo it stays; exit 1", 1.9) == "it stays"
    monkeypatch.setattr(fitness, "AGAIN_AFTER", 0.01)
    assert fault(f"test -e {tmp_path}/second || {{ touch {tmp_path}/second; exit 1; }}") == ""


def test_the_reason_that_a_check_gave_is_told_also_when_its_last_try_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitness, "AGAIN_AFTER", 0.01)
    check = f"test -e {tmp_path}/second && sleep 600; touch {tmp_path}/second; echo ERROR: no GPUs; exit 1"
    assert fault(check, 3.0) == "no GPUs"


def test_a_try_that_would_not_end_in_time_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one took half of the time and more: the next would only be killed."""
    monkeypatch.setattr(fitness, "AGAIN_AFTER", 0.01)
    fault(f"echo try >> {tmp_path}/tries; sleep 1; echo slow; exit 1", 1.9)
    assert (tmp_path / "tries").read_text() == "try\n"


class Watch:
    """A SpareWatch over a folder: a host is well while a file of its name is there."""

    def __init__(self, folder: Path, *spares: str, interval: float = 60.0, keeper: str = "off") -> None:
        self.state = RunState(spares=spares)
        self.seen: list[tuple[Kind, str]] = []
        told = f"echo $SLURM_FT_KEEPER_MODE > {folder}/mode"
        check = f"{told}; test -e {folder}/$SLURM_FT_HOST || {{ echo ERROR: ill; exit 1; }}"
        spec = HostSpec(health_check=check, spare_check=interval)
        self.watch = SpareWatch(spec, LocalLauncher(), lambda: self.state, self.take, keeper)

    def take(self, kind: Kind, host: str, what: str) -> None:
        self.seen.append((kind, host))
        self.state = observe(self.state, Event(1.0, kind, None, {"host": host, "what": what}))

    def look(self, host: str) -> dict[str, str]:
        asyncio.run(self.watch.look(host))
        return dict(self.state.unfit)


def test_a_spare_is_recorded_when_it_changes_and_not_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s1").touch()
    watch = Watch(tmp_path, "s1", "s2")
    assert watch.look("s1") == {}
    assert watch.look("s2") == watch.look("s2") == {"s2": "ill"}
    (tmp_path / "s2").touch()
    assert watch.look("s2") == {}
    assert watch.seen == [(Kind.HOST_UNFIT, "s2"), (Kind.HOST_FIT, "s2")]


def test_the_check_of_a_spare_knows_what_the_hosts_keeper_may_hold(tmp_path: Path) -> None:
    """A host that was lost and has come back waits as a spare, and its keeper with it."""
    Watch(tmp_path, "s1", keeper="live").look("s1")
    assert (tmp_path / "mode").read_text() == "live\n"


def test_a_slurm_that_does_not_answer_says_nothing_of_a_spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(tmp_path, "s1")
    lost = "Unable to contact slurm controller (connect failure)"
    said = ""

    async def fault(*_: object) -> str:
        return said

    monkeypatch.setattr(fitness, "fault", fault)
    for said, unfit in ((f"srun: error: {lost}", {}), (lost, {"s1": lost})):  # noqa: B007 - `fault` reads it
        assert watch.look("s1") == unfit


def test_a_spare_that_was_taken_meanwhile_is_no_spare_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Watch(tmp_path).look("s1") == {}


def test_without_a_check_or_an_interval_no_spare_is_asked(tmp_path: Path) -> None:
    watch = Watch(tmp_path, "s1", interval=0)
    asyncio.run(watch.watch.run())
    assert watch.seen == []


ALLOCATION = Allocation("7", 56, 8, ("--gpu-bind=none",))


def test_a_look_at_a_spare_is_a_small_step_that_sees_the_gpus_and_ends_by_itself() -> None:
    launcher: Launcher = SrunLauncher(ALLOCATION)
    argv, environ = launcher.look("node5", "slurm-ft check")
    assert argv[0] == "srun" and argv[-3:] == ["/bin/sh", "-c", "slurm-ft check"]
    assert {"--jobid=7", "--nodelist=node5", "--nodes=1", "--gres=gpu:8", "--overlap", "--time=1"} <= set(argv)
    assert environ["SLURM_EXIT_ERROR"] == "97"
    assert "--gres=gpu:0" not in helper_argv(Allocation("7", 4), ["a"], "x", ["true"])


def test_the_sites_own_options_for_srun_come_last(tmp_path: Path) -> None:
    from slurm_ft.launch import StepRequest

    argv = step_argv(StepRequest(RunPaths(tmp_path), 0, 1, ("a",)), ALLOCATION)
    assert argv[argv.index("--gpu-bind=none") - 1] == "--export=ALL"
    assert argv[argv.index("--gpu-bind=none") + 2] == "-m"
