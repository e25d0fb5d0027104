"""What a head does by itself that the batch script did; and what people are told of a head that was lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_ft import lease
from slurm_ft.controller.comeback import Plan
from slurm_ft.errors import TryAgain
from slurm_ft.events import Event, Kind
from slurm_ft.launch.session import Session
from slurm_ft.observe import report
from slurm_ft.observe.incidents import HEAD
from slurm_ft.observe.ledger import Ledger
from slurm_ft.observe.status import from_ledger
from slurm_ft.observe.words import Narrator
from slurm_ft.paths import RunPaths, write_json
from slurm_ft.slurm.client import Done, JobView, SlurmClient, Unknown, Unreachable
from slurm_ft.slurm.states import parse_state
from slurm_ft.slurm.units import NoTime
from slurm_ft.spec import Policy, ReplicaSpec, RunSpec
from slurm_ft.submit import takeover


def view(left: int | NoTime) -> JobView:
    return JobView("12", parse_state("RUNNING"), "None", 1, "node1", 600, left, 0, False, None)


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [
        (view(600), 480.0),
        (view(60), 1.0),
        (view(NoTime.UNLIMITED), None),
        (Unknown("12"), None),
    ],
)
def test_the_warning_before_the_time_limit_is_its_own_alarm(
    monkeypatch: pytest.MonkeyPatch, answer: JobView | Unknown, seconds: float | None
) -> None:
    monkeypatch.setattr(SlurmClient, "job", lambda self, job: answer)
    assert takeover.time_until_warning("12", Policy()) == seconds


def test_the_alarm_leaves_as_much_time_as_slurm_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlurmClient, "job", lambda self, job: view(1000))
    assert takeover.time_until_warning("12", Policy(save_within=600.0)) == 1000 - 660


def test_a_slurm_that_does_not_answer_is_not_one_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlurmClient, "job", lambda self, job: Unreachable("busy"))
    with pytest.raises(TryAgain, match="how much time job 12 has: busy"):
        takeover.time_until_warning("12", Policy())


def test_after_a_take_over_the_rest_of_a_chain_is_looked_after_before_the_job_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.create()
    write_json(paths.spec, RunSpec("r", ReplicaSpec(("true",)), 1, cluster="slurm").to_json())
    Session("abc", "12", ("node1", "node2")).write(paths)
    assert lease.take(paths.lease, lease.Claim(2, "node2"))
    done = list[object]()
    monkeypatch.setattr(takeover, "govern", lambda *_: 143)
    monkeypatch.setattr(
        takeover,
        "come_back",
        lambda _, session, code, may_requeue: done.append((session.job_id, code, may_requeue)) or Plan(),
    )
    monkeypatch.setattr(takeover, "end_job", done.append)
    assert takeover._take_over(paths, 2, "node2", "127.0.0.1") == 143
    assert done == [("12", 143, False), "12"]


def test_the_job_is_ended_as_soon_as_slurm_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, slept = [Unreachable("busy"), Done()], list[float]()
    monkeypatch.setattr(SlurmClient, "cancel", lambda self, job: answers.pop(0))
    monkeypatch.setattr(takeover.time, "sleep", slept.append)
    takeover.end_job("12")
    assert answers == [] and slept == [takeover.BATCH_ENDS_WITHIN, takeover.ASK_AGAIN]


def test_what_a_head_elsewhere_must_know_is_in_the_run_folder(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.create()
    session = Session("abc", "12", ("node1", "node2"), 8, 4)
    session.write(paths)
    assert Session.read(paths) == session
    assert (session.allocation.job_id, session.allocation.cpus_per_host, session.allocation.gpus_per_host) == (
        "12",
        8,
        4,
    )


def history(*, commits: bool = True) -> list[Event]:
    """The head host node1 dies at 100 s and is noticed at 110 s; node2's controller is there at 112 s."""
    names = {
        "session": "s",
        "job_id": "12",
        "head_host": "node1",
        "replicas": [["node1"], ["node2"]],
        "ranks_per_host": 1,
    }
    events = [
        Event(0.0, Kind.HEAD_STARTED, None, {"host": "node1", "pid": 1, "before": "", "silence": 0.0, "age": 0.0}, 1),
        Event(0.0, Kind.RUN_STARTED, None, names, 1),
    ]
    for replica in (0, 1):
        events += [
            Event(1.0, Kind.STEP_LAUNCHED, replica, {"step": 1, "pid": 5}, 1),
            Event(2.0, Kind.AGENT_JOINED, replica, {"step": 1, "index": 0, "port": 1}, 1),
            Event(3.0, Kind.RANKS_STARTED, replica, {"attempt": 1, "rung": ""}, 1),
        ]
    if commits:
        events.append(Event(4.0, Kind.QUORUM, 1, {"attempt": 1, "quorum_id": 1}, 1))
    taken = {"host": "node2", "pid": 9, "before": "node1", "silence": 10.0, "age": 2.0, "up": 0.5}
    commit = {"attempt": 1, "rank": 0, "step": 7, "committed": True, "age": 0.5}
    events += [
        Event(112.0, Kind.HEAD_STARTED, None, taken, 2),
        Event(112.5, Kind.ADOPTED, None, {"agents": 1}, 2),
        Event(113.5, Kind.COMMIT, 1, commit, 2),
    ]
    return events


def test_a_lost_head_is_an_incident_with_its_time_line() -> None:
    ledger = Ledger(history())
    (incident,) = ledger.incidents.all
    assert (incident.replica, incident.label, incident.what) == (HEAD, "head", "the head host node1 was lost")
    assert incident.failed == 100.0
    assert incident.stages == {"detected": 10.0, "head": 10.5, "controller": 12.0, "adopted": 12.5, "committed": 13.0}
    assert incident.outcome == "healed"
    assert from_ledger(ledger, 120.0).host == "node2"
    found = report.compute(ledger)
    line = "  head head lost  detected 10.0s  head 10.5s  controller 12.0s  adopted 12.5s  committed 13.0s  (to node2)"
    assert line in report.lines(found)
    assert report.to_json(found)["incidents"][0]["replica"] is None


def test_the_first_commit_may_come_before_the_last_agent_has_called() -> None:
    events = history()
    events[-1], events[-2] = events[-2], events[-1]
    (incident,) = Ledger(events).incidents.all
    assert incident.outcome == "healed" and {"adopted", "committed"} <= incident.stages.keys()


def test_a_head_that_was_replaced_after_the_last_commit_is_healed_all_the_same() -> None:
    events = [event for event in history() if event.t < 113.0]
    (incident,) = Ledger([*events, Event(120.0, Kind.RUN_ENDED, None, {"code": 0, "why": "done"}, 2)]).incidents.all
    assert incident.outcome == "healed"


def test_a_lost_head_is_told_in_one_line() -> None:
    told = [line for line in map(Narrator().line, history()) if line and "head" in line]
    assert [line.split("  ")[-1] for line in told] == ["the head on node1 was not heard for 10.0s: node2 takes over"]
