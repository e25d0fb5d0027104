import os
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from observe_histories import T0, failed_run, healed_run, write_run

from slurm_ft import lease
from slurm_ft.errors import RunFolderError
from slurm_ft.events import Kind
from slurm_ft.observe import listing, runs
from slurm_ft.observe.status import Snapshot
from slurm_ft.paths import RunPaths, write_json


def folders(runs_folder: Path, *names: str) -> None:
    """Run folders, each newer than the one before."""
    for age, name in enumerate(names):
        paths = write_run(runs_folder / name, [], name=name.rpartition("-")[0])
        os.utime(paths.spec, (T0 + age, T0 + age))


@pytest.fixture
def some(tmp_path: Path) -> Path:
    folders(tmp_path, "titan-11", "titan-12", "other-13_2", "mine-L99")
    return tmp_path


@pytest.mark.parametrize(
    ("run", "folder"),
    [
        ("last", "mine-L99"),
        ("titan-11", "titan-11"),
        ("titan", "titan-12"),
        ("11", "titan-11"),
        ("13_2", "other-13_2"),
        ("L99", "mine-L99"),
    ],
)
def test_a_run_is_found_by_folder_name_job_or_last(some: Path, run: str, folder: str) -> None:
    assert runs.find(run, some, {}).root.name == folder


def test_a_run_is_found_by_its_path(some: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("empty")
    assert runs.find(str(some / "titan-11"), elsewhere, {}).root.name == "titan-11"


def test_without_a_name_the_run_around_us_then_the_job_then_the_last_is_meant(some: Path) -> None:
    around = {"SLURM_FT_RUN": str(some / "titan-11"), "SLURM_JOB_ID": "12"}
    assert runs.find(None, some, around).root.name == "titan-11"
    assert runs.find(None, some, {"SLURM_JOB_ID": "12"}).root.name == "titan-12"
    assert runs.find(None, some, {"SLURM_JOB_ID": "77"}).root.name == "mine-L99"
    assert runs.find(None, some, {}).root.name == "mine-L99"


def test_a_job_id_is_not_the_tail_of_a_longer_one(tmp_path: Path) -> None:
    folders(tmp_path, "titan-111")
    with pytest.raises(RunFolderError):
        runs.find("11", tmp_path, {})


def test_a_run_in_a_folder_of_the_users_own_name_is_found_by_its_job(tmp_path: Path) -> None:
    write_run(tmp_path / "tuesday", [], {"name": "titan", "job_id": "4711"})
    assert runs.find("4711", tmp_path, {}).root.name == "tuesday"


def test_a_run_that_is_not_there_gives_close_names_or_the_newest(some: Path) -> None:
    with pytest.raises(RunFolderError) as caught:
        runs.find("titan-21", some, {})
    assert "close: titan-" in caught.value.hint
    with pytest.raises(RunFolderError) as caught:
        runs.find("zzz", some, {})
    assert caught.value.hint.startswith("the newest runs are: mine-L99, other-13_2")
    assert caught.value.exit_code == 2


def test_no_runs_at_all_says_how_to_name_the_folder(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError) as caught:
        runs.find(None, tmp_path / "none", {})
    assert "--runs" in caught.value.hint


def test_a_folder_that_is_no_run_is_not_taken_for_one(some: Path) -> None:
    (some / "plain").mkdir()
    with pytest.raises(RunFolderError):
        runs.find(str(some / "plain"), some, {})
    assert "plain" not in [folder.name for folder in runs.all_runs(some)]


@pytest.mark.parametrize(
    ("given", "split"),
    [
        ((None, None), (None, None)),
        (("titan", None), ("titan", None)),
        (("12", None), ("12", None)),
        (("2", None), (None, "2")),
        (("1,3-5", None), (None, "1,3-5")),
        (("titan", "2"), ("titan", "2")),
    ],
)
def test_one_argument_alone_is_a_run_if_there_is_one_else_a_selector(
    some: Path, given: tuple[str | None, str | None], split: tuple[str | None, str | None]
) -> None:
    assert runs.split_arguments(*given, some) == split


def test_a_damaged_state_is_told_and_the_events_are_folded(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "r", healed_run())
    paths.state.write_text('{"t": 1, "replicas": [{"id"')
    reading = runs.read(paths, T0 + 100)
    assert "computed from events.jsonl" in reading.troubles[0]
    assert reading.snapshot.state() == "DONE:0"
    assert len(reading.snapshot.replicas) == 3


def test_a_half_written_last_line_and_bytes_that_are_no_text_are_passed_over(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "r", healed_run()[:-1])
    with paths.events.open("ab") as file:
        file.write(b'\xff\xfe\n{"t":1700000026.5,"event":"run_end')
    assert runs.read(paths, T0 + 100).snapshot.ended is None


def test_an_old_state_of_a_run_that_has_ended_since_is_not_believed(tmp_path: Path) -> None:
    state = {"t": T0 + 1, "started": T0, "ended": None, "replicas": []}
    paths = write_run(tmp_path / "r", failed_run(), state)
    assert runs.read(paths, T0 + 1000).snapshot.ended == 1


def test_a_run_that_has_only_a_spec_is_waiting(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "r", [])
    reading = runs.read(paths, T0)
    assert reading.troubles == ()
    assert reading.snapshot.name == "titan"
    assert reading.snapshot.state(runs.is_alive(paths, reading.snapshot, T0)) == "WAITING"


def test_a_damaged_spec_leaves_the_usual_policy_and_says_so(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "r", [])
    paths.spec.write_text("{")
    policy, trouble = runs.policy_of(paths)
    assert policy.min_replicas == 1
    assert "usual policy" in trouble


def held(paths: RunPaths, **claim: Any) -> lease.Lease:
    """A lease of this run that this process holds."""
    epoch = lease.newest_epoch(paths.lease) + 1
    mine = lease.Claim(epoch, "here", lease.machine(), os.getpid(), "L1")
    assert lease.take(paths.lease, replace(mine, **claim))
    return lease.Lease(paths.lease, replace(mine, **claim))


def test_the_lease_tells_a_run_that_is_looked_after_from_a_dead_one(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "r", [])
    far = time.time() + 1e6
    assert not runs.is_held(paths, far)
    with closing(held(paths)) as mine:
        assert runs.is_held(paths, far)
        mine.release(0)
        assert not runs.is_held(paths, far)
    held(paths).close()
    assert not runs.is_held(paths, far)


def test_a_head_that_has_just_died_may_be_followed_by_another_one(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "r", [])
    held(paths, machine="another", pid=1).close()
    assert runs.is_held(paths, time.time() + runs.LEFT_SECONDS / 2)
    assert not runs.is_held(paths, time.time() + 2 * runs.LEFT_SECONDS)


def test_the_lease_is_not_even_read_while_news_are_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(paths: RunPaths, now: float) -> bool:
        raise AssertionError("the state is a second old")

    monkeypatch.setattr(runs, "is_held", read)
    paths = write_run(tmp_path / "r", [])
    assert runs.is_alive(paths, Snapshot(T0, started=T0), T0 + 2) is None
    assert runs.is_alive(paths, Snapshot(T0, started=T0, ended=0), T0 + 1000) is None


def test_a_quiet_run_that_nobody_holds_is_gone_and_one_that_has_not_begun_is_not(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "r", [])
    assert not runs.Gone(paths, lambda: T0 + 1e9)()
    paths.events.write_text("")
    os.utime(paths.events, (T0, T0))
    assert not runs.Gone(paths, lambda: T0 + 5)()
    assert runs.Gone(paths, lambda: T0 + 60)()
    with closing(held(paths)):
        assert not runs.Gone(paths, lambda: T0 + 60)()


def test_a_run_whose_head_came_and_went_before_the_first_event_is_gone(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "r", [])
    with closing(held(paths)) as lease:
        assert not runs.Gone(paths)()
        lease.release(97)
    assert runs.Gone(paths)()


def test_a_run_is_over_when_it_ended_and_not_when_it_was_started_again(tmp_path: Path) -> None:
    events = failed_run()
    paths = write_run(tmp_path / "r", events)
    over = runs.Over(paths, lambda: T0)
    assert over()
    with paths.events.open("a") as file:
        file.write(next(event for event in events if event.kind is Kind.RUN_STARTED).to_line())
    assert not over()


def test_the_list_shows_ended_dead_waiting_and_damaged_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "well-1", healed_run())
    write_run(tmp_path / "bad-2", failed_run(), name="bad")
    write_run(tmp_path / "left-3", healed_run()[:30], name="left")
    write_run(tmp_path / "queue-4", [], name="queue")
    damaged = write_run(tmp_path / "odd-5", [])
    damaged.spec.write_text("\x00")
    write_json(damaged.state, {"replicas": "?"})
    for age, name in enumerate(("well-1", "bad-2", "left-3", "queue-4", "odd-5")):
        os.utime(tmp_path / name / "run.json", (T0 - age, T0 - age))
    found = listing.entries(tmp_path, T0 + 3600)
    assert [entry.state for entry in found] == ["DONE:0", "FAILED:1", "DEAD", "WAITING", "WAITING"]
    lines = listing.lines(found, T0 + 3600)
    assert lines[0].split() == list(listing.COLUMNS)
    assert lines[1].split() == ["titan", "4711", "DONE:0", "3", "1", "20", "2023-11-14T22:13:20Z", "0:26"]
    assert lines[4].split() == ["queue", "4", "WAITING", "0", "0", "-", "-", "-"]
    assert [run["exit_code"] for run in listing.to_json(found, T0)["runs"]] == [0, 1, None, None, None]


@pytest.mark.parametrize(
    ("age", "alive", "ended", "told"),
    [(60.0, True, None, True), (5.0, True, None, False), (60.0, False, None, False), (60.0, True, 0, False)],
)
def test_old_news_of_a_run_that_is_looked_after_are_explained(
    tmp_path: Path, age: float, alive: bool, ended: int | None, told: bool
) -> None:
    snapshot = Snapshot(t=1000.0, ended=ended)
    words = runs.late_news(RunPaths(tmp_path), snapshot, 1000.0 + age, alive)
    assert ("60 s old" in words) is told


def test_a_full_file_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = os.statvfs_result((4096, 4096, 256, 0, 0, 100, 50, 50, 0, 255))
    monkeypatch.setattr("os.statvfs", lambda path: found)
    words = runs.late_news(RunPaths(tmp_path), Snapshot(t=1000.0), 1060.0, True)
    assert words.endswith("the file system of the run folder is full")
