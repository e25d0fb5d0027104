"""The recovery benchmark when one of its runs goes wrong: the others' figures stand, and no process is left."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_ft.errors import LaunchError
from slurm_ft.testing.bench import measure, ways
from slurm_ft.testing.bench.log import Line
from slurm_ft.testing.bench.ways import Setting, Way, World

SETTING = Setting("tiny", "ddp", 100, 20, 0.05, 2)
NO_PAUSE: Any = SimpleNamespace(uniform=lambda least, most: 0.0)


class Trains:
    """A run whose replicas train together, and in which nobody can be killed."""

    setting, over, ended = SETTING, False, False

    def lines(self) -> list[Line]:
        return [Line(0.1 * step, replica, replica, "commit", step) for step in range(1, 9) for replica in (0, 1)]

    def kill(self, replica: int) -> None:
        raise LookupError(f"replica {replica} has no process")

    def tail(self) -> str:
        return "it said this"

    def end(self) -> None:
        self.ended = True


def test_a_victim_that_has_no_process_costs_this_figure_only(tmp_path) -> None:
    run = Trains()
    way = Way("a way", lambda world, setting: run)  # type: ignore[arg-type, return-value]
    with pytest.raises(measure.DidNotWork, match="replica 1 has no process; its last words:\nit said this"):
        measure.one_failure(way, World(tmp_path), SETTING, NO_PAUSE)
    assert run.ended


def test_a_run_that_cannot_be_started_costs_this_figure_only(tmp_path) -> None:
    def start(world: World, setting: Setting) -> Any:
        raise RuntimeError("the Lighthouse did not come up")

    for measured in (
        lambda: measure.one_failure(Way("a way", start), World(tmp_path), SETTING, NO_PAUSE),
        lambda: measure.whole_run(Way("a way", start), World(tmp_path), SETTING, 0.0),
    ):
        with pytest.raises(measure.DidNotWork, match="RuntimeError: the Lighthouse did not come up"):
            measured()


def test_a_host_that_does_not_come_back_costs_this_figure_only(tmp_path) -> None:
    def stays_away(host: str) -> None:
        raise LaunchError(f"{host} was not ready within 60 s")

    run = Trains()
    cluster: Any = SimpleNamespace(
        states=lambda: {"node1": "idle", "node2": "down"}, processes=lambda host: [], revive_host=stays_away
    )
    way = Way("a way", lambda world, setting: run)  # type: ignore[arg-type, return-value]
    with pytest.raises(measure.DidNotWork, match="node2 was not ready within 60 s"):
        measure.one_failure(way, World(tmp_path, cluster=cluster), SETTING, NO_PAUSE)
    assert run.ended


def test_a_lighthouse_that_does_not_come_up_is_ended(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def sleeps(*command: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(["sleep", "100"]))
        return started[-1]

    popen = subprocess.Popen
    monkeypatch.setattr(ways, "LIGHTHOUSE_SECONDS", 0.0)
    monkeypatch.setattr(ways.subprocess, "Popen", sleeps)
    with pytest.raises(RuntimeError, match="the Lighthouse did not come up"):
        ways.start_lighthouse(tmp_path)
    [process] = started
    assert process.returncode is not None


def test_without_torchft_no_way_can_run_and_each_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways.importlib.util, "find_spec", lambda name: None if name == "torchft" else object())
    monkeypatch.setattr(ways, "ft_launcher", lambda: "ft_launcher")
    for name in ("NVRX_PYTHON", "MONARCH_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    for way in ways.WAYS:
        assert way.missing() == "no torchft: pip install '/path/to/slurm-ft[train]'", way.name
