"""The controller's event log on a file system that is full or does not answer."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_ft.aside import Aside
from slurm_ft.controller.latelog import STALLED_AFTER, LateLog
from slurm_ft.events import Event, EventLog, Kind, read
from tests.waiting import wait_until

WRITE = os.write


def note(number: int) -> Event:
    return Event(float(number), Kind.NOTE, None, {"number": number})


def numbers(path: Path) -> list[int]:
    return [event.data["number"] for event in read(path)]


class Disk:
    """Stands for os.write: `full` takes ten bytes more, then none; `gate` lets nobody through while it is closed."""

    def __init__(self) -> None:
        self.full, self.left = False, 10
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Event()

    def write(self, descriptor: int, data: bytes) -> int:
        self.arrived.set()
        self.gate.wait(30)
        if self.full and self.left:
            self.left = 0
            return WRITE(descriptor, data[:10])
        if self.full:
            raise OSError(28, "No space left on device")
        return WRITE(descriptor, data)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    monkeypatch.setattr("slurm_ft.events.os.write", disk.write)
    yield disk
    disk.gate.set()


def test_events_are_written_in_order_by_another_thread(tmp_path: Path) -> None:
    log = LateLog(EventLog(tmp_path / "e"))
    for number in range(200):
        log.append(note(number))
    assert log.settle(5.0)
    assert numbers(tmp_path / "e") == list(range(200))
    assert log.close()


def test_a_write_that_hangs_blocks_nobody_and_all_is_written_when_it_is_back(tmp_path: Path, disk: Disk) -> None:
    now = [100.0]
    log = LateLog(EventLog(tmp_path / "e"), lambda: now[0])
    disk.gate.clear()
    log.append(note(0))
    assert disk.arrived.wait(5)
    for number in range(1, 50):
        log.append(note(number))  # returns, or this test never ends
    assert log.trouble is None and not log.stalled
    now[0] += STALLED_AFTER + 0.1
    assert log.stalled
    trouble = log.trouble
    assert trouble is not None and trouble.waiting == 50 and "does not answer" in trouble.what
    assert not log.settle(60.0)  # at once: what has stalled already is not waited for again
    assert numbers(tmp_path / "e") == []
    disk.gate.set()
    assert log.close()
    assert log.trouble is None
    assert numbers(tmp_path / "e") == list(range(50))


def test_what_a_full_disk_has_cut_in_half_is_mended_and_nothing_is_lost(tmp_path: Path, disk: Disk) -> None:
    log = LateLog(EventLog(tmp_path / "e"))
    log.append(note(0))
    assert log.settle(5.0)
    disk.full = True
    for number in range(1, 20):
        log.append(note(number))
    wait_until(lambda: log.trouble is not None)
    trouble = log.trouble
    assert trouble is not None and "No space left on device" in trouble.what
    assert numbers(tmp_path / "e") == [0]  # a reader meets half a line, and passes over it
    disk.full = False
    assert log.close()
    assert numbers(tmp_path / "e") == list(range(20))


def test_an_event_that_cannot_be_written_fails_where_it_was_made(tmp_path: Path) -> None:
    log = LateLog(EventLog(tmp_path / "e"))
    with pytest.raises(TypeError):
        log.append(Event(0.0, Kind.NOTE, None, {"what": object()}))
    log.append(note(1))
    assert log.close()
    assert numbers(tmp_path / "e") == [1]


def test_the_end_of_a_run_is_not_kept_waiting_for_a_disk_that_stays_full(tmp_path: Path, disk: Disk) -> None:
    log = LateLog(EventLog(tmp_path / "e"))
    disk.full = True
    log.append(note(0))
    assert log.close(0.3) is False


def test_a_writer_after_a_crash_in_the_middle_of_a_line_begins_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "e").write_bytes(note(0).to_line().encode() + b'{"t":1,"event":"no')
    log = LateLog(EventLog(tmp_path / "e"))
    log.append(note(1))
    assert log.close()
    assert numbers(tmp_path / "e") == [0, 1]


def test_calls_aside_are_done_in_order_and_one_that_hangs_is_known() -> None:
    aside, done, gate = Aside("test"), [], threading.Event()
    aside.post(lambda: done.append(1))
    assert aside.drain(5.0) and done == [1]
    aside.post(lambda: gate.wait(30))
    aside.post(_raises, done.append)
    aside.post(lambda: 1 / 0)
    wait_until(lambda: aside.busy_for > 0)
    assert not aside.drain(0.05)
    gate.set()
    assert aside.drain(5.0)
    assert isinstance(done[1], OSError) and aside.busy_for == 0.0


def test_a_thread_that_is_closed_ends_after_the_calls_so_far() -> None:
    aside, done, gate = Aside("closed"), [], threading.Event()
    aside.post(lambda: gate.wait(30))
    aside.post(lambda: done.append(1))
    aside.close()
    gate.set()
    wait_until(lambda: not any(thread.name == "closed" for thread in threading.enumerate()))
    assert done == [1]


def _raises() -> None:
    raise OSError("gone")
