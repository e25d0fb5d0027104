import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from time import time as now
from typing import Any

import pytest
from observe_histories import T0, History, failed_run, write_run

from slurm_ft import lease
from slurm_ft.errors import RunFailed, RunFolderError, TryAgain, UsageError
from slurm_ft.events import Event, Kind
from slurm_ft.launch.session import Session
from slurm_ft.observe import requests
from slurm_ft.observe.requests import POLL_SECONDS, Cancellation, Patience, Watch
from slurm_ft.observe.status import Snapshot
from slurm_ft.paths import RunPaths, write_json
from slurm_ft.slurm import client
from slurm_ft.slurm.states import parse_states


class Time:
    """A clock that only waiting moves, and things that happen while one waits."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self.now = 0.0
        self._steps = list(steps)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        if self._steps:
            self._steps.pop(0)()

    def patience(self, seconds: float) -> Patience:
        return Patience(seconds, self.wait, lambda: self.now)


@pytest.fixture(autouse=True)
def jobs(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The jobs that Slurm knows, with their states."""
    known = dict[str, str]()

    def job(slurm: client.SlurmClient, job_id: str) -> client.JobView | client.Unknown:
        if job_id not in known:
            return client.Unknown(job_id)
        return client.JobView(job_id, parse_states([known[job_id]]), "None", 1, "", 60, 60, 1, True, None)

    monkeypatch.setattr(client.SlurmClient, "job", job)
    return known


def append(paths: RunPaths, *events: Event) -> None:
    with paths.events.open("a") as file:
        file.writelines(event.to_line() for event in events)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return write_run(tmp_path / "r", History(2).launch(0.1, 0).ranks(0.5, 0).sorted())


def answer(paths: RunPaths, error: str = "") -> Callable[[], None]:
    """What the controller does with a request: delete it and answer."""

    def act() -> None:
        (path,) = paths.control.glob("*.json")
        value = json.loads(path.read_text())
        path.unlink()
        data = {name: value[name] for name in ("id", "rank", "kind")} | {"error": error}
        append(paths, Event(T0 + 2, Kind.INJECTED, value["replica"], data))

    return act


def test_a_request_is_written_whole_and_its_answer_awaited(paths: RunPaths) -> None:
    time, request = Time(answer(paths)), requests.injection(1, 0, "exit:3")
    assert {name: request[name] for name in ("type", "replica", "rank", "kind")} == {
        "type": "inject", "replica": 1, "rank": 0, "kind": "exit:3",
    }  # fmt: skip
    requests.inject(paths, request, Watch(paths), time.patience(10))
    assert time.now < 1


def test_the_answer_to_somebody_elses_request_is_not_taken_for_ours(paths: RunPaths) -> None:
    other = Event(T0 + 1, Kind.INJECTED, 0, {"id": "other", "rank": 0, "kind": "kill", "error": "no"})
    time = Time(lambda: append(paths, other), answer(paths))
    requests.inject(paths, requests.injection(0, 0, "kill"), Watch(paths), time.patience(10))


def test_a_refusal_is_told_in_the_agents_words(paths: RunPaths) -> None:
    with pytest.raises(RunFailed, match="rank 0 is not running"):
        time = Time(answer(paths, "rank 0 is not running"))
        requests.inject(paths, requests.injection(0, 0, "kill"), Watch(paths), time.patience(10))


def test_a_request_without_an_answer_is_withdrawn_so_that_it_cannot_strike_later(paths: RunPaths) -> None:
    with pytest.raises(RunFailed) as caught:
        requests.inject(paths, requests.injection(0, 0, "kill"), Watch(paths), Time().patience(5))
    assert caught.value.exit_code == 1
    assert caught.value.hint
    assert list(paths.control.glob("*")) == []


def test_a_run_that_ends_before_it_answers_is_told(paths: RunPaths) -> None:
    time = Time(lambda: append(paths, Event(T0 + 9, Kind.RUN_ENDED, None, {"code": 0, "why": ""})))
    with pytest.raises(RunFailed, match="ended with exit code 0"):
        requests.inject(paths, requests.injection(0, 0, "kill"), Watch(paths), time.patience(10))


def test_a_step_is_waited_for_in_events_and_in_the_state(paths: RunPaths) -> None:
    commit = History(2).commit(3, 0, 4).events[-1]
    time = Time(lambda: append(paths, commit))
    requests.await_step(Watch(paths), 0, 4, time.patience(10))

    time = Time(lambda: write_json(paths.state, {"replicas": [{"id": 0, "step": 7}]}))
    requests.await_step(Watch(paths), 0, 7, time.patience(10))
    assert time.now < 1


def test_a_step_that_does_not_come_in_time_says_where_the_replica_is(paths: RunPaths) -> None:
    append(paths, History(2).commit(3, 0, 4).events[-1])
    with pytest.raises(RunFailed, match="has not reached step 9 in time; it is at step 4"):
        requests.await_step(Watch(paths), 0, 9, Time().patience(5))


def test_a_replica_that_the_run_does_not_have_is_a_usage_error(paths: RunPaths) -> None:
    with pytest.raises(UsageError, match="no replica 2"):
        requests.await_step(Watch(paths), 2, None, Time().patience(0))


def test_an_ended_run_cannot_be_hurt(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "x", failed_run())
    with pytest.raises(RunFailed, match="has ended with exit code 1"):
        requests.await_step(Watch(paths), 0, 100, Time().patience(5))


def test_a_run_folder_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    time = Time(lambda: None, lambda: write_run(tmp_path / "titan-1", []))
    assert requests.await_run("titan-1", str(tmp_path), time.patience(5)).root.name == "titan-1"
    with pytest.raises(RunFolderError):
        requests.await_run("other", str(tmp_path), Time().patience(5))


def test_stop_touches_the_file_and_the_end_is_awaited(paths: RunPaths) -> None:
    requests.stop(paths)
    assert paths.stop.exists()
    time = Time(lambda: append(paths, Event(T0 + 9, Kind.RUN_ENDED, None, {"code": 143, "why": "asked"})))
    assert requests.await_end(paths, lambda: False, time.wait) == 143
    assert requests.await_end(write_run(paths.root / "y", []), lambda: True) is None


# --- cancel --------------------------------------------------------------------------------------------------


HEAD = """
import sys, time
from pathlib import Path
from slurm_ft import lease
held = lease.acquire(Path(sys.argv[1]), "here", "L1")
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def head(paths: RunPaths) -> Any:
    """A process that holds the run's lease, as a head does."""
    argv = [sys.executable, "-c", HEAD, str(paths.lease), "slurm_ft"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


LOCAL = Snapshot(T0, cluster="local", job_id="L1", started=T0)


def test_a_local_run_is_cancelled_by_term_to_its_head(paths: RunPaths, head: subprocess.Popen[bytes]) -> None:
    plan = requests.plan_cancel(paths, LOCAL)
    assert str(plan) == f"kill -TERM {head.pid}"
    assert "sent TERM" in requests.cancel(paths, plan)
    assert head.wait(10) == -signal.SIGTERM


def test_a_process_that_only_bears_the_number_of_the_head_is_left_alone(paths: RunPaths) -> None:
    lease.take(paths.lease, lease.Claim(1, "elsewhere", "another", os.getpid(), "L1"))
    with pytest.raises(UsageError) as caught:
        requests.plan_cancel(paths, LOCAL)
    assert "elsewhere" in caught.value.hint
    assert requests.cancel(paths, Cancellation(pid=os.getpid())) == "the run's head has just ended by itself"


def test_a_lease_that_was_given_back_means_that_there_is_nothing_to_cancel(paths: RunPaths) -> None:
    lease.take(paths.lease, lease.Claim(1, "here", lease.machine(), os.getpid(), "L1", ended=0))
    with pytest.raises(RunFailed, match="nobody looks after"):
        requests.plan_cancel(paths, LOCAL)


def test_a_lease_that_names_nobody_is_told(paths: RunPaths) -> None:
    paths.lease.mkdir()
    (paths.lease / "1").touch()
    with pytest.raises(RunFailed, match="does not say who"):
        requests.plan_cancel(paths, LOCAL)


def test_a_slurm_run_is_cancelled_by_scancel_of_its_job(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "titan-4711", [])
    assert requests.plan_cancel(paths, Snapshot(T0, cluster="slurm", job_id="12")).argv == ["scancel", "12"]
    assert requests.plan_cancel(paths, Snapshot(None, cluster="slurm")).argv == ["scancel", "4711"]
    Session("s", "12", ("a",), task="10_2").write(paths)
    assert requests.plan_cancel(paths, Snapshot(T0, cluster="slurm", job_id="12")).argv == ["scancel", "10_2"]
    with pytest.raises(RunFailed, match="not known"):
        requests.plan_cancel(write_run(tmp_path / "mine", []), Snapshot(None, cluster="slurm"))


def test_a_chain_is_cancelled_from_its_end_so_that_no_link_begins_meanwhile(tmp_path: Path) -> None:
    """A link waits for the end of the one before it, and does not ask how it ended."""
    paths = write_run(tmp_path / "mine", [])
    write_json(paths.chain, {"links": ["12", "13", "14"]})
    assert requests.plan_cancel(paths, Snapshot(None, cluster="slurm")).jobs == ("14", "13", "12")
    assert requests.plan_cancel(paths, Snapshot(T0, cluster="slurm", job_id="13")).jobs == ("14", "13")


@pytest.mark.parametrize(
    ("again", "code", "job"),
    [({"after": "12", "job_id": "12", "how": ""}, 75, "12"), (None, 1, "13"), (None, 0, ""), (None, 93, "")],
)
def test_a_run_between_two_jobs_has_not_ended_for_good(
    tmp_path: Path, again: dict[str, str] | None, code: int, job: str
) -> None:
    paths = write_run(tmp_path / "mine", [])
    write_json(paths.chain, {"links": ["12", "13"]})
    if again:
        write_json(paths.again, again)
    assert requests.waits_in(paths, Snapshot(T0, cluster="slurm", job_id="12", ended=code)) == job
    assert requests.waits_in(paths, Snapshot(T0, cluster="slurm", job_id="12")) == ""


@pytest.mark.parametrize(
    ("code", "state", "waits"),
    [(143, "PENDING", "12"), (75, "REQUEUED", "12"), (1, "RUNNING", ""), (143, "", ""), (0, "PENDING", "")],
    ids=["preempted", "being put back", "its script goes on", "gone", "finished"],
)
def test_slurm_is_asked_whether_it_has_put_a_job_back_by_itself(
    paths: RunPaths, jobs: dict[str, str], code: int, state: str, waits: str
) -> None:
    if state:
        jobs["12"] = state
    assert requests.waits_in(paths, Snapshot(T0, cluster="slurm", job_id="12", ended=code)) == waits


ENDED = {"t": T0, "started": T0, "job_id": "12", "cluster": "slurm", "ended": 75, "replicas": []}


def taken(paths: RunPaths, epoch: int, job_id: str) -> lease.Lease:
    claim = lease.Claim(epoch, "here", "another machine", 1, job_id)
    assert lease.take(paths.lease, claim)
    return lease.Lease(paths.lease, claim)


def test_a_session_that_has_ended_is_not_the_end_of_a_run_whose_head_has_not_left(paths: RunPaths) -> None:
    """It may be about to put its job back into the queue."""
    write_json(paths.state, ENDED)
    with closing(taken(paths, 1, "12")) as head:
        time = Time(
            lambda: write_json(paths.again, {"after": "12", "job_id": "12", "how": ""}), lambda: head.release(75)
        )
        found = requests.settled(paths, time.patience(60))
    assert time.now > POLL_SECONDS  # it has waited for both
    assert (found.ended, requests.waits_in(paths, found)) == (75, "12")


def test_the_end_of_the_last_session_is_not_that_of_the_one_that_begins(paths: RunPaths) -> None:
    write_json(paths.state, ENDED)
    begun = {key: value for key, value in ENDED.items() if key != "ended"} | {"t": now(), "job_id": "13"}
    with closing(taken(paths, 1, "13")):
        found = requests.settled(paths, Time(lambda: write_json(paths.state, begun)).patience(60))
    assert (found.ended, found.job_id) == (None, "13")


def test_who_does_not_wait_cancels_the_job_of_who_looks_after_the_run(paths: RunPaths) -> None:
    write_json(paths.state, ENDED)
    with closing(taken(paths, 1, "13")):
        found = requests.settled(paths, Time().patience(0))
    assert found.ended is None
    assert requests.plan_cancel(paths, found).jobs == ("13",)


def test_a_run_that_waits_for_its_job_can_be_told_to_stop_although_it_has_no_folder_yet(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "runs" / "x-12")
    requests.stop(paths)
    assert paths.stop.exists()
    requests.forget_stop(paths)  # a new submission into it is not that run
    assert not paths.stop.exists()


@pytest.mark.parametrize(
    ("answered", "words"), [(client.Done(), "is cancelled"), (client.Unknown("12"), "does not know job 12")]
)
def test_what_slurm_answers_to_scancel_is_told(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, answered: Any, words: str
) -> None:
    monkeypatch.setattr(client.SlurmClient, "cancel", lambda self, job: answered)
    assert words in requests.cancel(paths, Cancellation(jobs=("12",)))


def test_a_run_that_was_cancelled_between_two_jobs_waits_in_none(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(paths.chain, {"links": ["12", "13"]})
    write_json(paths.again, {"after": "12", "job_id": "13", "how": ""})
    ended = Snapshot(T0, cluster="slurm", job_id="12", ended=75)
    assert requests.waits_in(paths, ended) == "13"
    monkeypatch.setattr(client.SlurmClient, "cancel", lambda self, job: client.Done())
    requests.cancel(paths, requests.plan_cancel(paths, ended))
    assert requests.waits_in(paths, ended) == ""


def test_a_busy_slurm_means_try_again(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.SlurmClient, "cancel", lambda self, job: client.Unreachable("timed out"))
    with pytest.raises(TryAgain) as caught:
        requests.cancel(paths, Cancellation(jobs=("12",)))
    assert caught.value.exit_code == 75
