"""The controller's answers to an agent's sign of life; what is behind it is not there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from slurm_ft.controller.controller import Controller
from slurm_ft.controller.peers import Peer
from slurm_ft.controller.state import Replica, RunState, State
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


@pytest.mark.parametrize(
    ("attempt", "ended", "answer"),
    [(2, [], "alive"), (1, [], "who"), (2, [0], "who")],
    ids=["nothing is missing", "the word to start was lost", "the end of a rank was lost"],
)
def test_an_agent_that_has_missed_something_is_asked_to_say_all_again(
    tmp_path: Path, attempt: int, ended: list[int], answer: str
) -> None:
    paths, wire = RunPaths(tmp_path / "run"), Wire()
    paths.create()
    spec = RunSpec("run", ReplicaSpec(("true",)), cluster="local")
    controller = Controller(paths, spec, LocalLauncher(), wire, "session")  # type: ignore[arg-type]
    controller.supervisor.state = RunState((Replica(0, ("local0",), state=State.RUNNING, attempt=2, step=1, pid=1),))
    controller._peers.add(b"agent", Peer(0, 1, 0, "local0", time.monotonic()))
    controller._hear(b"agent", {"type": "alive", "attempt": attempt, "ended": ended, "cleared": 0})
    assert wire.sent == [answer]
