"""Histories of runs, built by hand, for the tests of everything that reads a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from slurm_ft.events import Event, Kind
from slurm_ft.paths import RunPaths, write_json
from slurm_ft.spec import ReplicaSpec, RunSpec

T0 = 1_700_000_000.0
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    step()\nValueError: no\n'


class History:
    """Collects events. Times are seconds after the start of the run."""

    def __init__(self, replicas: int = 2, **facts: Any) -> None:
        self.events: list[Event] = []
        self.replicas = replicas
        hosts = [[f"node{i + 1}"] for i in range(replicas)]
        about = {"session": "a", "name": "titan", "job_id": "4711", "cluster": "slurm", "head_host": "node1"}
        self.at(0, Kind.RUN_STARTED, replicas=hosts, spares=[], ranks_per_host=1, min_replicas=1, **about | facts)

    def at(self, t: float, kind: Kind, replica: int | None = None, /, **data: Any) -> History:
        self.events.append(Event(T0 + t, kind, replica, data))
        return self

    def sorted(self) -> list[Event]:
        return sorted(self.events, key=lambda event: event.t)

    def launch(self, t: float, replica: int, step: int = 1) -> History:
        self.at(t, Kind.STEP_LAUNCHED, replica, step=step, pid=100 + replica, hosts=[f"node{replica + 1}"])
        agent = {
            "index": 0,
            "host": f"node{replica + 1}",
            "address": "10.0.0.1",
            "port": 5000,
            "step_id": f"4711.{step}",
        }
        return self.at(t + 0.3, Kind.AGENT_JOINED, replica, step=step, **agent)

    def ranks(self, t: float, replica: int, attempt: int = 1, rung: str = "") -> History:
        return self.at(t, Kind.RANKS_STARTED, replica, attempt=attempt, rung=rung, ranks=1)

    def joins(self, t: float, replica: int, attempt: int = 1, quorum: int = 1, healed: bool = False) -> History:
        self.at(t, Kind.PHASE, replica, attempt=attempt, rank=0, phase="imported", age=0.1)
        self.at(t + 0.5, Kind.QUORUM, replica, attempt=attempt, rank=0, quorum_id=quorum, step=1, age=0.0)
        if healed:
            self.at(t + 0.7, Kind.PHASE, replica, attempt=attempt, rank=0, phase="healed", age=0.0)
        return self

    def commit(
        self, t: float, replica: int, step: int, attempt: int = 1, committed: bool = True, lost: int = 0, **more: Any
    ) -> History:
        data = {"quorum_id": 1, "train_step": step, "loss": 4.0 - step / 20, "tokens": 1024 * step, "age": 0.0} | more
        return self.at(
            t, Kind.COMMIT, replica, attempt=attempt, rank=0, step=step, committed=committed, lost=lost, **data
        )

    def progressed(self, t: float, replica: int, attempt: int = 1) -> History:
        return self.at(t, Kind.PROGRESSED, replica, attempt=attempt)

    def killed(self, t: float, replica: int, attempt: int = 1, **more: Any) -> History:
        data = {"what": "rank 0 was killed by SIGKILL", "code": None, "signal": "SIGKILL", "age": 0.02, "traceback": ""}
        place = {"rank": 0, "host": f"node{replica + 1}", "log": f"replicas/{replica}/attempt_{attempt}/0.log"}
        return self.at(t, Kind.RANK_FAILED, replica, attempt=attempt, **data | place | more)

    def cleared(self, t: float, replica: int, attempt: int = 1) -> History:
        self.at(t, Kind.CLEARING, replica)
        return self.at(t + 0.1, Kind.AGENT_CLEARED, replica, attempt=attempt, index=0, port=5001)

    def done(self, t: float, replica: int, attempt: int = 1) -> History:
        self.at(t, Kind.RANK_DONE, replica, attempt=attempt, rank=0)
        self.at(t + 0.1, Kind.STEP_ENDING, replica, step=1, then="DONE", why="all its ranks ended well")
        return self.at(t + 0.3, Kind.STEP_EXITED, replica, step=1, code=0, what="step 1 ended", age=0.0)

    def ended(self, t: float, code: int = 0, why: str = "2 of 2 replicas finished") -> History:
        return self.at(t, Kind.RUN_ENDED, code=code, why=why)


def healed_run() -> list[Event]:
    """Three replicas train 20 steps of one second; replica 2 is killed at 15.32 s and heals; all end well."""
    h = History(3)
    for replica in range(3):
        h.launch(0.1, replica).ranks(0.5, replica).joins(2.0, replica).progressed(5.0, replica)
        for step in range(1, 21):
            if replica == 2 and 10 < step < 14:
                continue
            h.commit(5.0 + step, replica, step, attempt=2 if replica == 2 and step >= 14 else 1)
        h.done(26.0, replica, attempt=2 if replica == 2 else 1)
    h.at(15.3, Kind.INJECTED, 2, id="x", rank=0, kind="kill", error="")
    h.killed(15.32, 2, injected=True).cleared(15.4, 2).ranks(15.6, 2, 2, "in place")
    h.joins(17.0, 2, 2, quorum=2, healed=True)
    h.progressed(19.0, 2, 2)
    h.ended(26.5, 0, "3 of 3 replicas finished")
    return h.sorted()


def failed_run() -> list[Event]:
    """Two replicas; the program of replica 1 crashes at once, each time, until it is given up."""
    h = History(2)
    for replica in range(2):
        h.launch(0.1, replica).ranks(0.5, replica)
    h.joins(2.0, 0).progressed(5.0, 0)
    for step in range(1, 11):
        h.commit(5.0 + step, 0, step)
    crash = {"what": "rank 0 ended with exit code 1", "code": 1, "signal": None, "traceback": TRACEBACK}
    h.killed(3.0, 1, 1, **crash).cleared(3.1, 1).ranks(3.3, 1, 2, "in place").killed(6.0, 1, 2, **crash)
    why = "rank 0 ended with exit code 1; 1 restarts are used up"
    h.at(6.5, Kind.STEP_ENDING, 1, step=1, then="FAILED", why=why)
    h.at(7.0, Kind.STEP_EXITED, 1, step=1, code=1, what="step 1 ended with exit code 1", age=0.0)
    h.at(15.5, Kind.STEP_ENDING, 0, step=1, then="STOPPED", why="only 1 of 2 replicas are left")
    h.at(16.0, Kind.STEP_EXITED, 0, step=1, code=0, what="step 1 ended", age=0.0)
    h.ended(16.5, 1, "1 of 2 replicas failed")
    return h.sorted()


def write_run(root: Path, events: list[Event], state: dict[str, Any] | None = None, name: str = "titan") -> RunPaths:
    """A run folder with these events and, if given, this state."""
    paths = RunPaths(root)
    paths.create()
    spec = RunSpec(name=name, replica=ReplicaSpec(("python", "train.py")), replicas=2)
    write_json(paths.spec, json.loads(json.dumps(spec.to_json())))
    if events:
        paths.events.write_text("".join(event.to_line() for event in events))
    if state is not None:
        write_json(paths.state, state)
    return paths


def golden(name: str, text: str) -> None:
    """Compare with the recorded file. UPDATE_GOLDEN=1 records it anew."""
    path = Path(__file__).parents[1] / "golden" / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{name} differs; UPDATE_GOLDEN=1 records it anew"
