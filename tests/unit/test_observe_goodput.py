import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from observe_histories import T0, History, failed_run, healed_run

from slurm_ft.controller.fold import fold
from slurm_ft.events import Event, Kind
from slurm_ft.observe.goodput import Goodput, measure
from slurm_ft.observe.ledger import Ledger


def goodput(events: list[Event]) -> Goodput:
    return measure(Ledger(events))


def one_replica(*times: float, end: float | None = None) -> History:
    """A replica that gets on at 1 s and commits a step at each of these times."""
    h = History(1).launch(0.1, 0).ranks(0.5, 0).joins(0.6, 0).progressed(1.0, 0)
    for step, t in enumerate(times):
        h.commit(t, 0, step)
    return h if end is None else h.done(end, 0).ended(end + 1)


def test_an_undisturbed_run_has_all_of_it_and_tells_start_and_end_apart() -> None:
    found = goodput(one_replica(2, 3, 4, 5, 6, end=7).sorted())
    assert found.percent == pytest.approx(100.0)
    assert (found.startup, found.shutdown) == (pytest.approx(1.0), pytest.approx(2.0))


def test_the_time_of_a_replica_that_is_away_is_missing() -> None:
    found = goodput(healed_run())
    assert found.possible == pytest.approx(60.0)
    assert found.lost == pytest.approx(0.3)  # from the last commit to the kill
    assert found.away == pytest.approx(3.7)
    assert found.percent == pytest.approx(100 * 56 / 60)


def test_steps_that_were_not_committed_are_lost() -> None:
    h = one_replica(2, 3).commit(5.0, 0, 2, committed=False, lost=2).commit(6.0, 0, 2)
    found = goodput(h.sorted())
    assert (found.useful, found.lost) == (pytest.approx(3.0), pytest.approx(2.0))


def test_steps_that_are_committed_at_the_second_try_are_not_lost() -> None:
    h = one_replica(2, 3).commit(5.0, 0, 2, committed=False, lost=2).commit(6.0, 0, 2, lost=2, again=True)
    found = goodput(h.sorted())
    assert (found.useful, found.lost) == (pytest.approx(5.0), pytest.approx(0.0))


def test_steps_committed_twice_count_once() -> None:
    """Every replica was killed: the run fell back to step 0 and did steps 0 and 1 again."""
    h = one_replica(2, 3).killed(3.02, 0).cleared(3.1, 0).ranks(3.2, 0, 2, "in place").progressed(4.0, 0, 2)
    for step, t in enumerate((5, 6, 7)):
        h.commit(t, 0, step, attempt=2)
    found = goodput(h.sorted())
    assert found.useful == pytest.approx(2.0 + 1.0)
    assert found.lost == pytest.approx(2.0)


def test_a_step_that_hung_is_waiting_beyond_twice_the_usual_time() -> None:
    found = goodput(one_replica(2, 3, 4, 5, 15, 16).sorted())
    assert found.waiting == pytest.approx(8.0)
    assert found.useful == pytest.approx(7.0)


def test_the_time_until_a_failed_run_gave_up_counts_against_it() -> None:
    found = goodput(failed_run())
    assert found.possible == pytest.approx(2 * 11.5)
    assert found.shutdown is None


def test_time_in_the_queue_between_two_jobs_does_not_count_but_coming_back_does() -> None:
    first = one_replica(2, 3).sorted()
    second = one_replica(2, 3).sorted()
    shifted = [Event(event.t + 1000, event.kind, event.replica, dict(event.data)) for event in second]
    for event in shifted:
        if event.kind is Kind.COMMIT:
            event.data["step"] += 2  # type: ignore[index]
    found = goodput(first + shifted)
    assert found.possible == pytest.approx(2.0 + 3.0)
    assert found.useful == pytest.approx(4.0)
    assert found.away == pytest.approx(1.0)


def test_a_run_that_never_trained_has_no_goodput() -> None:
    assert goodput([]).percent is None
    assert goodput(History(2).launch(0.1, 0).sorted()).percent is None


def test_without_torchft_progress_is_the_measure_and_work_done_twice_counts_once() -> None:
    h = History(1).launch(0.1, 0).ranks(0.5, 0).progressed(1.0, 0)
    for t, step in ((1.0, 0), (6.0, 5), (11.0, 10)):
        h.at(t, Kind.PROGRESS, 0, attempt=1, step=step, loss=1.0, tokens=step)
    h.killed(12.0, 0, age=0.0).cleared(12.1, 0).ranks(12.2, 0, 2, "in place")
    for t, step in ((13.0, 5), (23.0, 15)):  # it went on from its checkpoint at step 5
        h.at(t, Kind.PROGRESS, 0, attempt=2, step=step, loss=1.0, tokens=step)
    h.done(23.5, 0, 2).ended(24)
    found = goodput(h.sorted())
    assert found.basis == "progress"
    assert found.useful == pytest.approx(10.0 + 5.0)
    assert found.lost == pytest.approx(1.0 + 5.0)
    assert found.away == pytest.approx(1.0)


def test_without_any_report_only_what_ended_well_counts() -> None:
    h = History(1).launch(0.1, 0).ranks(0.5, 0).progressed(1.0, 0).killed(5.0, 0, age=0.0).cleared(5.1, 0)
    h.ranks(5.2, 0, 2, "in place").progressed(6.0, 0, 2)
    assert goodput(h.sorted()).useful == 0.0
    assert goodput(h.sorted()).basis == "time"


def test_a_script_that_reports_nothing_at_all_is_measured_by_its_time() -> None:
    h = History(1).launch(0.1, 0).ranks(1.0, 0).killed(3.0, 0, age=0.0).cleared(3.1, 0).ranks(4.0, 0, 2, "in place")
    h.at(11.0, Kind.RANK_DONE, 0, attempt=2, rank=0)
    h.at(11.0, Kind.RUN_ENDED, None, code=0, why="")
    found = goodput(h.sorted())
    assert (found.basis, found.useful, found.possible) == ("time", pytest.approx(7.0), pytest.approx(10.0))


def test_a_replica_that_ended_well_before_the_others_is_finished_and_not_away() -> None:
    h = History(2)
    for replica in range(2):
        h.launch(0.1, replica).ranks(0.5, replica).progressed(1.0, replica)
        h.at(1.0, Kind.PROGRESS, replica, attempt=1, step=0).at(11.0, Kind.PROGRESS, replica, attempt=1, step=10)
    h.done(11.0, 0).at(21.0, Kind.PROGRESS, 1, attempt=1, step=20).done(21.0, 1).ended(22.0)
    found = goodput(h.sorted())
    assert (found.useful, found.finished, found.away) == (pytest.approx(30), pytest.approx(10), pytest.approx(0))


REPLICA = st.integers(0, 2)
TIME = st.floats(0, 100, allow_nan=False)
ATTEMPT = st.integers(1, 3)
ANYTHING = st.one_of(
    st.builds(lambda t, r, a: (t, Kind.RANKS_STARTED, r, {"attempt": a, "rung": "in place"}), TIME, REPLICA, ATTEMPT),
    st.builds(lambda t, r, a: (t, Kind.PROGRESSED, r, {"attempt": a}), TIME, REPLICA, ATTEMPT),
    st.builds(
        lambda t, r, a, s, c, age: (t, Kind.COMMIT, r, {"attempt": a, "step": s, "committed": c, "age": age}),
        TIME, REPLICA, ATTEMPT, st.integers(-1, 20), st.booleans(), st.floats(-5, 50),
    ),
    st.builds(
        lambda t, r, a, s: (t, Kind.PROGRESS, r, {"attempt": a, "step": s}), TIME, REPLICA, ATTEMPT, st.integers(-1, 50)
    ),
    st.builds(
        lambda t, r, a, age: (t, Kind.RANK_FAILED, r, {"attempt": a, "what": "x", "age": age}),
        TIME, REPLICA, ATTEMPT, st.floats(0, 50),
    ),
    st.builds(
        lambda t, r, a, p: (t, Kind.PHASE, r, {"attempt": a, "rank": 0, "phase": p}),
        TIME, REPLICA, ATTEMPT, st.sampled_from(["checkpoint", "train"]),
    ),
    st.builds(lambda t, r: (t, Kind.CLEARING, r, {}), TIME, REPLICA),
    st.builds(lambda t, r: (t, Kind.AGENT_CLEARED, r, {"attempt": 1, "index": 0, "port": 1}), TIME, REPLICA),
    st.builds(lambda t, r, a: (t, Kind.RANK_DONE, r, {"attempt": a, "rank": 0}), TIME, REPLICA, ATTEMPT),
    st.builds(lambda t, r: (t, Kind.AGENT_JOINED, r, {"step": 1, "index": 0, "port": 1}), TIME, REPLICA),
)  # fmt: skip
SESSION = st.tuples(st.lists(ANYTHING, min_size=5, max_size=40), st.sampled_from([None, 0, 1]))


def session(items: list[tuple], code: int | None, start: float) -> list[Event]:
    """A session in which three replicas have been started three times each, and then anything happens."""
    h = History(3)
    for replica in range(3):
        h.launch(0.0, replica).ranks(0.4, replica)
        for attempt in (2, 3):
            h.events.append(Event(T0 + 0.5, Kind.RANKS_STARTED, replica, {"attempt": attempt, "rung": "in place"}))
    h.events += [Event(T0 + t, kind, replica, data) for t, kind, replica, data in items]
    if code is not None:
        h.ended(101, code)
    return [Event(event.t + start, event.kind, event.replica, event.data) for event in h.events]


@given(st.lists(SESSION, min_size=1, max_size=2), st.booleans())
@settings(max_examples=200, deadline=None)
def test_goodput_lies_between_0_and_100_whatever_happened(sessions: list[tuple], in_order: bool) -> None:
    events: list[Event] = []
    for number, (items, code) in enumerate(sessions):
        found = session(items, code, 200.0 * number)
        events += sorted(found, key=lambda event: event.t) if in_order else found
    ledger = Ledger(events)
    assert ledger.state == fold(events)  # the ledger's short cut for what changes nothing changes nothing
    measured = measure(ledger)
    assert measured.percent is None or 0.0 <= measured.percent <= 100.0
    parts = (measured.useful, measured.waiting, measured.lost, measured.finished, measured.away)
    assert all(part >= 0.0 for part in parts)
    assert sum(parts) == pytest.approx(measured.possible, abs=1e-3)
