"""The controller's answers to an agent's sign of life; what is behind it is not there."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from slurm_ft.controller import controller as controllers
from slurm_ft.controller.controller import Controller
from slurm_ft.controller.peers import Peer
from slurm_ft.controller.state import Replica, RunState, State
from slurm_ft.events import Kind
from slurm_ft.launch.local import LocalLauncher
from slurm_ft.paths import RunPaths
from slurm_ft.spec import ReplicaSpec, RunSpec


class Wire:
    """Keeps what is sent."""

    endpoint = "tcp://127.0.0.1:1"

    def __init__(self) -> None:
        self.sent: list[str] = []

    def send(self, peer: bytes, message: dict[str, Any]) -> None:
        self.sent.append(message["type"])


def made(tmp_path: Path, wire: Wire) -> Controller:
    paths = RunPaths(tmp_path / "run")
    paths.create()
    spec = RunSpec("run", ReplicaSpec(("true",)), cluster="local")
    return Controller(paths, spec, LocalLauncher(), wire, "session")  # type: ignore[arg-type]


@pytest.mark.parametrize(("error", "held"), [(None, True), (OSError(28, "No space left on device"), False)])
def test_no_step_is_started_while_the_folder_hangs_but_it_is_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError | None, held: bool
) -> None:
    """A launch opens the step's log, and would hang with the folder."""
    goes_on, written = threading.Event(), threading.Event()

    def obstacle() -> None:
        written.set()
        if error is not None:
            raise error
        assert goes_on.wait(30)

    controller = made(tmp_path, Wire())
    monkeypatch.setattr(controllers, "SETTLE_WITHIN", 0.01)
    controller._log.hinder(obstacle)
    controller.supervisor.take(Kind.NOTE, text="x")
    assert written.wait(30)
    while error is not None and controller._log.trouble is None:  # the thread has yet to say so
        pass
    assert bool(controller.hold()) is held
    goes_on.set()
    controller._log.hinder(lambda: None)
    assert controller._log.close()


@pytest.mark.parametrize(
    ("attempt", "told", "answer"),
    [(2, 0, "alive"), (1, 0, "who"), (2, 1, "who")],
    ids=["nothing is missing", "the word to start was lost", "the end of a rank was lost"],
)
def test_an_agent_that_has_missed_something_is_asked_to_say_all_again(
    tmp_path: Path, attempt: int, told: int, answer: str
) -> None:
    wire = Wire()
    controller = made(tmp_path, wire)
    controller.supervisor.state = RunState((Replica(0, ("local0",), state=State.RUNNING, attempt=2, step=1, pid=1),))
    controller._peers.add(b"agent", Peer(0, 1, 0, "local0", time.monotonic()))
    controller._hear(b"agent", {"type": "alive", "attempt": attempt, "told": told})
    assert wire.sent == [answer]
