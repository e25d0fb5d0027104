"""A save that was asked for: whom it waits for, and when what was written is a whole."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_ft.controller import saving
from slurm_ft.controller.saving import Outcome, Save
from slurm_ft.events import Event, Kind


def begun(replicas: int = 2, hosts: int = 1) -> Save:
    attempts = {str(replica): 1 for replica in range(replicas)}
    data = {"id": "s", "within": 60.0, "why": "", "attempts": attempts, "hosts": dict.fromkeys(attempts, hosts)}
    return saving.requested(Event(100.0, Kind.SAVE_REQUESTED, None, data))


def asked(save: Save, replica: int, able: list[int], signalled: tuple[int, ...] = (), **more: Any) -> Save:
    data = {"id": "s", "attempt": 1, "index": 0, "able": able, "signalled": list(signalled), **more}
    return saving.observe(save, Event(100.0, Kind.SAVE_ASKED, replica, data))


def answered(save: Save, replica: int, rank: int = 0, step: int = 7, **more: Any) -> Save:
    data = {"id": "s", "attempt": 1, "rank": rank, "step": step, **more}
    return saving.observe(save, Event(100.0, Kind.SAVED, replica, data))


RUNNING = {0: 1, 1: 1}


def test_agents_are_waited_for_then_their_ranks_then_nobody() -> None:
    save = begun()
    assert saving.waits_for(save, RUNNING, 101.0, False) == {(0, 0), (1, 0)}
    save = asked(asked(save, 0, [0, 1]), 1, [0])
    assert saving.waits_for(save, RUNNING, 101.0, False) == {(0, 0), (0, 1), (1, 0)}
    save = answered(answered(answered(save, 0), 0, 1), 1)
    assert not saving.waits_for(save, RUNNING, 101.0, False)


@pytest.mark.parametrize(
    ("running", "now"),
    [({}, 101.0), ({0: 2, 1: 2}, 101.0), (RUNNING, 160.0)],
    ids=["the replicas are gone", "they have started again", "the time is over"],
)
def test_nobody_is_waited_for_in_vain(running: dict[int, int], now: float) -> None:
    assert not saving.waits_for(asked(begun(), 0, [0]), running, now, True)


def test_ranks_that_got_a_signal_are_waited_for_only_when_the_run_stops() -> None:
    save = asked(asked(begun(), 0, [], (0,)), 1, [], (0,))
    assert not saving.waits_for(save, RUNNING, 101.0, False)
    assert saving.waits_for(save, RUNNING, 101.0, True) == {(0, 0), (1, 0)}
    assert saving.outcome(save, False) == Outcome(False, "the ranks were asked by a signal, which has no answer")


def test_an_answer_that_overtakes_its_agents_word_is_not_asked_for_again() -> None:
    save = asked(answered(begun(1), 0), 0, [0])
    assert not saving.waits_for(save, {0: 1}, 101.0, False)


def test_a_torchft_run_is_saved_when_one_whole_replica_has_written() -> None:
    save = asked(asked(begun(), 0, [0]), 1, [0])
    save = answered(answered(save, 0, step=20, path="/ckpt/step-20"), 1, step=19, wrote=False)
    assert saving.outcome(save, True) == Outcome(True, "written by replica 0", 20, "/ckpt/step-20")


def test_independent_replicas_are_saved_when_all_have_written() -> None:
    save = answered(asked(asked(begun(), 0, [0]), 1, [0]), 0, step=20)
    assert saving.outcome(save, False) == Outcome(False, "not all ranks of replica 1 have saved")
    whole = saving.outcome(answered(save, 1, step=18, path="/b"), False)
    assert whole == Outcome(True, "written by replicas 0, 1", 18, "/b", {0: (20, ""), 1: (18, "/b")})
    assert whole.data["parts"] == {"0": [20, ""], "1": [18, "/b"]}


def test_nor_without_one_that_was_being_started_again_and_could_not_be_asked() -> None:
    data = {"id": "s", "within": 60.0, "attempts": {"0": 1}, "hosts": {"0": 1}, "replicas": [0, 2]}
    save = saving.requested(Event(100.0, Kind.SAVE_REQUESTED, None, data))
    save = answered(asked(save, 0, [0]), 0, path="/a")
    assert saving.outcome(save, False) == Outcome(False, "not all ranks of replica 2 have saved")
    assert saving.outcome(save, True).complete  # replicas of a torchft run are equal


@pytest.mark.parametrize("second", [{"step": 8}, {"error": "OSError: full"}, None], ids=["step", "error", "silent"])
def test_a_replica_of_which_one_rank_has_not_saved_the_same_step_is_not_whole(second: dict[str, Any] | None) -> None:
    """RW-57: a folder that was never completed is not what a run resumes from."""
    save = answered(asked(begun(1), 0, [0, 1]), 0, 0, 7, path="/ckpt")
    if second is not None:
        save = answered(save, 0, 1, **{"step": 7, **second})
    result = saving.outcome(save, True)
    assert not result.complete
    assert "OSError: full" in result.why or "error" not in (second or {})


def test_nobody_who_can_save_is_not_a_save() -> None:
    assert saving.outcome(asked(begun(1), 0, []), False) == Outcome(False, "no rank can save")


def test_the_marker_names_complete_saves_only_and_the_newest_last() -> None:
    def ended(step: int, complete: bool) -> Event:
        return Event(float(step), Kind.SAVE_ENDED, None, {"step": step, "complete": complete, "path": "", "id": "x"})

    found = saving.marker([ended(1, True), ended(2, False), ended(3, True)])
    assert [item["step"] for item in found["saves"]] == [1, 3]
    assert len(saving.marker(ended(n, True) for n in range(30))["saves"]) == 10
