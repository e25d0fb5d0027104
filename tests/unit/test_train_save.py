"""The rank's side of saving: who hears a request, in which step ranks save, and what is resumed from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurm_ft.train import last_save, progress
from slurm_ft.train.save import ERROR_LETTERS, STEPS_AHEAD, Saver


class Store:
    """A replica's store, as its ranks see it."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key].encode()


class Wire:
    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, kind: str, **fields: Any) -> None:
        self.sent.append({"type": kind, **fields})


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire()
    monkeypatch.setattr(progress, "channel", lambda: wire)
    return wire


def test_a_rank_alone_saves_at_its_next_step_and_answers_once(wire: Wire) -> None:
    saver, steps = Saver(0, 1), []
    saver.callback = lambda step: steps.append(step) or f"/ckpt/{step}"
    saver.at_step(1)
    saver.hear({"id": "a"})
    saver.at_step(2)
    saver.hear({"id": "a"})  # said again by a controller that has not got the answer
    saver.at_step(3)
    assert steps == [2]
    assert wire.sent == [{"type": "saved", "id": "a", "step": 2, "path": "/ckpt/2", "wrote": True, "error": ""}]


class NoException(BaseException):
    """As torch's CheckpointException."""


@pytest.mark.parametrize("failure", [NoException("full " * 1000), ValueError("full")])
def test_whatever_a_save_raises_is_told_in_so_many_words(wire: Wire, failure: BaseException) -> None:
    def save(step: int) -> str:
        raise failure

    saver = Saver(0, 1)
    saver.callback = save
    saver.hear({"id": "a"})
    saver.at_step(1)
    assert wire.sent[0]["error"].startswith(f"{type(failure).__name__}: full")
    assert len(wire.sent[0]["error"]) <= ERROR_LETTERS


def test_what_is_no_path_is_a_save_all_the_same(wire: Wire) -> None:
    saver = Saver(0, 1)
    saver.callback = lambda step: object()  # type: ignore[assignment, return-value]  # as dcp.save gives Metadata
    saver.hear({"id": "a"})
    saver.at_step(1)
    assert (wire.sent[0]["path"], wire.sent[0]["wrote"]) == ("", True)


def test_a_rank_whose_store_has_left_with_rank_0_trains_its_last_steps(wire: Wire) -> None:
    class Gone(Store):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer")

    saver = Saver(1, 2, Gone)
    saver.callback = str
    saver.at_step(1)
    assert wire.sent == []


def test_each_of_replicas_that_train_by_themselves_goes_on_from_what_it_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = {"step": 18, "path": "", "t": 1.0, "parts": {"0": [20, ""], "1": [18, str(tmp_path)]}}
    (tmp_path / "saved.json").write_text(json.dumps({"saves": [save]}))
    found = []
    for replica in ("0", "1"):
        monkeypatch.setenv("SLURM_FT_REPLICA", replica)
        found.append(last_save(tmp_path))
    assert [(save.step, save.path) for save in found if save] == [(20, ""), (18, str(tmp_path))]


def test_a_save_that_fails_is_told_and_does_not_end_the_training(wire: Wire) -> None:
    def full(step: int) -> str:
        raise OSError("no space")

    saver = Saver(0, 1)
    saver.callback = full
    saver.hear({"id": "a"})
    saver.at_step(5)
    assert wire.sent[0]["error"] == "OSError: no space" and not wire.sent[0]["wrote"]


@pytest.mark.parametrize("first", [0, 1], ids=["rank 0 steps first", "rank 1 steps first"])
def test_ranks_of_a_replica_save_in_the_same_step_whenever_they_hear_of_it(wire: Wire, first: int) -> None:
    """A rank ahead of its peer in a collective save would wait for it for ever."""
    store = Store()
    ranks = [Saver(rank, 2, lambda: store) for rank in (0, 1)]
    saves: dict[int, list[int]] = {0: [], 1: []}
    for step in range(1, 12):
        if step in (3, 8):
            ranks[0].hear({"id": f"s{step}"})
        if step in (4, 9):
            ranks[1].hear({"id": f"s{step - 1}"})
        for rank in (first, 1 - first):
            if ranks[rank].due():
                saves[rank].append(step)
                ranks[rank].answer(step, "", True, "")
    assert saves[0] == saves[1] == [3 + STEPS_AHEAD, 8 + STEPS_AHEAD]
    assert [(sent["id"], sent["step"]) for sent in wire.sent] == [("s3", 5), ("s3", 5), ("s8", 10), ("s8", 10)]


def test_a_run_resumes_from_the_newest_save_that_is_still_there(tmp_path: Path) -> None:
    """RW-57, RW-18: not from the highest number."""
    (tmp_path / "step_400").mkdir()
    saves = [{"step": 400, "path": f"{tmp_path}/step_400", "t": 1.0}, {"step": 437, "path": "/gone/step_437", "t": 2.0}]
    (tmp_path / "saved.json").write_text(json.dumps({"schema": 1, "saves": saves}))
    found = last_save(tmp_path)
    assert found is not None and found.step == 400


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"saves": 3}'])
def test_no_marker_or_a_damaged_one_is_no_save(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "saved.json").write_text(text)
    assert last_save(tmp_path) is None


def test_outside_a_run_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from slurm_ft import train

    monkeypatch.setattr(progress, "channel", lambda: None)
    train.on_save(lambda step: None)
    assert not train.save_requested()
    train.saved(3)
