"""State in held memory, with real processes and real SIGKILL: what comes back, bit for bit, and what does not."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kept_workers
import pytest
import replicas

from slurm_ft import env
from slurm_ft.agent.process import die_with_parent
from slurm_ft.keeper.client import Client
from slurm_ft.keeper.place import socket_path
from tests.waiting import wait_until

SECONDS = 60.0


class Trial:
    """One training in a folder, with a keeper that outlives its processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        argv = [sys.executable, "-m", "slurm_ft.keeper.server", f"--run-dir={folder}", "--host=h"]
        self.keeper = subprocess.Popen(argv, preexec_fn=die_with_parent(os.getpid()))
        self.path = socket_path(folder, "h")
        self.environment = {env.KEEPER: str(self.path), env.REPLICA: "0", "RANK": "0", "WORLD_SIZE": "1"}

    def start(self, mode: str, work: Any = kept_workers.train, **options: Any) -> Any:
        arguments = (str(self.folder), self.environment, mode, options)
        process = replicas.CONTEXT.Process(target=work, args=arguments, daemon=True)
        process.start()
        return process

    def run(self, mode: str, **options: Any) -> dict[str, Any]:
        """To the end; gives what the process said at its start and at its end."""
        process = self.start(mode, **options)
        process.join(SECONDS)
        assert process.exitcode == 0, self.told
        return self.told[-2] | self.told[-1]

    def run_with_kills(self, mode: str, seed: int, most: int, **options: Any) -> dict[str, Any]:
        dice = random.Random(seed)
        for _ in range(most):
            before = len(self.told)
            process = self.start(mode, **options)
            wait_until(lambda before=before: len(self.told) > before, SECONDS)
            process.join(dice.uniform(0.01, 0.2))
            if process.exitcode == 0:
                return self.told[-1]
            process.kill()
            process.join()
        self.run(mode, **options)
        return self.told[-1]

    @property
    def told(self) -> list[dict[str, Any]]:
        file = self.folder / "told"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [line for line in self.told if "source" in line]

    def close(self) -> None:
        self.keeper.terminate()
        self.keeper.wait(10)


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    found = Trial(tmp_path)
    yield found
    found.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The training without any keeper."""
    folder = tmp_path_factory.mktemp("undisturbed")
    process = replicas.CONTEXT.Process(target=kept_workers.train, args=(str(folder), {}, "off", {}))
    process.start()
    process.join(SECONDS)
    value: dict[str, Any] = json.loads((folder / "told").read_text().splitlines()[-1])
    return value


@pytest.mark.parametrize("seed", [1, 2])
def test_live_a_training_that_is_killed_again_and_again_ends_as_the_undisturbed_one(
    trial: Trial, undisturbed: dict[str, Any], seed: int
) -> None:
    """Whatever is random in it comes back: weights, moments, buffers, schedule and the next random numbers. A kill
    within an optimizer step leaves nothing that could be used, and then the snapshot before is; from there the
    same steps come out again."""
    assert trial.run_with_kills("both", seed, 12, every=5) == undisturbed
    assert any(start["source"] == "live" for start in trial.starts)


def test_snapshot_the_training_goes_on_from_the_newest_whole_one(trial: Trial, undisturbed: dict[str, Any]) -> None:
    assert trial.run_with_kills("snapshot", 3, 12, every=3) == undisturbed
    sources = [start["source"] for start in trial.starts]
    assert "snapshot" in sources and set(sources) <= {"snapshot", "none"}
    assert all(start["step"] % 3 <= 1 for start in trial.starts if start["source"] == "snapshot"), trial.starts


def test_a_live_state_is_that_of_the_last_whole_step(trial: Trial) -> None:
    first = trial.run("live", steps=17, drop=False)
    again = trial.run("live", steps=17, drop=False)
    assert (first["source"], first["step"], first["why"]) == ("none", 0, "no live state is held")
    assert (again["source"], again["step"]) == ("live", 17)
    assert again["end"] == first["end"] and again["random"] == first["random"]


def test_a_state_of_another_model_is_not_taken_and_its_memory_is_given_back(trial: Trial) -> None:
    trial.run("both", steps=3, drop=False)
    found = trial.run("both", steps=3, width=24)
    assert found["source"] == "none"
    assert "the live state that is held is of another model" in found["why"]
    with Client.connect(trial.path) as client:
        assert client.names() == {}


def test_without_its_keeper_a_training_goes_on_and_says_why(trial: Trial, undisturbed: dict[str, Any]) -> None:
    trial.close()
    found = trial.run("both")
    assert "the keeper does not answer" in found["why"]
    assert found["end"] == undisturbed["end"]
