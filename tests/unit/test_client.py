"""The client keeps "it is so", "no such job" and "no answer" apart. Texts are of a real Slurm 22.05.8."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from slurm_ft.errors import HostlistError, LaunchError, UsageError
from slurm_ft.slurm.client import (
    Done,
    JobView,
    SlurmClient,
    Submitted,
    Unknown,
    Unreachable,
    cluster_of,
    command_environment,
    read_submission,
)
from slurm_ft.slurm.states import ExitCode
from slurm_ft.slurm.units import NoTime

RUNNING = b"1|1|RUNNING|None|3|node[1-3]|30:00|29:59|0|1|0|\n"
WAITING = b"2|2|PENDING|Resources|4||UNLIMITED|UNLIMITED|0|1|0|\n"
NO_NODE = b"40|40|PENDING|ReqNodeNotAvail, UnavailableNodes:node4|1||UNLIMITED|UNLIMITED|0|1|0|\n"
FAILED = b"42|42|FAILED|NonZeroExitCode|3|node[1-3]|30:00|29:58|0|1|35072|\n"
REQUEUED = b"36|36|PENDING|BeginTime|2||30:00|30:00|1|1|0|\n"
INVALID = b"slurm_load_jobs error: Invalid job id specified\n"
TIMED_OUT = b"slurm_load_jobs error: Socket timed out on send/recv operation\n"
NO_CONTACT = b"slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
NO_CONFIG = (
    b"squeue: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
    b"squeue: error: fetch_config: DNS SRV lookup failed\n"
    b"squeue: fatal: Could not establish a configuration source\n"
)


@dataclasses.dataclass
class FakeSlurm:
    """Stands where subprocess.run stands: gives one answer to every command and remembers what it was asked."""

    out: bytes = b""
    err: bytes = b""
    code: int = 0
    error: Exception | None = None
    calls: list[tuple[Sequence[str], Mapping[str, Any]]] = dataclasses.field(default_factory=list)

    def __call__(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        self.calls.append((argv, options))
        if self.error:
            raise self.error
        return subprocess.CompletedProcess(argv, self.code, self.out, self.err)


def view_of(job_id: str, out: bytes) -> JobView:
    view = SlurmClient(FakeSlurm(out)).job(job_id)
    assert isinstance(view, JobView)
    return view


def test_a_running_job_is_described_with_hosts_times_and_restarts() -> None:
    view = view_of("1", RUNNING)
    assert view.state.state.running
    assert view.hosts == ("node1", "node2", "node3")
    assert (view.time_limit, view.time_left, view.restarts, view.requeue) == (1800, 1799, 0, True)


def test_rw47_an_unlimited_job_has_no_number_of_seconds_left() -> None:
    view = view_of("2", WAITING)
    assert view.state.state.pending
    assert view.time_left is NoTime.UNLIMITED
    assert (view.hosts, view.nodes, view.reason) == ((), 4, "Resources")


def test_a_reason_keeps_the_details_that_slurm_gives() -> None:
    assert view_of("40", NO_NODE).reason == "ReqNodeNotAvail, UnavailableNodes:node4"


def test_a_job_that_ended_has_its_exit_code() -> None:
    assert view_of("42", FAILED).exit_code == ExitCode(137, 0)


def test_rw42_a_requeued_job_is_pending_and_counts_its_restart() -> None:
    view = view_of("36", REQUEUED)
    assert view.state.state.pending
    assert (view.restarts, view.reason) == (1, "BeginTime")


@pytest.mark.parametrize(
    ("fake", "outcome"),
    [
        (FakeSlurm(err=INVALID, code=1), Unknown("7")),
        (FakeSlurm(out=b""), Unknown("7")),
        (FakeSlurm(err=TIMED_OUT, code=1), Unreachable(TIMED_OUT.decode().strip())),
        (FakeSlurm(err=NO_CONTACT, code=1), Unreachable(NO_CONTACT.decode().strip())),
        (
            FakeSlurm(err=NO_CONFIG, code=1),
            Unreachable("squeue: fatal: Could not establish a configuration source"),
        ),
        (FakeSlurm(code=3), Unreachable("exit code 3 and no words")),
        (
            FakeSlurm(error=subprocess.TimeoutExpired("squeue", 30)),
            Unreachable("squeue gave no answer in 30 s"),
        ),
        (
            FakeSlurm(error=FileNotFoundError(2, "No such file or directory")),
            Unreachable("squeue could not be run: No such file or directory"),
        ),
    ],
)
def test_rw52_no_such_job_and_no_answer_are_told_apart(fake: FakeSlurm, outcome: Unknown | Unreachable) -> None:
    client = SlurmClient(fake)
    assert client.job(7) == outcome
    assert client.hosts_of_job(7) == outcome


@pytest.mark.parametrize(
    "out",
    [b"7|7|RUNNING|None\n", b"slurm: maintenance tonight\n", b"7|7|RUNNING|None|x|n1|1:00|1:00|0|1|0|\n", RUNNING],
)
def test_rw52_an_answer_that_cannot_be_read_is_no_answer(out: bytes) -> None:
    outcome = SlurmClient(FakeSlurm(out)).job(7)
    assert isinstance(outcome, Unreachable)
    assert "cannot be read" in outcome.reason


def test_a_question_is_one_squeue_of_one_job_for_fields_that_are_not_free_text() -> None:
    fake = FakeSlurm(RUNNING)
    SlurmClient(fake).job(1)
    [(argv, options)] = fake.calls
    assert argv[:4] == ["squeue", "--noheader", "--states=all", "--jobs=1"]
    fields = argv[4].removeprefix("--Format=").split(",")
    assert all(field.endswith(":|") for field in fields)
    assert not {"name:|", "comment:|", "command:|", "workdir:|"} & set(fields)
    assert options["stdin"] == subprocess.DEVNULL
    assert options["timeout"] == 30


def test_rw54_bytes_that_are_not_utf8_do_not_stop_an_answer_from_being_read() -> None:
    view = view_of("1", RUNNING.replace(b"None", b"d\xe9j\xe0"))
    assert view.state.state.running
    assert view.reason == "d\ufffdj\ufffd"


def test_rw54_commands_run_in_a_known_locale_and_without_variables_that_change_their_output() -> None:
    environ = {
        "PATH": "/usr/bin",
        "HOME": "/home/me",
        "LC_ALL": "de_DE.UTF-8",
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "SLURM_JWT": "token",
        "SLURM_TIME_FORMAT": "relative",
        "SLURM_JOB_ID": "1",
        "SLURM_CLUSTERS": "other",
        "SQUEUE_FORMAT": "%i",
        "SCANCEL_INTERACTIVE": "true",
        "SLURM_FT_RUN": "/runs/a",
    }
    kept = {"PATH", "HOME", "SLURM_CONF", "SLURM_JWT", "LC_ALL"}
    assert command_environment(environ) == {**{name: environ[name] for name in kept}, "LC_ALL": "C"}
    fake = FakeSlurm(RUNNING)
    SlurmClient(fake, environ=environ).job(1)
    assert fake.calls[0][1]["env"] == command_environment(environ)


def test_rw27_a_hostlist_that_does_not_hold_as_many_hosts_as_slurm_counts_is_refused() -> None:
    client = SlurmClient(FakeSlurm(RUNNING.replace(b"node[1-3]", b"node[1-2]")))
    with pytest.raises(HostlistError, match="3 hosts by Slurm's count, but 2"):
        client.hosts_of_job(1)
    with pytest.raises(HostlistError, match="but 0"):
        SlurmClient(FakeSlurm(RUNNING.replace(b"node[1-3]", b"(null)"))).hosts_of_job(1)


def test_the_hosts_of_a_waiting_job_are_none_at_all() -> None:
    assert SlurmClient(FakeSlurm(WAITING)).hosts_of_job(2) == ()
    assert SlurmClient(FakeSlurm(RUNNING)).hosts_of_job("1") == ("node1", "node2", "node3")


def test_squeue_writes_round_numbers_of_nodes_with_a_k_and_waiting_jobs_as_a_range() -> None:
    assert view_of("2", WAITING.replace(b"|4|", b"|2K|")).nodes == 2048
    assert view_of("2", WAITING.replace(b"|4|", b"|2-4|")).nodes == 2


def test_one_task_of_an_array_is_found_among_its_rows() -> None:
    rows = b"4|3_1|RUNNING|None|1|n1|1:00|1:00|0|1|0|\n3|3_[2-3]|PENDING|Resources|1||1:00|1:00|0|1|0|\n"
    assert view_of("3_1", rows).hosts == ("n1",)
    assert view_of("3", rows).state.state.pending
    assert isinstance(SlurmClient(FakeSlurm(rows)).job("3_9"), Unreachable)


@pytest.mark.parametrize("job_id", ["", "abc", "12;nordlys", "-1", "1 2", "12.0", "1\n"])
def test_an_id_that_is_not_a_number_never_reaches_slurm(job_id: str) -> None:
    fake = FakeSlurm()
    for ask in (SlurmClient(fake).job, SlurmClient(fake).cancel):
        with pytest.raises(UsageError, match="is not a Slurm job id"):
            ask(job_id)
    assert not fake.calls


def test_rw09_the_cluster_goes_to_every_command_and_its_heading_is_not_a_row() -> None:
    fake = FakeSlurm(b"CLUSTER: nordlys\n" + RUNNING)
    client = SlurmClient(fake, cluster="nordlys")
    assert isinstance(client.job(1), JobView)
    client.cancel(1)
    client.signal_step(1, 0, signal.SIGTERM)
    assert [argv[:2] for argv, _ in fake.calls] == [
        ["squeue", "--clusters=nordlys"],
        ["scancel", "--clusters=nordlys"],
        ["scancel", "--clusters=nordlys"],
    ]


@pytest.mark.parametrize(
    ("text", "submitted"),
    [
        ("812345\n", Submitted("812345")),
        ("812345;nordlys\n", Submitted("812345", "nordlys")),
        ("Submitted batch job 812345\n", Submitted("812345")),
        ("Submitted batch job 812345 on cluster nordlys\n", Submitted("812345", "nordlys")),
        ("Welcome! You have 12 hours left\n812345\n\n", Submitted("812345")),
    ],
)
def test_rw09_a_submission_gives_the_id_and_the_cluster(text: str, submitted: Submitted) -> None:
    assert read_submission(text) == submitted


@pytest.mark.parametrize("text", ["", "nordlys", "812345 nordlys", "Submitted batch job on cluster nordlys"])
def test_rw09_an_answer_without_an_id_is_an_error_that_shows_it(text: str) -> None:
    with pytest.raises(LaunchError) as caught:
        read_submission(text)
    assert repr(text) in caught.value.message


@pytest.mark.parametrize(
    ("err", "code", "outcome"),
    [
        (b"scancel: Terminating job 9\n", 0, Done()),
        (
            b"scancel: Terminating job 9\n"
            b"scancel: error: Kill job error on job id 9: Job/step already completing or completed\n",
            0,
            Done(),
        ),
        (b"scancel: error: Kill job error on job id 9: Invalid job id specified\n", 0, Unknown("9")),
        (
            b"scancel: Terminating job 9\nscancel: error: Kill job error on job id 9: "
            b"Unable to contact slurm controller (connect failure)\n",
            8,
            Unreachable(
                "scancel: error: Kill job error on job id 9: Unable to contact slurm controller (connect failure)"
            ),
        ),
    ],
)
def test_rw52_cancelling_tells_done_unknown_and_no_answer_apart(
    err: bytes, code: int, outcome: Done | Unknown | Unreachable
) -> None:
    fake = FakeSlurm(err=err, code=code)
    assert SlurmClient(fake).cancel(9) == outcome
    # Without --verbose scancel says nothing of a job it does not know.
    assert fake.calls[0][0] == ["scancel", "--verbose", "9"]


@pytest.mark.parametrize(
    ("err", "code", "outcome"),
    [
        (b"", 0, Done()),
        # The step runs on one of the job's hosts: the signal was delivered, and the other hosts were complained of.
        (b"scancel: error: Kill job error on job step id 47: Invalid job id specified\n", 225, Done()),
        (b"scancel: error: Kill job error on job step id 47.0: Invalid job id specified\n", 1, Unknown("47.0")),
        (NO_CONTACT, 1, Unreachable(NO_CONTACT.decode().strip())),
    ],
)
def test_rw52_signalling_a_step_tells_delivered_from_unknown_and_no_answer(
    err: bytes, code: int, outcome: Done | Unknown | Unreachable
) -> None:
    fake = FakeSlurm(err=err, code=code)
    assert SlurmClient(fake).signal_step(47, 0, signal.SIGUSR2) == outcome
    assert fake.calls[0][0] == ["scancel", "--signal=USR2", "47.0"]


def test_what_slurm_forbids_is_an_error_of_the_person_who_asked() -> None:
    fake = FakeSlurm(err=b"scancel: error: Kill job error on job id 36: Access/permission denied\n", code=210)
    with pytest.raises(UsageError, match="does not allow you to cancel job 36") as caught:
        SlurmClient(fake).cancel(36)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("out", "version"),
    [(b"slurm-wlm 22.05.8\n", (22, 5)), (b"slurm 24.11.0-0rc1\n", (24, 11)), (b"slurm 26.11\n", (26, 11))],
)
def test_the_version_is_two_numbers_also_with_a_distributions_name(out: bytes, version: tuple[int, int]) -> None:
    assert SlurmClient(FakeSlurm(out), cluster="nordlys").version() == version


@pytest.mark.parametrize(
    "fake", [FakeSlurm(error=FileNotFoundError(2, "No such file")), FakeSlurm(err=NO_CONFIG, code=1)]
)
def test_a_version_that_cannot_be_found_out_is_an_error_with_a_hint(fake: FakeSlurm) -> None:
    with pytest.raises(LaunchError) as caught:
        SlurmClient(fake).version()
    assert caught.value.hint


@pytest.mark.parametrize(
    ("options", "environ", "cluster"),
    [
        (["--clusters=nordlys"], {"SLURM_CLUSTERS": "other"}, "nordlys"),
        (["--time=10", "-M", "nordlys"], {}, "nordlys"),
        (["-Mnordlys"], {}, "nordlys"),
        (["-M nordlys"], {}, "nordlys"),
        (["--clusters", "a,b"], {}, "a,b"),
        (["--mail-type=END"], {"SLURM_CLUSTERS": "other"}, "other"),
        ([], {"SBATCH_CLUSTERS": "other"}, "other"),
        ([], {}, ""),
    ],
)
def test_rw09_the_cluster_that_was_asked_for_is_asked_again(
    options: list[str], environ: dict[str, str], cluster: str
) -> None:
    assert cluster_of(environ, options) == cluster
