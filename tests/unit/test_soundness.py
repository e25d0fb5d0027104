"""What the soak checks must be found when it is there."""

from __future__ import annotations

from observe_histories import History, healed_run

from slurm_ft.events import Event, Kind
from slurm_ft.observe.incidents import HEAD, Incident
from slurm_ft.observe.ledger import Ledger
from slurm_ft.testing import soundness


def commit(replica: int, step: int, quorum: int = 1, committed: bool = True) -> Event:
    return Event(step, Kind.COMMIT, replica, {"step": step, "committed": committed, "quorum_id": quorum})


def test_a_run_that_healed_is_sound() -> None:
    events = [commit(0, 1), commit(1, 1), commit(1, 2, 2), commit(0, 3, 3), commit(1, 3, 3)]
    assert soundness.gaps(events) == soundness.doubles(events) == []
    assert soundness.unexplained(Ledger(healed_run()).incidents.all) == []


def test_a_step_that_nobody_committed_is_found() -> None:
    events = [commit(0, 1), commit(0, 2, committed=False), commit(0, 4)]
    assert soundness.gaps(events) == ["no replica committed step 2", "no replica committed step 3"]


def test_a_step_that_was_committed_twice_is_found() -> None:
    assert soundness.doubles([commit(0, 1), commit(0, 1)]) == ["replica 0 committed step 1 2 times"]
    (two_quorums,) = soundness.doubles([commit(0, 1, 7), commit(1, 1, 8)])
    assert two_quorums == "step 1 was committed in 2 quorums: ['7', '8']"


def test_a_failure_that_nobody_caused_is_found() -> None:
    h = History(1).launch(0.1, 0).ranks(0.5, 0).progressed(2.0, 0).killed(5.0, 0)
    (sentence,) = soundness.unexplained(Ledger(h.sorted()).incidents.all)
    assert "has no known cause" in sentence


def test_the_head_is_lost_on_purpose_with_the_host_of_a_replica_that_was_killed() -> None:
    head = Incident(HEAD, 2, 9.0, "the head host node1 was lost", "head lost", host="node1")
    replica = Incident(0, 1, 9.0, "the agent on node1 is silent", "host lost", host="node1", injected=True)
    assert soundness.unexplained([head, replica]) == []
    assert len(soundness.unexplained([head])) == 1
