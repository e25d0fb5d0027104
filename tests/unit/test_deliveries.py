"""News of agents: whatever gets lost on the way, and whichever controller dies, each is written down once."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from slurm_ft.agent.outbox import Outbox
from slurm_ft.controller.deliveries import Deliveries, Verdict
from slurm_ft.events import Event, Kind

WHO = (3, 1, 0)

moves = st.lists(st.sampled_from(["tell", "tell and lose", "alive", "alive and lose", "controller dies", "who"]))


@given(moves)
def test_each_piece_of_news_is_written_once_and_in_order(story: list[str]) -> None:
    wire: list[dict[str, Any]] = []
    outbox = Outbox(wire.append)
    log = [Event(0.0, Kind.STEP_LAUNCHED, 3, {"step": 1})]
    controller, told = Deliveries(1), 0
    known = True

    def deliver() -> bool:
        """The controller takes in what is on the wire; does it ask who this is?"""
        asked = not known and bool(wire)
        for message in wire if known else ():
            verdict = controller.take(WHO, message["n"])
            if verdict is Verdict.NEXT:
                log.append(Event(0.0, Kind.COMMIT, 3, {"rank": 0, "n": message["n"]}))
            asked = asked or verdict is Verdict.GAP
        wire.clear()
        return asked

    def who() -> None:
        nonlocal known
        known = True
        controller.begins(WHO, outbox.first)
        outbox.again()
        assert not deliver()

    for move in [*story, "alive"]:
        if move.startswith("tell"):
            told += 1
            outbox.tell({"type": "commit", "told": told})
        elif move == "controller dies":
            controller, known = Deliveries(1), False
            for event in log:
                controller.replay(event)
        if move.endswith("lose"):
            wire.clear()
        asked = deliver() or move == "who"
        if move == "alive":
            asked = asked or not known or outbox.last > controller.last(WHO)
            if not asked:
                outbox.acknowledged(controller.last(WHO))
        if asked:
            who()
    written = [event.data["n"] for event in log if "n" in event.data]
    assert written == list(range(1, told + 1))


def test_what_is_told_again_is_older_by_the_time_that_has_passed() -> None:
    sent: list[dict[str, Any]] = []
    outbox = Outbox(sent.append)
    outbox.tell({"type": "commit", "age": 0.5})
    outbox.tell({"type": "cleared"})
    outbox.again()
    assert sent[2]["age"] > sent[0]["age"] == 0.5
    assert sent[3] == sent[1]
    outbox.acknowledged(1)
    assert outbox.first == 2


def test_a_new_step_counts_from_the_start() -> None:
    deliveries = Deliveries(2)
    for event in (
        Event(0.0, Kind.STEP_LAUNCHED, 0, {"step": 1}),
        Event(0.0, Kind.COMMIT, 0, {"rank": 3, "n": 9}),
        Event(0.0, Kind.STEP_LAUNCHED, 0, {"step": 2}),
        Event(0.0, Kind.AGENT_CLEARED, 0, {"index": 1, "n": 2}),
    ):
        deliveries.replay(event)
    assert [deliveries.last((0, step, 1)) for step in (1, 2)] == [9, 2]
