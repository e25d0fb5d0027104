import itertools
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft.events import Clock, Event, EventLog, Follower, Kind, read

COMMIT = Event(100.25, Kind.COMMIT, 1, {"step": 3, "committed": True})
NOTE = Event(101.0, Kind.NOTE, None, {"text": "what\nnow \u2028 ü"})


def logged(path: Path, *events: Event) -> None:
    log = EventLog(path)
    for event in events:
        log.append(event)
    log.close()


def test_a_line_is_one_json_object_with_the_time_the_event_and_the_replica() -> None:
    assert json.loads(COMMIT.to_line()) == {
        "t": 100.25, "event": "commit", "replica": 1, "step": 3, "committed": True
    }  # fmt: skip
    assert "replica" not in json.loads(NOTE.to_line())


@given(
    st.floats(0, 4e9).map(lambda t: round(t, 6)),
    st.sampled_from(Kind),
    st.none() | st.integers(0, 100),
    st.dictionaries(
        st.text(min_size=1).filter(lambda name: name not in ("t", "event", "replica")),
        st.none() | st.text() | st.integers() | st.lists(st.text()),
        max_size=3,
    ),
)
def test_an_event_comes_back_from_its_line(t: float, kind: Kind, replica: int | None, data: dict[str, object]) -> None:
    event = Event(t, kind, replica, data)
    line = event.to_line()
    assert Event.from_line(line) == event
    assert line.splitlines(keepends=True) == [line]


@pytest.mark.parametrize(
    "line",
    ["", "{", "[]", "3", "null", '{"t":1}', '{"event":"commit"}', '{"t":"x","event":"commit"}',
     '{"t":1,"event":"of a newer version"}', '{"t":null,"event":"commit"}', "\0\0\0"],
)  # fmt: skip
def test_a_line_that_is_no_event_is_passed_over(line: str) -> None:
    assert Event.from_line(line) is None


def test_a_missing_log_is_an_empty_one(tmp_path: Path) -> None:
    assert list(read(tmp_path / "none.jsonl")) == []
    assert Follower(tmp_path / "none.jsonl").news() == []


def test_a_log_is_read_back_in_order(tmp_path: Path) -> None:
    logged(tmp_path / "events.jsonl", COMMIT, NOTE)
    logged(tmp_path / "events.jsonl", COMMIT)
    assert list(read(tmp_path / "events.jsonl")) == [COMMIT, NOTE, COMMIT]


@pytest.mark.parametrize("kept", range(1, len(COMMIT.to_line())))
def test_a_last_line_that_was_cut_off_costs_itself_at_most(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(NOTE.to_line() + COMMIT.to_line()[:kept])
    before = path.read_bytes()
    logged(path, NOTE, COMMIT)
    whole = [COMMIT] if kept == len(COMMIT.to_line()) - 1 else []
    assert list(read(path)) == [NOTE, *whole, NOTE, COMMIT]
    assert path.read_bytes().startswith(before)  # nothing was overwritten


def test_bytes_that_are_no_text_cost_one_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(COMMIT.to_line().encode() + b"\xff\xfe\0\n" + NOTE.to_line().encode())
    assert list(read(path)) == [COMMIT, NOTE]


def test_what_a_full_disk_refuses_is_kept_and_written_later_in_order(tmp_path: Path) -> None:
    path, full, troubles = tmp_path / "events.jsonl", os.open("/dev/full", os.O_WRONLY), []
    log = EventLog(path, troubles.append)
    log.append(NOTE)
    good = os.dup(log._descriptor)
    os.dup2(full, log._descriptor)
    log.append(COMMIT)
    log.append(NOTE)
    assert [error.strerror for error in troubles] == ["No space left on device"] * 2
    os.dup2(good, log._descriptor)
    log.flush()
    log.append(COMMIT)
    log.close()
    for descriptor in (good, full):
        os.close(descriptor)
    assert list(read(path)) == [NOTE, COMMIT, NOTE, COMMIT]


LIMITED = """
import sys
from pathlib import Path
from slurm_ft.events import Event, EventLog, Kind
import resource
path, troubles = Path(sys.argv[1]), []
log = EventLog(path, troubles.append)
for number in range(40):
    log.append(Event(1.0, Kind.NOTE, None, {"number": number}))
assert troubles
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
log.close()
"""


def test_a_write_that_only_half_succeeds_is_completed_later(tmp_path: Path) -> None:
    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))

    path = tmp_path / "events.jsonl"
    subprocess.run([sys.executable, "-c", LIMITED, path], preexec_fn=small_files, check=True, timeout=20)
    assert [event.data["number"] for event in read(path)] == list(range(40))


def test_a_follower_gives_each_event_once_and_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    follower, text, found = Follower(path), (COMMIT.to_line() + NOTE.to_line() + COMMIT.to_line()).encode(), []
    for piece in itertools.batched(text, 7) if hasattr(itertools, "batched") else zip(*[iter(text)], strict=True):
        with path.open("ab") as file:
            file.write(bytes(piece))
        found += follower.news()
    assert found == [COMMIT, NOTE, COMMIT]
    assert follower.news() == []


def test_a_clock_does_not_follow_the_wall_clock_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    before = clock()
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert clock() >= before


def test_a_follower_from_now_passes_over_what_is_there(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    log = EventLog(file)
    log.append(Event(1.0, Kind.SAVE_ENDED, None, {"id": "old"}))
    follower = Follower.from_now(file)
    log.append(Event(2.0, Kind.SAVE_ENDED, None, {"id": "new"}))
    log.close()
    assert [event.data["id"] for event in follower.news()] == ["new"]
    assert Follower.from_now(tmp_path / "none").news() == []
