import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from observe_histories import T0, History, failed_run, healed_run, write_run

from slurm_ft.api.run import Run
from slurm_ft.cli import submit
from slurm_ft.errors import SlurmFTError
from slurm_ft.events import Event, Kind, written
from slurm_ft.observe.follow import choose, follow, with_measured
from slurm_ft.observe.status import ReplicaRow, Snapshot
from slurm_ft.observe.text import width
from slurm_ft.observe.words import Narrator
from slurm_ft.paths import RunPaths, write_json
from slurm_ft.submit import rejoin, slurm_job


def growing(paths: RunPaths, events: list[Event], step: int = 3) -> Callable[[float], None]:
    """A `wait` in which time passes: some more events are written."""
    left = list(events)

    def wait(seconds: float) -> None:
        assert left, "the live view went on after the run had ended"
        with paths.events.open("a") as file:
            file.writelines(event.to_line() for event in left[:step])
        del left[:step]

    return wait


def small(columns: int = 60, rows: int = 24) -> Callable[[], os.terminal_size]:
    return lambda: os.terminal_size((columns, rows))


def test_off_a_terminal_each_event_is_one_plain_line_and_the_exit_code_is_the_runs(tmp_path: Path) -> None:
    paths, out = write_run(tmp_path / "r", []), io.StringIO()
    assert follow(paths, out, False, wait=growing(paths, failed_run())) == 1
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert lines[0] == "    0.0s   -  run titan in job 4711 started: 2 replicas on 2 hosts"
    assert "    3.3s   1  attempt 2: 1 rank started, restarted in place" in lines
    assert lines[-1].endswith("run ended with exit code 1 (the training failed): 1 of 2 replicas failed")


def test_a_commit_is_told_once_for_each_attempt_and_when_it_fails(tmp_path: Path) -> None:
    h = History(1).launch(0.1, 0).ranks(0.5, 0).commit(1, 0, 1).commit(2, 0, 2)
    h.commit(3, 0, 3, committed=False, lost=1).ended(4)
    paths, out = write_run(tmp_path / "r", h.sorted()), io.StringIO()
    follow(paths, out, False)
    assert out.getvalue().count("committed step") == 1
    assert "step 3 was not committed (1 training step)\n" in out.getvalue()


def test_work_that_another_try_committed_is_not_said_to_be_lost(tmp_path: Path) -> None:
    h = History(1).launch(0.1, 0).ranks(0.5, 0).commit(1, 0, 1)
    h.commit(3, 0, 3, committed=False, lost=20).commit(4, 0, 3, committed=False, lost=20, again=True)
    h.commit(5, 0, 3, lost=20, again=True).ended(6)
    paths, out = write_run(tmp_path / "r", h.sorted()), io.StringIO()
    follow(paths, out, False)
    assert out.getvalue().count("not committed") == 1
    assert "step 3 was not committed (20 training steps)\n" in out.getvalue()
    assert "step 3 was committed at another try: nothing is lost\n" in out.getvalue()


def test_until_ends_the_view_after_a_last_look(tmp_path: Path) -> None:
    paths, out = write_run(tmp_path / "r", healed_run()[:4]), io.StringIO()
    assert follow(paths, out, False, lambda: True) is None
    assert len(out.getvalue().splitlines()) == 4


def test_a_run_that_was_requeued_is_followed_into_its_next_job(tmp_path: Path) -> None:
    again = [Event(event.t + 100, event.kind, event.replica, event.data) for event in healed_run()]
    paths, out = write_run(tmp_path / "r", failed_run() + again[:5]), io.StringIO()
    assert follow(paths, out, False, wait=growing(paths, again[5:])) == 0


def test_a_run_that_goes_on_in_an_old_folder_has_not_ended_with_its_last_session(tmp_path: Path) -> None:
    """Its job may wait in the queue for long meanwhile."""
    again = [Event(event.t + 100, event.kind, event.replica, event.data) for event in healed_run()]
    paths, out = write_run(tmp_path / "r", failed_run()), io.StringIO()
    since = written(paths.events)
    run = Run(paths.root, "4712", since)
    assert run.exit_code is None
    assert follow(paths, out, False, wait=growing(paths, again), since=since) == 0
    assert "exit code 1" not in out.getvalue()
    assert run.wait(0.0) == 0


def test_submit_shows_the_session_that_it_has_submitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = [Event(event.t + 100, event.kind, event.replica, event.data) for event in healed_run()]
    since = written(write_run(tmp_path / "r", failed_run()).events)
    paths = write_run(tmp_path / "r", failed_run() + again)
    assert submit._written(str(paths.root)) > since
    assert submit._wait(paths, "L1", "local", since=since) == 0
    assert "exit code 1" not in capsys.readouterr().out


def dies_without_a_word(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, next_session: list[Event]
) -> list[tuple[str, str]]:
    """Job 4711 is gone from Slurm, and the next job that is watched runs this session. Gives who is watched, where."""
    watched = list[tuple[str, str]]()

    class Watch:
        def __init__(self, paths: RunPaths, job_id: str, say: object, cluster: str) -> None:
            watched.append((job_id, cluster))

        def __call__(self) -> bool:
            if watched[-1][0] != "4711":
                with paths.events.open("a") as file:
                    file.writelines(event.to_line() for event in next_session)
            return True

    monkeypatch.setattr(slurm_job, "JobWatch", Watch)
    return watched


def test_submit_follows_a_chain_whose_link_died_without_a_last_word_into_the_next_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    again = [Event(event.t + 100, event.kind, event.replica, event.data) for event in healed_run()]
    paths = write_run(tmp_path / "r", failed_run()[:8])
    write_json(paths.chain, {"links": ["4711", "4712"]})
    watched = dies_without_a_word(paths, monkeypatch, again)
    assert submit._wait(paths, "4711", "slurm", "b") == 0
    assert watched == [("4711", "b"), ("4712", "b")]
    assert "job 4711 ended without a last word; the run goes on in job 4712" in capsys.readouterr().err


def test_submit_ends_with_the_last_link_of_a_chain_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_run(tmp_path / "r", failed_run()[:8])
    write_json(paths.chain, {"links": ["4710", "4711"]})
    dies_without_a_word(paths, monkeypatch, [])
    with pytest.raises(SlurmFTError, match="without a last word"):
        submit._wait(paths, "4711", "slurm")


def test_submit_can_be_left_while_the_job_that_was_put_back_waits_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write_run(
        tmp_path / "r", [*failed_run()[:-1], Event(T0 + 9, Kind.RUN_ENDED, None, {"code": 75, "why": ""})]
    )
    write_json(paths.again, {"after": "4711", "job_id": "4711", "how": "the job is put back"})

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(rejoin, "begun_again", interrupted)
    try:
        code = submit._wait(paths, "4711", "slurm")
    except KeyboardInterrupt:  # it would end pytest
        pytest.fail("nobody was asked")
    assert code == 130
    assert submit.DETACHED in capsys.readouterr().err


def test_history_bounds_what_is_told_of_the_past_only(tmp_path: Path) -> None:
    events = failed_run()
    paths, out = write_run(tmp_path / "r", events[:-3]), io.StringIO()
    follow(paths, out, False, wait=growing(paths, events[-3:]), history=1)
    assert len(out.getvalue().splitlines()) == 4


def screen(written: str) -> list[str]:
    """What a terminal shows after it was sent this text: enough of one for the codes that we use."""
    lines = [""]
    for part in written.replace("\x1b[J", "\x1b!").split("\x1b"):
        if part.startswith("["):
            number, _, rest = part[1:].partition("A")
            del lines[len(lines) - 1 - int(number) :]
            lines.append("")
            part = rest
        elif part.startswith("!"):
            part = part[1:]
        first, *more = part.split("\n")
        lines[-1] += first
        lines += more
    return lines


def test_on_a_terminal_the_table_stands_once_below_the_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    paths, out = write_run(tmp_path / "r", []), io.StringIO()
    wait = growing(paths, healed_run(), 5)
    code = follow(paths, out, True, wait=wait, now=lambda: T0 + 30, size=small())
    shown = screen(out.getvalue())
    assert code == 0
    assert sum(line.startswith("REPLICA") for line in shown) == 1
    assert shown[-6].startswith("titan  job 4711  DONE:0")
    assert shown[-5].startswith("REPLICA STATE")
    assert [line.split()[1] for line in shown[-4:-1]] == ["DONE"] * 3
    assert not any("waiting for the run" in line for line in shown)
    assert all(width(line) < 60 for line in shown)


def test_replicas_in_trouble_are_kept_when_the_terminal_is_small() -> None:
    rows = tuple(ReplicaRow(i, "LOST" if i == 7 else "TRAINING") for i in range(9))
    assert [row.id for row in choose(Snapshot(0.0, replicas=rows), 3)] == [0, 1, 7]


def test_the_figures_of_the_state_are_shown_where_they_are_newer_and_of_the_same_attempt() -> None:
    told = Snapshot(0.0, replicas=(ReplicaRow(0, "TRAINING", step=5, attempt=1), ReplicaRow(1, "READY", attempt=2)))
    state = Snapshot(0.0, replicas=(ReplicaRow(0, "RUNNING", step=9, attempt=1), ReplicaRow(1, step=7, attempt=1)))
    shown = with_measured(told, state).replicas
    assert [(row.state, row.step) for row in shown] == [("TRAINING", 9), ("READY", None)]
    assert with_measured(told, None) == told


def test_a_failed_rank_is_named_with_its_host_and_its_gpu_by_bus_id() -> None:
    data = {"attempt": 1, "rank": 3, "host": "node7", "gpu": "0000:c1:00.0", "what": "rank 3 was killed by SIGKILL"}
    line = Narrator().line(Event(10.0, Kind.RANK_FAILED, 0, data))
    assert line is not None and line.endswith("rank 3 was killed by SIGKILL on node7, GPU 0000:c1:00.0")
