from observe_histories import TRACEBACK, History, failed_run, healed_run

from slurm_ft.events import Event, Kind
from slurm_ft.observe.incidents import Incident
from slurm_ft.observe.ledger import Ledger


def incidents(events: list[Event]) -> list[Incident]:
    return Ledger(events).incidents.all


def two_training() -> History:
    h = History(2)
    for replica in range(2):
        h.launch(0.1, replica).ranks(0.5, replica).joins(1.0, replica).commit(2.0, replica, 1).progressed(2.0, replica)
    return h


def test_every_stage_is_measured_from_the_failure_itself() -> None:
    (incident,) = incidents(healed_run())
    assert {name: round(t, 3) for name, t in incident.stages.items()} == {
        "detected": 0.02,
        "relaunched": 0.3,
        "imported": 1.6,
        "joined": 2.2,
        "healed": 2.4,
        "committed": 3.7,
    }
    assert (incident.label, incident.cause, incident.rung, incident.outcome) == ("2-0", "SIGKILL", "in place", "healed")
    assert incident.injected


def test_commits_of_the_others_are_counted_only_while_the_replica_was_away() -> None:
    (incident,) = incidents(healed_run())
    assert incident.survivor_commits == 8  # two replicas, at 16, 17, 18 and 19 s
    assert incident.lost == 0


def test_a_survivors_lost_steps_are_counted_for_each_survivor() -> None:
    h = two_training().killed(5.0, 0)
    h.commit(5.5, 1, 2, committed=False, lost=1).commit(6.0, 1, 2, committed=False, lost=2).commit(7.0, 1, 2)
    (incident,) = incidents(h.sorted())
    assert incident.survivor_lost == {1: 3}
    assert incident.survivor_commits == 1


def test_steps_that_are_committed_at_the_second_try_are_not_lost() -> None:
    h = two_training().killed(5.0, 0)
    h.commit(5.5, 1, 2, committed=False, lost=20).commit(5.6, 1, 2, committed=False, lost=20, again=True)
    h.commit(5.7, 1, 2, lost=20, again=True)
    (incident,) = incidents(h.sorted())
    assert (incident.lost, incident.survivor_commits) == (0, 1)


def test_steps_that_no_try_committed_are_lost_once() -> None:
    h = two_training().killed(5.0, 0)
    h.commit(5.5, 1, 2, committed=False, lost=20).commit(5.6, 1, 2, committed=False, lost=20, again=True)
    (incident,) = incidents(h.sorted())
    assert incident.lost == 20


def test_what_survivors_did_between_a_failure_and_its_discovery_is_counted() -> None:
    h = two_training()  # replica 0 hangs at 5 s and is found at 35 s
    h.commit(4.0, 1, 2, committed=False, lost=7).commit(6.0, 1, 2).commit(7.0, 1, 3, committed=False, lost=4)
    h.commit(8.0, 1, 3).killed(35.0, 0, age=30.0, hung=True).commit(36.0, 1, 4)
    (incident,) = incidents(h.sorted())
    assert (incident.survivor_commits, incident.survivor_lost) == (3, {1: 4})


def test_what_was_done_before_a_head_was_known_to_be_lost_is_counted() -> None:
    h = two_training().commit(4.0, 0, 2).commit(6.0, 1, 3)
    h.at(15.0, Kind.HEAD_STARTED, host="node2", before="node1", silence=10.0)
    (incident,) = incidents(h.sorted())
    assert incident.survivor_commits == 1


def test_commits_of_an_earlier_job_are_not_the_survivors_of_this_one() -> None:
    earlier = two_training().commit(9.0, 1, 2).sorted()
    h = History(2, session="b", job_id="4712")
    for replica in range(2):
        h.launch(0.1, replica).ranks(0.5, replica)
    h.killed(35.0, 0, age=30.0, hung=True)
    later = [Event(event.t + 1, event.kind, event.replica, event.data) for event in h.sorted()]
    (incident,) = incidents(earlier + later)  # it begins at 6 s, which the first job's commit came after
    assert incident.survivor_commits == 0


def test_a_failure_before_the_repair_is_done_is_an_incident_of_its_own() -> None:
    first, second = incidents(failed_run())
    assert (first.outcome, second.outcome) == ("failed again", "given up")
    assert first.cause == "exit 1"
    assert first.traceback == TRACEBACK
    assert second.why.startswith("rank 0 ended")
    assert "relaunched" not in second.stages


def test_a_lost_agent_is_an_incident_repaired_by_step() -> None:
    h = two_training()
    h.at(5.0, Kind.AGENT_LOST, 0, step=1, index=0, host="node1", what="silent", age=3.0)
    h.at(5.1, Kind.STEP_ENDING, 0, step=1, then="PENDING", why="silent")
    h.at(6.0, Kind.STEP_EXITED, 0, step=1, code=9, what="step 1 ended", age=0.0)
    h.launch(6.1, 0, step=2).ranks(6.5, 0, 2).joins(7.0, 0, 2).commit(9.0, 0, 3, attempt=2)
    (incident,) = incidents(h.sorted())
    assert (incident.label, incident.cause, incident.rung) == ("0", "agent lost", "by step")
    assert round(incident.stages["detected"], 3) == 3.0
    assert round(incident.stages["committed"], 3) == 7.0


def test_a_host_that_came_back_to_its_own_replica_is_no_spare() -> None:
    for spare, rung in (("node1", "by step"), ("node9", "spare")):
        h = two_training().at(5.0, Kind.AGENT_LOST, 0, step=1, index=0, host="node1", what="silent", age=3.0)
        h.at(6.0, Kind.STEP_EXITED, 0, step=1, code=9, what="step 1 ended", age=0.0)
        h.at(6.1, Kind.HOST_REPLACED, 0, bad="node1", spare=spare)
        h.launch(7.1, 0, step=2).ranks(7.5, 0, 2).joins(8.0, 0, 2).commit(9.0, 0, 3, attempt=2)
        (incident,) = incidents(h.sorted())
        assert (incident.outcome, incident.rung) == ("healed", rung)


def test_a_step_that_leaves_by_itself_is_an_incident() -> None:
    h = two_training().at(5.0, Kind.STEP_EXITED, 0, step=1, code=1, what="step 1 ended with exit code 1", age=0.1)
    (incident,) = incidents(h.sorted())
    assert (incident.cause, incident.outcome) == ("step ended", "open")


def test_ranks_that_were_stopped_on_purpose_are_no_incident() -> None:
    h = two_training().at(5.0, Kind.STOP_REQUESTED, why="asked", code=143)
    for replica in range(2):
        h.at(5.1, Kind.STEP_ENDING, replica, step=1, then="STOPPED", why="asked").killed(5.2, replica)
        h.at(5.3, Kind.STEP_EXITED, replica, step=1, code=0, what="", age=0.0)
    assert incidents(h.ended(6.0, 143, "asked").sorted()) == []


def test_a_run_without_torchft_is_well_again_with_its_first_progress() -> None:
    h = History(1).launch(0.1, 0).ranks(0.5, 0).progressed(2.0, 0).killed(4.0, 0).cleared(4.1, 0)
    h.ranks(4.3, 0, 2, "in place").progressed(6.0, 0, 2)
    (incident,) = incidents(h.sorted())
    assert incident.outcome == "healed"
    assert list(incident.stages) == ["detected", "relaunched", "progressed"]


def test_a_replica_whose_peers_finished_first_says_so() -> None:
    h = two_training().killed(5.0, 0).cleared(5.1, 0)
    h.at(5.2, Kind.STEP_ENDING, 0, step=1, then="STOPPED", why="the training was finished by its peers")
    h.at(5.4, Kind.STEP_EXITED, 0, step=1, code=0, what="", age=0.0)
    (incident,) = incidents(h.sorted())
    assert incident.outcome == "finished"


def test_a_requeued_run_keeps_the_incidents_of_its_first_job() -> None:
    h = two_training().killed(5.0, 0)
    later = History(2, session="b", job_id="4712")
    later.events = [Event(e.t + 100, e.kind, e.replica, e.data) for e in later.events]
    (incident,) = incidents(h.sorted() + later.events)
    assert incident.outcome == "interrupted"


def test_late_news_of_an_attempt_that_is_over_does_not_heal_the_next_one() -> None:
    h = two_training().killed(5.0, 0).cleared(5.1, 0).ranks(5.3, 0, 2, "in place").commit(5.4, 0, 2, attempt=1)
    (incident,) = incidents(h.sorted())
    assert incident.outcome == "open"
    assert "committed" not in incident.stages


def test_a_fault_of_a_host_is_known_as_the_cause_of_what_it_broke_and_of_nothing_after_it() -> None:
    h = two_training()
    h.at(4.9, Kind.INJECTED, 0, id="x", rank=0, kind="agent", error="")
    h.at(5.0, Kind.STEP_EXITED, 0, step=1, code=-9, what="step 1 ended", age=0.0)
    h.at(5.1, Kind.INJECTED, 1, id="y", rank=0, kind="hang", error="rank 0 is not running")
    h.killed(6.0, 1)
    first, second = incidents(h.sorted())
    assert (first.cause, first.injected) == ("step ended", True)
    assert not second.injected


def test_a_kill_for_lack_of_memory_is_a_cause_of_its_own() -> None:
    failed = {"attempt": 1, "rank": 0, "what": "x", "code": -9, "signal": "SIGKILL"}
    h = two_training()
    for replica, more in enumerate(({"oom": True}, {})):
        h.events.append(Event(5.0, Kind.RANK_FAILED, replica, failed | more))
    assert [incident.cause for incident in incidents(h.events)] == ["out of memory", "SIGKILL"]
