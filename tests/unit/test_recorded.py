"""What five releases of Slurm really printed is read the same way (tests/recorded, made by scripts/record_slurm).

The same history was played on each release: its jobs have the same numbers, states and names on all of them.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slurm_ft.slurm import json_rows, rows
from slurm_ft.slurm.client import JobView, NoAccounting, SlurmClient, Unknown, Unreachable
from slurm_ft.slurm.commands import decoded
from slurm_ft.slurm.readers import CommandReader, choose, pick, version
from slurm_ft.slurm.states import ExitCode
from slurm_ft.slurm.units import NoTime
from slurm_ft.slurm.views import AccountRow

RECORDED = Path(__file__).parents[1] / "recorded"
RELEASES = sorted(place.name for place in RECORDED.iterdir() if place.is_dir())
UGLY = 'd\ufffdj\ufffd|vu, "a"\nb'
NOW = 0.0


def recorded(release: str, name: str) -> str:
    return decoded((RECORDED / release / f"{name}.out").read_bytes())


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def jobs_of(release: str, form: str) -> dict[str, JobView]:
    found = {
        "text": lambda: rows.jobs(recorded(release, "squeue-names"), named=True),
        "json": lambda: json_rows.jobs(recorded(release, "squeue-json"), NOW),
        "scontrol": lambda: rows.scontrol(recorded(release, "scontrol")),
    }[form]()
    assert found is not None
    return {view.job_id: view for view in found}


def test_every_release_in_use_is_there() -> None:
    assert RELEASES == ["22.05", "23.11", "24.11", "25.11", "26.05"]


@pytest.mark.parametrize("form", ["text", "json", "scontrol"])
def test_a_release_is_read_the_same_in_each_form(release: str, form: str) -> None:
    jobs = jobs_of(release, form)
    assert set(jobs) == {str(number) for number in range(1, 10)}
    said = {number: view.state.state.name for number, view in jobs.items()}
    assert said == {"1": "COMPLETED", "2": "FAILED", "3": "CANCELLED", "5": "RUNNING"} | dict.fromkeys(
        "46789", "PENDING"
    )
    assert (jobs["5"].hosts, jobs["5"].nodes, jobs["5"].time_limit) == (("node1", "node2"), 2, 86400 + 1800)
    assert (jobs["2"].exit_code, jobs["3"].exit_code) == (ExitCode(3, 0), ExitCode(0, 15))
    assert (jobs["4"].restarts, jobs["4"].reason, jobs["4"].time_limit) == (1, "BeginTime", 1800)
    assert (jobs["6"].nodes, jobs["6"].nodelist, jobs["6"].time_left) == (3, "", NoTime.UNLIMITED)
    assert jobs["6"].reason == "Resources"
    assert all(view.requeue for view in jobs.values())


@pytest.mark.parametrize("form", ["text", "json", "scontrol"])
def test_rw54_a_name_with_bars_quotes_line_breaks_and_bytes_that_are_no_utf8_is_one_name(
    release: str, form: str
) -> None:
    assert jobs_of(release, form)["6"].name == UGLY


@pytest.mark.parametrize("form", ["text", "json", "scontrol"])
def test_tasks_of_arrays_and_parts_of_heterogeneous_jobs_have_their_ids(release: str, form: str) -> None:
    jobs = jobs_of(release, form)
    assert re.fullmatch(r"7_\[1-3(%1)?\]", jobs["7"].array_id)
    assert (jobs["8"].array_id, jobs["9"].array_id, jobs["1"].array_id) == ("8+0", "8+1", "1")
    found = list(jobs.values())
    assert pick("8+1", found) == JobView(**{**vars(jobs["9"]), "job_id": "8+1"})
    assert pick("8", found) == jobs["8"]
    assert pick("4711", found) is None


def test_the_time_left_of_a_running_job_is_below_its_limit_in_text_and_counted_from_now_in_json(release: str) -> None:
    left = jobs_of(release, "text")["5"].time_left
    assert isinstance(left, int) and 80000 < left <= 88200
    start = next(row.start for row in account_of(release, "text") if row.id == "5")
    assert start is not None
    found = json_rows.jobs(recorded(release, "squeue-json"), start + 200)
    assert found is not None
    assert next(view.time_left for view in found if view.job_id == "5") == 88200 - 200


def test_scontrol_speaks_json_from_23_11_on(release: str) -> None:
    found = json_rows.jobs(recorded(release, "scontrol-json"), NOW)
    if release == "22.05":
        assert found is None
        return
    assert found is not None
    assert [view.job_id for view in found] == ["5"]
    assert found[0] == jobs_of(release, "json")["5"]


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_accounting_has_jobs_and_steps_with_their_ends(release: str, form: str) -> None:
    found = account_of(release, form)
    said = {row.id: (row.state.state.name, row.exit_code, row.nodelist) for row in found if row.job_id == "1"}
    killed = next(row for row in found if row.name == "sft-r1-s1")
    assert set(said) == {"1", "1.batch", "1.0", "1.1", "1.2"}
    assert said["1"] == ("COMPLETED", ExitCode(0, 0), "node[1-2]")
    assert said[killed.id] == ("CANCELLED", ExitCode(0, 9), "node2")
    job = next(row for row in found if row.id == "1")
    assert job.derived == ExitCode(0, 9)
    assert job.start and job.end and job.end - job.start == job.elapsed
    assert {row.name for row in found if row.job_id == "1"} == {"titan", "batch", "sft-r0-s1", "sft-r1-s1", "sft-r1-s2"}
    assert {row.cluster for row in found} == {"devcluster"}
    other = {row.id: row.memory for row in account_of(release, "json" if form == "text" else "text")}
    measured = {row.id: row.memory for row in found if row.memory}
    assert measured == {name: memory for name, memory in other.items() if memory}
    # 25.11.2 measured nothing in its recording, in both forms.
    assert measured or release == "25.11"
    assert next(row for row in found if row.id == "4").state.state.name in ("REQUEUED", "PENDING")


def account_of(release: str, form: str) -> list[AccountRow]:
    answer = recorded(release, "sacct" if form == "text" else "sacct-json")
    found = rows.account(answer) if form == "text" else json_rows.account(answer)
    assert found is not None
    return found


def test_rw01_a_cancelled_jobs_row_says_by_whom(release: str) -> None:
    found = [row for row in account_of(release, "text") if row.id == "3"]
    assert [row.state.cancelled_by for row in found] == [0]


def test_a_step_is_listed_with_its_name_and_host(release: str) -> None:
    found = rows.steps(recorded(release, "squeue-steps"))
    assert found is not None
    assert [(step.step_id, step.name, step.nodelist) for step in found] == [("5.batch", "batch", "node1")]


def test_the_release_is_read_out_of_its_own_words(release: str) -> None:
    client = SlurmClient(Answers({("squeue",): recorded(release, "squeue-version").encode()}))
    assert client.version() == tuple(map(int, release.split(".")))


class Answers:
    """Stands where subprocess.run stands: an answer for each beginning of a command line, the longest that fits."""

    def __init__(self, answers: dict[tuple[str, ...], bytes], err: bytes = b"", code: int = 0) -> None:
        self.answers, self.err, self.code = answers, err, code
        self.calls: list[Sequence[str]] = []

    def __call__(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        self.calls.append(argv)
        fitting = [words for words in self.answers if tuple(argv[: len(words)]) == words]
        out = self.answers[max(fitting, key=len)] if fitting else b""
        return subprocess.CompletedProcess(argv, self.code, out, self.err)


# --- what stands around the output -------------------------------------------------------------------------------

BANNER = b"*** Maintenance on Tuesday (see https://example.org/news) {really} ***\nquota: 12|40|90 %\n"


@pytest.mark.parametrize("around", [(b"", b"\nbye\n"), (BANNER, b""), (BANNER, BANNER)])
def test_words_of_a_sites_wrapper_around_the_output_are_passed_over(release: str, around: tuple[bytes, bytes]) -> None:
    def wrapped(name: str) -> bytes:
        return around[0] + (RECORDED / release / f"{name}.out").read_bytes() + around[1]

    text = rows.jobs(decoded(wrapped("squeue-names")), named=True)
    assert text is not None
    assert {view.job_id: view.name for view in text}["6"] == UGLY
    assert len(text) == 9
    document = json_rows.jobs(decoded(wrapped("squeue-json")), NOW)
    assert document is not None and len(document) == 9
    account = rows.account(decoded(wrapped("sacct")))
    assert account == account_of(release, "text")


def test_rw09_headings_of_clusters_are_no_rows(release: str) -> None:
    out = recorded(release, "squeue-cluster")
    assert rows.jobs("CLUSTER: nordlys\n" + out) == rows.jobs(out)
    assert rows.jobs("CLUSTER: nordlys\n") == []


def test_a_wrapper_that_makes_squeues_rows_unreadable_is_gone_around(release: str) -> None:
    pretty = b"JOBID NAME STATE\n5     running RUNNING\n"
    by_scontrol = Answers({("squeue",): pretty, ("scontrol",): (RECORDED / release / "scontrol.out").read_bytes()})
    view = SlurmClient(by_scontrol).job(5)
    assert isinstance(view, JobView) and view.hosts == ("node1", "node2")
    json_answer = (RECORDED / release / "squeue-json.out").read_bytes()
    by_json = Answers({("squeue",): pretty, ("squeue", "--json"): BANNER + json_answer, ("scontrol",): pretty})
    view = SlurmClient(by_json).job(5)
    assert isinstance(view, JobView) and view.hosts == ("node1", "node2")
    assert isinstance(SlurmClient(Answers({("squeue",): pretty, ("scontrol",): pretty})).job(5), Unreachable)


def test_a_job_that_a_federation_moved_is_found_where_it_runs() -> None:
    moved = "7|7|REVOKED|None|1||30:00|30:00|0|1|0:0|\n"
    here = "7|7|RUNNING|None|1|node9|30:00|29:00|0|1|0:0|\n"
    for out in (moved + here, here + moved):
        view = SlurmClient(Answers({("squeue",): out.encode()})).job(7)
        assert isinstance(view, JobView) and view.hosts == ("node9",)


# --- spellings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (30, 30),
        ("30", 30),
        ({"set": True, "infinite": False, "number": 30}, 30),
        ({"set": False, "infinite": True, "number": 0}, NoTime.UNLIMITED),
        ({"set": False, "infinite": False, "number": 0}, NoTime.UNKNOWN),
        ({}, NoTime.UNKNOWN),
        (None, NoTime.UNKNOWN),
        (True, NoTime.UNKNOWN),
        ("Partition_Limit", NoTime.UNKNOWN),
    ],
)
def test_a_number_in_json_is_never_zero_by_mistake(value: Any, expected: Any) -> None:
    assert json_rows.number(value) == expected


UNSET = {"set": False, "infinite": False, "number": 0}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (768, ExitCode(3, 0)),
        ("0:9", ExitCode(0, 9)),
        ({"status": "SUCCESS", "return_code": 0}, ExitCode(0, 0)),
        ({"status": "SIGNALED", "return_code": None, "signal": {"signal_id": 9, "name": "Killed"}}, ExitCode(0, 9)),
        (
            {"status": ["SIGNALED"], "return_code": UNSET, "signal": {"id": UNSET | {"set": True, "number": 9}}},
            ExitCode(0, 9),
        ),
        ({"return_code": UNSET | {"set": True, "number": 3}, "signal": {"id": UNSET, "name": ""}}, ExitCode(3, 0)),
        ({"return_code": UNSET, "signal": UNSET | {"set": True, "number": 15}}, ExitCode(0, 15)),
        ({"return_code": UNSET, "signal": {"id": UNSET}}, None),
        (None, None),
    ],
)
def test_an_exit_code_is_a_pair_in_every_spelling(value: Any, expected: ExitCode | None) -> None:
    assert json_rows.exit_code(value) == expected


@pytest.mark.parametrize(
    ("value", "name", "base"),
    [
        ("RUNNING", "RUNNING", None),
        (["RUNNING"], "RUNNING", None),
        (["CANCELLED", "COMPLETING"], "COMPLETING", "CANCELLED"),
        (["COMPLETING", "CANCELLED"], "COMPLETING", "CANCELLED"),
        (["PENDING", "REQUEUED"], "REQUEUED", "PENDING"),
        (["RUNNING", "SOMETHING_NEW"], "RUNNING", None),
        ({"current": ["FAILED"], "reason": "None"}, "FAILED", None),
        ({"current": "COMPLETED"}, "COMPLETED", None),
        (["SOMETHING_NEW"], "UNKNOWN", None),
        ([], "UNKNOWN", None),
        (None, "UNKNOWN", None),
    ],
)
def test_a_state_in_json_is_a_word_or_a_base_with_flags(value: Any, name: str, base: str | None) -> None:
    field = json_rows.state(value)
    assert (field.state.name, field.base and field.base.name) == (name, base)


# --- accounting that is not there --------------------------------------------------------------------------------


def test_a_cluster_without_accounting_and_one_whose_accounting_is_silent_are_told_apart() -> None:
    disabled = Answers({}, b"Slurm accounting storage is disabled\n", 1)
    assert SlurmClient(disabled).account(1) == NoAccounting("Slurm accounting storage is disabled")
    refused = b"sacct: error: slurm_persist_conn_open_without_init: failed to open persistent connection to host"
    assert isinstance(SlurmClient(Answers({}, refused, 1)).account(1), Unreachable)
    assert SlurmClient(Answers({})).account(1) == []


def test_an_unreadable_answer_of_sacct_is_asked_for_as_json(release: str) -> None:
    json_answer = (RECORDED / release / "sacct-json.out").read_bytes()

    class Wrapped(Answers):
        def __call__(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
            out = json_answer if "--json" in argv else b"our own nice table\n"
            return subprocess.CompletedProcess(argv, 0, out, b"")

    found = SlurmClient(Wrapped({})).account(1)
    assert found == json_rows.account(decoded(json_answer))
    # A time format of our own would make --json fail, and is not set there.
    assert not isinstance(found, NoAccounting | Unreachable)


# --- who asks ----------------------------------------------------------------------------------------------------


def test_the_commands_ask_where_pyslurm_is_not_or_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from slurm_ft.slurm import commands, readers

    def chosen(installed: str | None, slurm: bytes) -> tuple[str, str]:
        def find(name: str) -> str:
            if installed is None:
                raise readers.importlib.metadata.PackageNotFoundError(name)
            return installed

        monkeypatch.setattr(readers.importlib.metadata, "version", find)
        choice = choose(commands.Commands(Answers({("squeue",): slurm})))
        return choice.reader.name, choice.why

    assert chosen(None, b"slurm 25.11.2\n") == ("commands", "pyslurm is not installed")
    assert chosen("25.11.2", b"slurm-wlm 22.05.8\n") == ("commands", "pyslurm 25.11.2 does not fit Slurm 22.05")
    # Importing pyslurm ends the process where Slurm is not configured, so it is not tried.
    assert chosen("25.11.2", b"")[1].endswith("version cannot be found out")
    assert choose(commands.Commands(cluster="nordlys")).why == "pyslurm asks only the cluster it is on"


def test_no_release_is_read_out_of_words_without_one() -> None:
    assert version(Unreachable("no")) is None


def test_unknown_jobs_are_unknown_in_the_words_of_each_release(release: str) -> None:
    err = (RECORDED / release / "squeue-unknown.err").read_bytes()
    assert SlurmClient(Answers({}, err, 1)).job(4711) == Unknown("4711")
    assert CommandReader().name == "commands"
    err = (RECORDED / release / "scancel-unknown.err").read_bytes()
    assert SlurmClient(Answers({}, err, 0)).cancel(4711) == Unknown("4711")
