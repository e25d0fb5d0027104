"""A run's own steps beside Slurm's rows, as recorded of real releases: what is matched, and what is explained."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_ft.errors import TryAgain, UsageError
from slurm_ft.events import Event, Kind
from slurm_ft.observe import accounting
from slurm_ft.observe.incidents import Incident
from slurm_ft.slurm import rows
from slurm_ft.slurm.client import NoAccounting, SlurmClient, Unreachable
from slurm_ft.slurm.commands import decoded
from slurm_ft.slurm.states import ExitCode, parse_state
from slurm_ft.slurm.views import AccountRow

RECORDED = Path(__file__).parents[1] / "recorded"


@pytest.fixture(params=sorted(place.name for place in RECORDED.iterdir()))
def book(request: pytest.FixtureRequest) -> list[AccountRow]:
    """Job 1 of the recordings: replica 1's first step was killed, its second ended well."""
    found = rows.account(decoded((RECORDED / request.param / "sacct.out").read_bytes()))
    assert found is not None
    return [row for row in found if row.job_id == "1"]


def story(start: float, job: str = "1") -> Iterator[Event]:
    yield Event(start, Kind.RUN_STARTED, None, {"job_id": job, "replicas": 2})
    for replica, host in ((0, "node1"), (1, "node2")):
        yield Event(start, Kind.STEP_LAUNCHED, replica, {"step": 1, "hosts": [host]})
    yield Event(start + 1, Kind.STEP_EXITED, 1, {"step": 1, "code": 137, "what": "srun was killed"})
    yield Event(start + 1, Kind.STEP_LAUNCHED, 1, {"step": 2, "hosts": ["node2"]})
    yield Event(start + 2, Kind.STEP_EXITED, 0, {"step": 1, "code": 0, "what": "srun ended"})
    yield Event(start + 2, Kind.STEP_EXITED, 1, {"step": 2, "code": 0, "what": "srun ended"})


def incident(replica: int, failed: float, rung: str) -> Incident:
    return Incident(replica, 1, failed, "it died", "SIGKILL", rank=0, rung=rung, outcome="healed")


INCIDENTS = (incident(1, 0.9, "by step"), incident(0, 0.5, "in place"))


def of_job(found: accounting.Accounts, words: str) -> list[str]:
    return [note for note in found.notes if words in note]


def test_each_step_is_put_beside_its_row_by_its_name(book: list[AccountRow]) -> None:
    found = accounting.reconcile(list(story(0.0)), INCIDENTS, book, 0)
    matched = {step.name: step.row for step in found.steps}
    assert list(matched) == ["sft-r0-s1", "sft-r1-s1", "sft-r1-s2"]
    assert all(row is not None and row.name == name for name, row in matched.items())
    assert [job.id for job in found.jobs] == ["1"]
    assert found.others == ()
    assert [step.words for step in found.steps] == [
        "0-0 SIGKILL, repaired in place",
        "1-0 SIGKILL, repaired by step",
        "ended well",
    ]


def test_the_derived_exit_code_of_a_run_that_repaired_itself_is_explained(book: list[AccountRow]) -> None:
    [note] = of_job(accounting.reconcile(list(story(0.0)), INCIDENTS, book, 0), "derived exit code")
    killed = next(row for row in book if row.name == "sft-r1-s1")
    assert note.startswith(
        "job 1 has the derived exit code 0:9 (killed by signal 9 (SIGKILL)), and the run ended with 0"
    )
    assert f"step {killed.id} (sft-r1-s1)" in note
    # A run that failed needs no such word, nor one that still runs.
    for code in (1, None):
        assert not of_job(accounting.reconcile(list(story(0.0)), INCIDENTS, book, code), "derived exit code")
    well = [dataclasses.replace(row, derived=ExitCode(0, 0)) for row in book]
    assert not of_job(accounting.reconcile(list(story(0.0)), INCIDENTS, well, 0), "derived exit code")


def test_a_failure_that_slurm_cannot_have_seen_is_named(book: list[AccountRow]) -> None:
    assert of_job(accounting.reconcile(list(story(0.0)), INCIDENTS, book, 0), "1 failure repaired in place")


def test_rows_that_are_missing_and_rows_that_are_too_many_are_named(book: list[AccountRow]) -> None:
    fewer = [row for row in book if row.name != "sft-r1-s2"]
    assert of_job(accounting.reconcile(list(story(0.0)), (), fewer, 0), "no row for sft-r1-s2: the accounting lags")
    assert of_job(accounting.reconcile(list(story(0.0)), (), [], 0), "the job has no row yet")
    events = [event for event in story(0.0) if event.replica != 1]
    more = accounting.reconcile(events, (), book, 0)
    assert {row.name for row in more.others} == {"sft-r1-s1", "sft-r1-s2"}
    assert len(of_job(more, "in Slurm's book and not in the run's")) == 2


def test_a_step_that_has_ended_and_still_runs_by_slurms_book_is_named(book: list[AccountRow]) -> None:
    late = [dataclasses.replace(row, state=parse_state("RUNNING")) if row.name == "sft-r0-s1" else row for row in book]
    assert of_job(accounting.reconcile(list(story(0.0)), (), late, 0), "the accounting lags")


def test_a_requeued_jobs_steps_of_the_same_name_are_told_apart_by_their_starts(book: list[AccountRow]) -> None:
    first = [dataclasses.replace(row, start=(row.start or 0) - 1000, nodelist="node9") for row in book]
    first = [row if row.step else dataclasses.replace(row, state=parse_state("REQUEUED")) for row in first]
    events = [*story(0.0), *story(1000.0)]
    found = accounting.reconcile(events, (), [*book, *first], 0)
    assert [step.row.nodelist for step in found.steps if step.row][:3] == ["node9"] * 3
    assert len(found.steps) == 6 and all(step.row for step in found.steps)
    assert of_job(found, "put back into the queue")
    assert accounting.job_ids(events) == ["1"]


def test_text_and_json_show_both_books(book: list[AccountRow]) -> None:
    found = accounting.reconcile(list(story(0.0)), INCIDENTS, book, 0)
    text = "\n".join(accounting.lines(found))
    assert "job 1  COMPLETED  exit code 0:0  derived 0:9  node[1-2]" in text
    assert "sft-r1-s1 CANCELLED 0:9" in text
    value = json.loads(json.dumps(accounting.to_json(found)))
    assert [step["slurm"]["exit_code"] for step in value["steps"]] == ["0:0", "0:9", "0:0"]


class Silent(SlurmClient):
    def __init__(self, answer: NoAccounting | Unreachable) -> None:
        self.answer = answer

    def account(self, job_id: int | str) -> NoAccounting | Unreachable:
        return self.answer


def test_no_accounting_no_answer_and_no_job_are_three_errors() -> None:
    events = list(story(0.0))
    with pytest.raises(UsageError, match="keeps no accounting: disabled"):
        accounting.ask(events, client=Silent(NoAccounting("disabled")))
    with pytest.raises(TryAgain, match="gives no answer: connection refused"):
        accounting.ask(events, client=Silent(Unreachable("connection refused")))
    with pytest.raises(UsageError, match="had no Slurm job"):
        accounting.ask(list(story(0.0, job="L12")))


def test_the_command_says_so_in_one_sentence(tmp_path: Path) -> None:
    from slurm_ft.cli.report import command

    (tmp_path / "events.jsonl").write_text("".join(event.to_line() for event in story(0.0, job="L12")))
    (tmp_path / "run.json").write_text("{}")
    done = CliRunner().invoke(command, [str(tmp_path), "--sacct"])
    assert done.exit_code == 2
    assert "had no Slurm job" in done.output
