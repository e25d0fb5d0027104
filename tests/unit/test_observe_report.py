import json
from pathlib import Path

from observe_histories import T0, History, failed_run, golden, healed_run

from slurm_ft.events import Event, Kind
from slurm_ft.observe import report
from slurm_ft.observe.ledger import Ledger


def of(events: list[Event]) -> report.Report:
    return report.compute(Ledger(events))


def text_of(events: list[Event]) -> str:
    return "\n".join(report.lines(of(events))) + "\n"


def json_of(events: list[Event]) -> str:
    return json.dumps(report.to_json(of(events)), indent=1) + "\n"


def test_the_report_of_a_healed_run_as_text_and_json() -> None:
    golden("report_healed.txt", text_of(healed_run()))
    golden("report_healed.json", json_of(healed_run()))


def test_the_report_of_a_failed_run_as_text_and_json() -> None:
    golden("report_failed.txt", text_of(failed_run()))
    golden("report_failed.json", json_of(failed_run()))


def test_a_run_that_goes_on_can_be_reported_at_any_moment() -> None:
    events = healed_run()
    for count in range(len(events)):
        report.to_json(of(events[:count]))
        assert text_of(events[:count])


def test_any_event_may_be_missing() -> None:
    events = healed_run()
    for left_out in range(len(events)):
        assert text_of(events[:left_out] + events[left_out + 1 :])


def test_any_field_of_an_event_may_be_missing_or_odd() -> None:
    events = healed_run()
    places = {event.kind: index for index, event in enumerate(events) if event.replica in (2, None)}
    for index in places.values():
        event = events[index]
        for name in event.data:
            for change in ({}, {name: None}, {name: "?"}, {name: -1}, {name: []}, {name: float("nan")}):
                data = {key: value for key, value in event.data.items() if key != name} | change
                changed = Event(event.t, event.kind, event.replica, data)
                assert text_of([*events[:index], changed, *events[index + 1 :]])


def test_steps_are_torchfts_own_where_a_script_tells_none() -> None:
    h = History(1).launch(0.1, 0).ranks(0.5, 0)
    for step in range(3):
        h.commit(2.0 + step, 0, step, committed=step != 1, train_step=None, loss=None, tokens=None)
    assert of(h.sorted()).steps == report.Steps(2, 3, "torchft")
    assert "committed steps 2/3 (torchft's)" in text_of(h.sorted())


def test_a_requeued_run_shows_its_newest_tables_and_all_tokens_and_incidents() -> None:
    first = History(2)
    for replica in range(2):
        first.launch(0.1, replica).ranks(0.5, replica).commit(2.0, replica, 1)
    first.killed(3.0, 0)
    second = History(2, session="b", job_id="4712").launch(0.1, 0).ranks(0.5, 0, 3)
    moved = [Event(event.t + 100, event.kind, event.replica, event.data) for event in second.sorted()]
    found = of(first.sorted() + moved)
    assert (found.sessions, len(found.incidents), found.tokens) == (2, 1, 2048)
    assert found.snapshot.job_id == "4712"
    assert found.snapshot.started == T0
    assert [row.attempt for row in found.snapshot.replicas] == [3, 0]


def test_a_traceback_cannot_reach_the_terminals_controls() -> None:
    h = History(1).launch(0.1, 0).ranks(0.5, 0).killed(1.0, 0, traceback="\x1b[2Jgone\n  line\n")
    h.at(1.1, Kind.STEP_ENDING, 0, step=1, then="FAILED", why="x").at(1.2, Kind.STEP_EXITED, 0, step=1, code=1)
    assert "\x1b" not in text_of(h.sorted())
    assert "    line" in text_of(h.sorted())


def test_there_are_at_most_three_lines_of_advice_and_none_for_what_was_done_on_purpose() -> None:
    assert of(healed_run()).advice == ()
    assert 1 <= len(of(failed_run()).advice) <= 3


def test_a_host_that_fails_again_and_again_is_named() -> None:
    h = History(2).launch(0.1, 0).ranks(0.5, 0)
    for n in range(3):
        h.killed(10.0 * n + 1, 0, n + 1).cleared(10.0 * n + 1.1, 0, n + 1)
        h.ranks(10.0 * n + 1.3, 0, n + 2, "in place").commit(10.0 * n + 5, 0, n, attempt=n + 2)
    assert any("--exclude=node1" in words for words in of(h.sorted()).advice)


def test_the_example_in_the_docs_is_a_real_report() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    shown = "".join(f"    {line}\n" if line else "\n" for line in text_of(healed_run()).splitlines())
    assert shown in docs
