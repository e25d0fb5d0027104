"""What becomes of a job whose run has ended in it."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_ft.controller import comeback
from slurm_ft.controller.comeback import Ending, Plan
from slurm_ft.controller.requests import STOP_WORDS
from slurm_ft.errors import LaunchError
from slurm_ft.events import Event, EventLog, Kind
from slurm_ft.launch.session import Session
from slurm_ft.paths import RunPaths, write_json
from slurm_ft.slurm.client import Done, JobView, Submitted, Unreachable
from slurm_ft.slurm.states import parse_states
from slurm_ft.spec import Policy
from slurm_ft.submit import chain, rejoin, slurm_job

SESSION = Session("one", "12", ("n1",))


def job(state: str = "RUNNING", requeue: bool = True) -> JobView:
    return JobView("12", parse_states(state.split(",")), "None", 1, "n1", 60, 1, 0, requeue, None)


@pytest.mark.parametrize(
    ("end", "links", "view", "may", "expected"),
    [
        (Ending(75), (), job(), True, Plan(requeue=True, next="12")),
        (Ending(75), ("13", "14"), job(), True, Plan(next="13")),
        (Ending(75), (), job(), False, Plan()),
        (Ending(75), (), job(requeue=False), True, Plan()),
        (Ending(75), (), None, True, Plan(requeue=True, next="12")),
        (Ending(75, idle=1), (), job(), True, Plan(requeue=True, next="12")),
        (Ending(75, idle=2), (), job(), True, Plan()),
        (Ending(0), ("13", "14"), job(), True, Plan(cancel=("13", "14"))),
        (Ending(93), ("13",), job(), True, Plan(cancel=("13",))),
        (Ending(1), ("13",), job(), True, Plan()),
        (Ending(97), ("13",), job(), True, Plan()),
        (Ending(143, STOP_WORDS), ("13",), job(), True, Plan(cancel=("13",))),
        (Ending(143, "it got SIGTERM"), ("13",), job("CANCELLED by 1000"), True, Plan(cancel=("13",))),
        (Ending(143, "it got SIGTERM"), ("13",), job("PREEMPTED"), True, Plan()),
        (Ending(143, "it got SIGTERM"), ("13",), None, True, Plan()),
        (Ending(143, "it got SIGTERM"), ("13",), job("COMPLETING,CANCELLED"), True, Plan(cancel=("13",))),
        (Ending(75), ("13",), job("COMPLETING,CANCELLED"), True, Plan(cancel=("13",))),
        (Ending(75), (), job("COMPLETING,CANCELLED"), True, Plan()),
    ],
    ids=["limit", "limit of a link", "not wanted", "not allowed", "Slurm is silent", "one idle session",
         "two idle sessions", "done", "permanent", "failed", "launch", "stop file", "scancel",
         "RW-42: a preempted link keeps its chain", "TERM and no answer",
         "scancel, as --json says it", "scancel after the warning", "the same without a chain"],
)  # fmt: skip
def test_the_plan(end: Ending, links: tuple[str, ...], view: JobView | None, may: bool, expected: Plan) -> None:
    found = comeback.plan(end, links, view, may, "12")
    assert (found.cancel, found.requeue, found.next) == (expected.cancel, expected.requeue, expected.next)


def event(kind: Kind, **data: Any) -> Event:
    return Event(1.0, kind, None, data)


def test_sessions_without_progress_are_counted_from_the_last() -> None:
    start, moved = event(Kind.RUN_STARTED), event(Kind.PROGRESSED)
    assert comeback.ending([start, moved, start, start], 75).idle == 2
    assert comeback.ending([start, start, moved], 75).idle == 0
    assert comeback.ending([start, event(Kind.STOP_REQUESTED, why="x"), start], 75).why == ""


def test_a_session_of_a_program_that_reports_nothing_has_got_on_when_it_ran_for_long() -> None:
    def at(t: float, kind: Kind, **data: Any) -> Event:
        return Event(t, kind, 0 if kind is not Kind.RUN_STARTED else None, data)

    start, ranks, end = at(0.0, Kind.RUN_STARTED), at(1.0, Kind.RANKS_STARTED), at(5000.0, Kind.STEP_EXITED)
    assert comeback.ending([start, ranks, end], 75).idle == 0
    assert comeback.ending([start, ranks, at(60.0, Kind.STEP_EXITED)], 75).idle == 1
    waited = [start, ranks, at(2.0, Kind.MEMBER), end]  # with torchft, for peers that never came
    assert comeback.ending(waited, 75).idle == 1


def test_a_stop_that_somebody_asks_for_counts_although_the_time_limit_was_near() -> None:
    near = event(Kind.STOP_REQUESTED, why="the time limit or a preemption is near")
    assert comeback.ending([event(Kind.RUN_STARTED), near, event(Kind.STOP_REQUESTED, why=STOP_WORDS)], 143) == Ending(
        143, STOP_WORDS, 1
    )


class Client:
    def __init__(self, requeued: Any) -> None:
        self.requeued, self.done = requeued, []

    def job(self, job_id: str) -> JobView:
        return job()

    def with_base(self, view: JobView) -> JobView:
        return view

    def cancel(self, job_id: str) -> Done:
        self.done.append(f"cancel {job_id}")
        return Done()

    def requeue(self, job_id: str) -> Any:
        self.done.append(f"requeue {job_id}")
        return self.requeued


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    paths.create()
    return paths


def logged(paths: RunPaths, *events: Event) -> None:
    log = EventLog(paths.events)
    for item in events:
        log.append(item)
    log.close()


def test_who_follows_a_run_learns_in_which_job_it_goes_on(paths: RunPaths) -> None:
    client = Client(Done())
    logged(paths, event(Kind.RUN_STARTED), event(Kind.PROGRESSED))
    assert "put back" in comeback.come_back(paths, SESSION, 75, True, client).words  # type: ignore[arg-type]
    assert client.done == ["requeue 12"]
    found = rejoin.goes_on_in(paths, "12", lambda: False, lambda _: None)
    assert found is not None and found[0] == "12"
    assert rejoin.goes_on_in(paths, "11", lambda: True, lambda _: None) is None


@pytest.mark.parametrize(
    ("following", "ends", "words"),
    [("13", False, "goes on in job 13"), ("13", True, "goes on in job 13"), ("12", True, "put back into the queue")],
)
def test_who_missed_the_word_learns_from_the_events_that_the_run_has_gone_on(
    paths: RunPaths, following: str, ends: bool, words: str
) -> None:
    """The next session began, and may have ended, before anybody looked."""
    over = [event(Kind.RUN_ENDED, code=0)] if ends else []
    first = [event(Kind.RUN_STARTED, job_id="12"), event(Kind.RUN_ENDED, code=75)]
    logged(paths, *first, event(Kind.RUN_STARTED, job_id=following), *over)
    found = rejoin.goes_on_in(paths, "12", lambda: False, lambda _: None)
    assert found is not None and found[0] == following and words in found[1]


def test_a_session_that_was_over_before_anybody_looked_had_begun(paths: RunPaths) -> None:
    logged(paths, event(Kind.RUN_STARTED, job_id="12"), event(Kind.RUN_ENDED, code=75))
    assert not rejoin.begun_again(paths, lambda: True, lambda _: None)
    logged(paths, event(Kind.RUN_STARTED, job_id="12"), event(Kind.RUN_ENDED, code=0))
    assert rejoin.begun_again(paths, lambda: True, lambda _: None)


def test_a_session_that_ended_with_75_and_was_the_last_goes_on_nowhere(paths: RunPaths) -> None:
    both = [event(Kind.RUN_STARTED, job_id="12"), event(Kind.RUN_ENDED, code=75)]
    logged(paths, *both, *both)
    assert rejoin.goes_on_in(paths, "12", lambda: True, lambda _: None) is None


def test_a_requeue_that_slurm_refuses_leaves_no_promise_behind(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = list[float]()
    monkeypatch.setattr(comeback.time, "sleep", pauses.append)
    logged(paths, event(Kind.RUN_STARTED), event(Kind.PROGRESSED))
    words = comeback.come_back(paths, SESSION, 75, True, Client(Unreachable("no answer"))).words  # type: ignore[arg-type]
    assert words == "the job could not be put back into the queue: no answer"
    assert len(pauses) == comeback.REQUEUE_TRIES - 1  # it was asked again
    assert not paths.again.exists()


def test_sessions_of_a_program_that_reports_no_progress_may_come_back_again_and_again(paths: RunPaths) -> None:
    both = [event(Kind.RUN_STARTED), event(Kind.RUN_ENDED, code=75)]
    logged(paths, *both * 3)
    client = Client(Done())
    assert not comeback.come_back(paths, SESSION, 75, True, client).next  # type: ignore[arg-type]
    assert comeback.come_back(paths, SESSION, 75, True, client, idle=True).next == "12"  # type: ignore[arg-type]
    assert client.done == ["requeue 12"]


@pytest.mark.parametrize(
    ("outcome", "over"),
    [
        (("error", "UncompletedJobError: Job not requeued because: timed-out too many times."), True),
        (("error", "ValueError: a mistake"), False),
        (("success", 3), False),
        (None, False),
    ],
)
def test_a_submitit_task_has_had_its_time_only_when_submitit_says_so(tmp_path: Path, outcome: Any, over: bool) -> None:
    batch = pytest.importorskip("slurm_ft.submitit_plugin.batch")
    file = tmp_path / "outcome"
    if outcome is not None:
        file.write_bytes(pickle.dumps(outcome))
    assert batch._has_had_its_time(file) is over


def test_a_task_of_an_array_is_put_back_and_not_the_whole_array(paths: RunPaths) -> None:
    client = Client(Done())
    logged(paths, event(Kind.RUN_STARTED), event(Kind.PROGRESSED))
    done = comeback.come_back(paths, replace(SESSION, task="10_2"), 75, True, client)  # type: ignore[arg-type]
    assert (done.next, client.done) == ("12", ["requeue 10_2"])


def test_links_of_a_chain_that_is_refused_are_cancelled_on_their_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    clusters = list[str]()

    class There:
        def __init__(self, cluster: str) -> None:
            clusters.append(cluster)

        def cancel(self, job_id: str) -> None:
            clusters.append(job_id)

    def link(number: int, first: str, after: tuple[str, ...]) -> Submitted:
        if number == 2:
            raise LaunchError("refused", "")
        return Submitted("12", "b")

    monkeypatch.setattr(chain, "SlurmClient", There)
    with pytest.raises(LaunchError):
        chain.submit_links(3, link)
    assert clusters == ["b", "12"]


def test_links_are_cancelled_from_the_last_and_leave_the_chain(paths: RunPaths) -> None:
    write_json(paths.chain, {"links": ["12", "13", "14"]})
    logged(paths, event(Kind.RUN_STARTED))
    client = Client(Done())
    assert comeback.come_back(paths, SESSION, 0, True, client).cancel == ("13", "14")  # type: ignore[arg-type]
    assert client.done == ["cancel 14", "cancel 13"]
    assert comeback.links(paths) == ("12",)


class Busy(Client):
    """A Slurm that leaves the first orders without an answer."""

    def __init__(self, silent: int) -> None:
        super().__init__(Done())
        self.silent = silent

    def cancel(self, job_id: str) -> Any:
        super().cancel(job_id)
        self.silent -= 1
        return Unreachable("timed out") if self.silent >= 0 else Done()


@pytest.mark.parametrize(
    ("silent", "gone", "left"), [(1, ("13", "14"), ()), (5, ("13",), ("14",)), (9, (), ("13", "14"))]
)
def test_links_that_slurm_gave_no_answer_about_are_cancelled_again_and_then_named(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, silent: int, gone: tuple[str, ...], left: tuple[str, ...]
) -> None:
    pauses = list[float]()
    monkeypatch.setattr(comeback.time, "sleep", pauses.append)
    write_json(paths.chain, {"links": ["12", "13", "14"]})
    logged(paths, event(Kind.RUN_STARTED))
    done = comeback.come_back(paths, SESSION, 0, True, Busy(silent))  # type: ignore[arg-type]
    assert done.cancel == gone
    assert ("is cancelled: " + ", ".join(gone) in done.words) is bool(gone)
    assert ("could not be cancelled: " + ", ".join(left) in done.words) is bool(left)
    assert comeback.links(paths) == ("12", *left)
    assert len(pauses) <= comeback.REQUEUE_TRIES - 1  # for all links together


@pytest.mark.parametrize(
    ("why", "surroundings", "over"),
    [
        (STOP_WORDS, {"SLURM_FT_CHAIN": "2"}, True),
        ("it got SIGTERM", {"SLURM_FT_CHAIN": "2"}, False),  # a preemption
        (STOP_WORDS, {"SLURM_FT_CHAIN": "1"}, False),
        (STOP_WORDS, {"SLURM_RESTART_COUNT": "1"}, False),  # somebody put it back
    ],
)
def test_a_link_that_could_not_be_cancelled_does_not_undo_a_stop(
    paths: RunPaths, why: str, surroundings: dict[str, str], over: bool
) -> None:
    stop = event(Kind.STOP_REQUESTED, why=why)
    logged(paths, event(Kind.RUN_STARTED), stop, event(Kind.RUN_ENDED, code=143))
    assert bool(comeback.is_over(paths, surroundings)) is over


def test_the_links_after_a_job_are_those_behind_it(paths: RunPaths) -> None:
    write_json(paths.chain, {"links": ["12", "13", "14"]})
    assert comeback.links_after(paths, "13") == ("14",)
    assert comeback.links_after(paths, "99") == ()


@pytest.mark.parametrize(
    ("surroundings", "code", "over"),
    [
        ({"SLURM_FT_CHAIN": "2"}, 0, True),
        ({"SLURM_RESTART_COUNT": "1"}, 93, True),
        ({"SLURM_FT_CHAIN": "2"}, 75, False),
        ({"SLURM_FT_CHAIN": "2"}, 1, False),
        ({"SLURM_FT_CHAIN": "1"}, 93, False),  # submitted again, the program was mended
        ({"SLURM_FT_CHAIN": "1", "SLURM_RESTART_COUNT": "1"}, 93, True),
        ({}, 0, False),
    ],
)
def test_a_job_that_comes_after_the_end_has_nothing_to_do(
    paths: RunPaths, surroundings: dict[str, str], code: int, over: bool
) -> None:
    """RW-18: what must not run twice does not."""
    logged(paths, event(Kind.RUN_STARTED), event(Kind.RUN_ENDED, code=code))
    assert bool(comeback.is_over(paths, surroundings)) is over


def test_each_link_waits_for_the_one_before_it_whatever_ends_that() -> None:
    seen: list[tuple[int, str, tuple[str, ...]]] = []

    def link(number: int, first: str, after: tuple[str, ...]) -> Submitted:
        seen.append((number, first, after))
        return Submitted(str(11 + number))

    assert [job.job_id for job in chain.submit_links(3, link)] == ["12", "13", "14"]
    assert seen == [
        (1, "", ()),
        (2, "12", ("--dependency=afterany:12",)),
        (3, "12", ("--dependency=afterany:13",)),
    ]


@pytest.mark.parametrize(
    ("limit", "short"), [("1", True), ("2", True), ("3", False), ("1:00:00", False), (None, False)]
)
def test_a_limit_that_leaves_no_time_to_train_is_told_before_anything_is_queued(limit: str | None, short: bool) -> None:
    """RW-35."""
    assert bool(slurm_job.too_short(limit, Policy())) is short


def test_the_warning_comes_early_enough_to_save_and_to_stop() -> None:
    """RW-25: a checkpoint of ten minutes needs a warning of more."""
    assert slurm_job.warning_seconds(Policy()) == 120
    assert slurm_job.warning_seconds(Policy(save_within=600.0)) == 600 + 30 + slurm_job.SLACK_SECONDS
