"""From the packets of ranks to the few messages that the controller gets, and to what it records of them."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_ft.agent.observed import Observed
from slurm_ft.controller.book import SAMPLE_INTERVAL, Book

Messages = list[dict[str, Any]]


def observed() -> tuple[Observed, Messages]:
    sent: Messages = []
    return Observed(3, sent.append), sent


def packet(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "m": 1.0, **fields}


def types(sent: Messages) -> list[str]:
    return [message["type"] for message in sent]


def test_progress_waits_for_the_next_flush_and_only_the_last_is_sent() -> None:
    news, sent = observed()
    for step in range(100):
        news.packet(1, packet("progress", step=step, loss=100.0 - step, tokens=10 * step))
    assert sent == []
    news.flush()
    news.flush()
    assert sent == [{"type": "progress", "attempt": 3, "rank": 1, "step": 99, "loss": 1.0, "tokens": 990}]


def test_a_new_phase_a_quorum_and_an_error_are_sent_at_once_with_their_age() -> None:
    news, sent = observed()
    for _ in range(2):
        news.packet(0, packet("progress", phase="joined"))
    news.packet(0, packet("quorum", quorum_id=7, step=2))
    news.packet(0, packet("torchft_error", error="gone"))
    assert types(sent) == ["phase", "quorum", "torchft_error"]
    assert all(message["attempt"] == 3 and message["age"] > 0 for message in sent)


def test_a_commit_carries_the_last_progress_and_how_many_steps_it_covers() -> None:
    news, sent = observed()
    for step in (1, 2, 2, 3):
        news.packet(0, packet("progress", step=step, loss=0.5, tokens=step))
    news.packet(0, packet("commit", step=1, committed=True, quorum_id=7))
    news.packet(0, packet("progress", step=4, loss=0.25))
    news.packet(0, packet("commit", step=2, committed=False, quorum_id=7))
    first, second = sent
    assert (first["train_step"], first["lost"], first["committed"]) == (3, 3, True)
    assert (second["train_step"], second["lost"], second["loss"], second["tokens"]) == (4, 1, 0.25, 3)


def test_a_second_vote_on_the_same_work_says_so_and_covers_the_same_steps() -> None:
    news, sent = observed()
    for step in (1, 2, 3):
        news.packet(0, packet("progress", step=step))
    news.packet(0, packet("commit", step=1, committed=False, quorum_id=7))
    news.packet(0, packet("again"))
    news.packet(0, packet("commit", step=1, committed=True, quorum_id=8))
    news.packet(0, packet("progress", step=4))
    news.packet(0, packet("commit", step=2, committed=True, quorum_id=8))
    assert [(message["lost"], message.get("again", False)) for message in sent] == [(3, False), (3, True), (1, False)]


def test_work_that_a_peers_state_has_replaced_meanwhile_is_not_voted_on_again() -> None:
    news, sent = observed()
    news.packet(0, packet("commit", step=1, committed=False, quorum_id=7))
    news.packet(0, packet("again"))
    news.packet(0, packet("progress", phase="healed", source="peer", source_step=2))
    news.packet(0, packet("commit", step=2, committed=True, quorum_id=8))
    assert "again" not in sent[-1]


def test_a_commit_without_any_progress_covers_one_step() -> None:
    news, sent = observed()
    news.packet(0, packet("commit", step=1, committed=False))
    assert (sent[0]["lost"], sent[0]["train_step"]) == (1, None)


def test_ranks_do_not_mix() -> None:
    news, sent = observed()
    news.packet(0, packet("progress", step=5))
    news.packet(1, packet("progress", step=6))
    news.flush()
    assert [(message["rank"], message["step"]) for message in sent] == [(0, 5), (1, 6)]


@pytest.mark.parametrize(
    "fields",
    [{"type": "of a newer version"}, {}, {"type": None}, {"type": "progress"}, {"type": "progress", "step": "x"},
     {"type": "progress", "step": 1.5}],
)  # fmt: skip
def test_what_is_not_understood_is_passed_over(fields: dict[str, Any]) -> None:
    news, sent = observed()
    news.packet(0, fields)
    news.flush()
    assert sent == []


def test_a_loss_that_is_no_number_is_left_out() -> None:
    """A text would stop every reader that formats it."""
    news, sent = observed()
    news.packet(0, packet("progress", step=1, loss="[1.5, 2.5]", tokens="many"))
    news.flush()
    assert (sent[0]["step"], sent[0]["loss"], sent[0]["tokens"]) == (1, None, None)


# --- the controller's book ---------------------------------------------------------------------------------------


def test_a_sample_is_recorded_every_few_seconds_and_once_more_at_the_end() -> None:
    book = Book()
    book.started(0, 1)
    recorded = []
    for second in range(12):
        book.progress(0, {"step": second, "loss": 1.0, "tokens": second})
        recorded.append(book.sample(0, float(second)))
    assert [sample["step"] for sample in recorded if sample] == [0, 5, 10]
    assert SAMPLE_INTERVAL == 5.0
    last = book.sample(0, 11.5, last=True)
    assert last == {"attempt": 1, "step": 11, "loss": 1.0, "tokens": 11}
    assert book.sample(0, 100.0, last=True) is None


def test_a_program_that_reports_no_steps_is_not_sampled() -> None:
    book = Book()
    book.progress(0, {"step": None, "loss": None})
    assert book.sample(0, 1.0, last=True) is None


def test_commits_are_counted_when_they_succeed() -> None:
    book = Book()
    for committed in (True, False, True):
        book.commit(0, {"committed": committed, "step": 9, "train_step": 3, "loss": 0.5})
    page = book.page(0)
    assert (page.committed, page.step, page.loss) == (2, 3, 0.5)


def test_a_new_attempt_keeps_what_was_reached_and_forgets_who_it_was_in_quorums() -> None:
    book = Book()
    book.progress(0, {"step": 3, "loss": 0.5})
    book.page(0).member = "replica_0"
    book.started(0, 2)
    page = book.page(0)
    assert (page.attempt, page.step, page.member) == (2, 3, None)
