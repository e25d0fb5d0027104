"""The recovery benchmark's arithmetic on logs that are made up."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft.testing.bench import figure, log
from slurm_ft.testing.bench.log import Line


def steps(replica: int, pid: int, first: int, count: int, start: float, what: str = "step") -> list[Line]:
    return [Line(start + i * 0.1, pid, replica, what, first + i) for i in range(count)]


def test_times_are_counted_from_the_kill_and_belong_to_the_new_process():
    lines = [
        *steps(1, 10, 1, 20, 0.0), *steps(0, 9, 1, 50, 0.0),
        Line(1.5, 10, 1, "commit", 15),
        Line(2.1, 11, 1, "born", 0), Line(2.4, 11, 1, "joined", 0), Line(2.45, 11, 1, "met", 20),
        Line(2.5, 11, 1, "step", 21), Line(2.6, 11, 1, "commit", 21),
    ]  # fmt: skip
    found = log.recovery(sorted(lines, key=lambda line: line.t), 1, 2.0, 0.01, 10)
    assert (found.relaunched, found.joined, found.committed) == pytest.approx((0.1, 0.4, 0.6))
    assert (found.met, found.averaged, found.step) == pytest.approx((0.45, 0.5, 0.1))
    assert found.detected == 0.01
    assert found.survivors_lost_s == pytest.approx(0.0, abs=1e-6) and found.survivors_lost_steps == 0


def test_a_survivor_that_stood_still_lost_the_time_and_one_that_went_back_lost_the_steps():
    still = [*steps(0, 9, 1, 20, 0.0), *steps(0, 9, 21, 20, 5.0)]
    assert log.survivor_loss(still, 0, 1.95, 10) == pytest.approx((5.0 - 2.0, 0))
    back = [*steps(0, 9, 1, 20, 0.0), *steps(0, 12, 11, 30, 5.0)]  # from a checkpoint of step 10
    seconds, again = log.survivor_loss(back, 0, 1.95, 10)
    assert again == 10 and seconds == pytest.approx(5.0 + 1.9 - 1.9 - 1.0)
    young = [*steps(0, 9, 1, 5, 0.0), *steps(0, 9, 6, 20, 5.0)]  # fewer steps before the kill than the window has
    assert log.survivor_loss(young, 0, 0.45, 10) == pytest.approx((5.0 - 0.5, 0))


def test_only_steps_that_were_committed_by_their_process_count():
    lines = [
        *steps(0, 1, 1, 5, 0.0), Line(0.5, 1, 0, "commit", 5), *steps(0, 1, 6, 3, 0.6),
        *steps(0, 2, 4, 7, 2.0), Line(3.0, 2, 0, "commit", 10), Line(3.1, 2, 0, "end", 10),
    ]  # fmt: skip
    assert log.useful_steps(lines) == 10
    assert log.whole(lines, 1) == log.Whole(3.1, 10, 1, pytest.approx(0.1))
    with pytest.raises(ValueError, match="did not come to its end"):
        log.whole(lines[:3], 0)


def test_steps_that_a_keeper_held_count_and_those_of_a_healed_replica_do_not():
    dead = steps(0, 1, 1, 5, 0.0)
    held = [Line(0.6, 2, 0, "joined", 0), Line(0.7, 2, 0, "restored", 4), *steps(0, 2, 5, 6, 0.8)]
    assert log.useful_steps([*dead, *held, Line(3.0, 2, 0, "commit", 10)]) == 10
    assert log.useful_steps([*dead, *held, Line(3.0, 2, 0, "commit", 20)]) == 0  # its peers had passed it
    assert log.useful_steps([*dead, *steps(0, 2, 5, 6, 0.8), Line(3.0, 2, 0, "commit", 10)]) == 6


WORDS = st.sampled_from(["step", "commit", "restored"])


@given(st.lists(st.tuples(st.integers(0, 3), WORDS, st.integers(0, 9)), max_size=40))
def test_never_more_steps_count_than_were_trained(what):
    lines = [Line(float(t), pid, 0, word, step) for t, (pid, word, step) in enumerate(what)]
    assert 0 <= log.useful_steps(lines) <= sum(line.what == "step" for line in lines)


def test_a_log_that_is_being_written_is_read(tmp_path):
    file = tmp_path / "log"
    assert log.read(file) == []
    file.write_text('{"t": 2.0, "pid": 1, "replica": 0, "what": "step", "step": 1}\n{"t": 3.0, "pi')
    assert log.read(file) == [Line(2.0, 1, 0, "step", 1)]


def test_tables_line_up_and_charts_are_svg():
    rows = [["slurm-ft", figure.seconds((1.0, 0.5, 2.0))], ["a <rival>", figure.seconds(None)]]
    text = figure.table(["way", "committed"], rows)
    assert len({len(line) for line in text.splitlines()}) == 1 and "1.00 (0.50-2.00)" in text
    drawn = ElementTree.fromstring(figure.svg("x & y", {"slurm-ft": (1.0, 0.5, 2.0), "a <rival>": (3.0, 3.0, 3.0)}))
    assert len([part for part in drawn if part.tag.endswith("rect")]) == 2
