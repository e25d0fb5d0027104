"""Which quorum ids a run has seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_ft.controller import quorum_ids
from slurm_ft.events import Event, Kind

START = Event(1.0, Kind.RUN_STARTED, None, {"session": "a"})


def seen(folder: Path, *events: Event) -> int:
    (folder / "events.jsonl").write_text("".join(event.to_line() for event in events))
    return quorum_ids.highest_seen(folder / "events.jsonl")


def test_the_highest_of_quorums_and_commits_of_this_job(tmp_path: Path) -> None:
    quorum = [Event(2.0, Kind.QUORUM, 0, {"quorum_id": number}) for number in (3, 17, 4)]
    assert seen(tmp_path, START, *quorum, Event(3.0, Kind.COMMIT, 0, {"quorum_id": 18})) == 18
    assert seen(tmp_path, START, *quorum, START) == 0
    assert seen(tmp_path, START, *quorum, START, Event(9.0, Kind.QUORUM, 0, {"quorum_id": 2})) == 2


@pytest.mark.parametrize("text", ["", "\n", '{"event":"quorum","quorum_id":5', '{"quorum_id":null}\n'])
def test_a_log_that_is_empty_cut_off_or_has_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "events.jsonl").write_text(json.dumps({"quorum_id": 4}, separators=(",", ":")) + "\n" + text)
    assert quorum_ids.highest_seen(tmp_path / "events.jsonl") in (4, 5)
    assert quorum_ids.highest_seen(tmp_path / "none") == 0
