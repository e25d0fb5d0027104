"""The lease: one holder for each epoch, found stale by its standing still, and a log that keeps to it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft import lease
from slurm_ft.controller.fold import fold
from slurm_ft.controller.tenure import LOOK_AFTER, Tenure
from slurm_ft.errors import UsageError
from slurm_ft.events import Event, Kind, parse
from slurm_ft.lease import STALE, Claim, Lease, Watch


class Time:
    """A clock that sleeping moves; `meanwhile` happens while one sleeps."""

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.now, self._meanwhile = 100.0, meanwhile

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._meanwhile()


ELSEWHERE = Claim(1, "node1", "another machine", 4711, "12")


def acquire(folder: Path, time: Time | None = None) -> Lease:
    time = time or Time()
    return lease.acquire(folder, "here", "12", time, time.sleep)


def test_of_many_that_claim_an_epoch_at_once_one_has_it(tmp_path: Path) -> None:
    folder, start = tmp_path / "lease", threading.Barrier(8)
    won: list[int] = []

    def claim(number: int) -> None:
        start.wait()
        if lease.take(folder, Claim(1, f"node{number}")):
            won.append(number)

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    there = lease.newest(folder)
    assert len(won) == 1 and there is not None and there.host == f"node{won[0]}"


def test_the_first_head_takes_the_first_epoch_and_a_later_one_the_next(tmp_path: Path) -> None:
    with closing(acquire(tmp_path / "lease")) as first:
        assert (first.epoch, first.claim.before, first.deposed_by()) == (1, "", 0)
        first.release(0)
    with closing(acquire(tmp_path / "lease")) as second:
        assert (second.epoch, second.claim.before) == (2, "here")
        assert first.deposed_by() == 2
        second.renew()
        first.renew()  # its writes reach nobody any more
        assert lease.newest(tmp_path / "lease") == second.claim


def test_a_head_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    with closing(acquire(tmp_path / "lease")), pytest.raises(UsageError, match=f"process {os.getpid()} on here"):
        acquire(tmp_path / "lease")


def test_a_head_of_this_machine_that_has_died_is_replaced_at_once(tmp_path: Path) -> None:
    acquire(tmp_path / "lease").close()  # its file is not open any more, as when its process is gone
    time = Time()
    with closing(acquire(tmp_path / "lease", time)) as next_one:
        assert (next_one.epoch, time.now) == (2, 100.0)


def test_a_head_elsewhere_is_replaced_when_it_has_stood_still_for_long_enough(tmp_path: Path) -> None:
    lease.take(tmp_path / "lease", ELSEWHERE)
    time = Time()
    with closing(acquire(tmp_path / "lease", time)) as next_one:
        assert next_one.epoch == 2
    assert STALE <= time.now - 100.0 < STALE + 1


def test_a_head_elsewhere_that_renews_is_left_alone(tmp_path: Path) -> None:
    lease.take(tmp_path / "lease", ELSEWHERE)
    with closing(Lease(tmp_path / "lease", ELSEWHERE)) as other, pytest.raises(UsageError, match="node1"):
        acquire(tmp_path / "lease", Time(other.renew))


def test_a_claim_whose_maker_died_before_it_had_written_it_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "lease").mkdir()
    (tmp_path / "lease" / "1").touch()
    time = Time()
    with closing(acquire(tmp_path / "lease", time)) as next_one:
        assert (next_one.epoch, time.now) == (2, 100.0)


def test_the_process_that_takes_a_claim_over_is_its_holder(tmp_path: Path) -> None:
    lease.take(tmp_path / "lease", replace(ELSEWHERE, silence=7.0))
    with closing(Lease.resume(tmp_path / "lease", 1)) as mine:
        there = lease.newest(tmp_path / "lease")
        assert there == mine.claim and there.pid == os.getpid() and there.silence == 7.0 and there.up > 0
        assert lease.held_by_process(tmp_path / "lease", there)


@given(st.lists(st.tuples(st.floats(0, 5), st.sampled_from(["a", "b", None])), min_size=1))
def test_a_watch_counts_only_while_it_sees_the_same(looks: list[tuple[float, str | None]]) -> None:
    watch, now, since, last = Watch(), 0.0, 0.0, object()
    for wait, seen in looks:
        now += wait
        if seen is None or seen != last:
            since, last = now, seen
        assert watch.unchanged(now, seen) == pytest.approx(now - since)


# --- the controller's hold -------------------------------------------------------------------------------------


def test_a_controller_that_was_stopped_looks_before_it_acts(tmp_path: Path) -> None:
    time = Time()
    with closing(acquire(tmp_path / "lease")) as mine:
        tenure = Tenure(mine, time)
        lease.take(tmp_path / "lease", Claim(2, "node2"))
        assert tenure.may_act()  # it has looked just now
        time.now += LOOK_AFTER + 0.1
        assert not tenure.may_act()
        assert tenure.over == 2


def test_a_controller_that_acts_all_the_time_looks_now_and_then(tmp_path: Path) -> None:
    time = Time()
    with closing(acquire(tmp_path / "lease")) as mine:
        tenure = Tenure(mine, time)
        lease.take(tmp_path / "lease", Claim(2, "node2"))
        acted = 0
        while acted < 100 and tenure.may_act():
            acted += 1
            time.now += LOOK_AFTER / 4
        assert 0 < acted <= 5


def test_a_controller_that_hears_of_a_higher_epoch_stops_at_once(tmp_path: Path) -> None:
    with closing(acquire(tmp_path / "lease")) as mine:
        tenure = Tenure(mine)
        tenure.heard_of(1)
        assert tenure.may_act()
        tenure.heard_of(2)
        assert not tenure.may_act()


def test_a_folder_that_is_away_deposes_nobody(tmp_path: Path) -> None:
    time = Time()
    with closing(acquire(tmp_path / "lease")) as mine:
        tenure = Tenure(mine, time)
        (tmp_path / "lease" / "1").unlink()
        (tmp_path / "lease").rmdir()
        (tmp_path / "lease").write_text("no folder")
        time.now += 100.0
        assert tenure.may_act()


def test_a_renewal_that_hangs_hangs_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the lease is answered from a cache, its file is not."""
    time, looks = Time(), list[str]()
    hangs, goes_on = threading.Event(), threading.Event()

    def renew(_: Lease) -> None:
        hangs.set()
        assert goes_on.wait(30)

    async def story(tenure: Tenure) -> None:
        keeping = asyncio.ensure_future(tenure.keep(lambda: True, lambda: None))
        await asyncio.to_thread(hangs.wait, 30)
        monkeypatch.setattr(Lease, "deposed_by", lambda _: looks.append("looked") or 0)
        for _ in range(40):
            time.now += LOOK_AFTER / 4
            assert tenure.may_act() and not looks
        time.now += 10 * LOOK_AFTER  # but one that was stopped itself, in the middle of it, looks
        assert tenure.may_act() and looks
        keeping.cancel()
        goes_on.set()

    monkeypatch.setattr(Lease, "renew", renew)
    with closing(acquire(tmp_path / "lease")) as mine:
        asyncio.run(story(Tenure(mine, time)))


# --- the log ---------------------------------------------------------------------------------------------------


def _started(epoch: int) -> list[Event]:
    replicas = {"session": "s", "replicas": [["node1"]], "ranks_per_host": 1}
    return [Event(1.0, Kind.RUN_STARTED, None, replicas, epoch)] if epoch == 1 else []


writes = st.lists(st.sampled_from(["old", "new", "newest"]), max_size=40)


@given(writes)
def test_whatever_deposed_controllers_still_write_readers_see_what_the_new_one_saw(order: list[str]) -> None:
    """Three controllers write in any interleaving. Each reads the log after its own first line, as a controller
    does, and adds what it does itself; the log as its readers see it is the state of the last one."""
    epochs = {"old": 1, "new": 2, "newest": 3}
    log, known, count = [event.to_line() for event in _started(1)], {}, 0
    for name in order:
        epoch, count = epochs[name], count + 1
        if epoch not in known and epoch > 1:
            log.append(Event(1.0, Kind.HEAD_STARTED, None, {"host": name}, epoch).to_line())
        known.setdefault(epoch, list(parse(log)))
        event = Event(2.0, Kind.STEP_LAUNCHED, 0, {"step": count, "pid": count}, epoch)
        log.append(event.to_line())
        known[epoch].append(event)
    seen = list(parse(log))
    assert [event.epoch for event in seen] == sorted(event.epoch for event in seen)
    last = max(known, default=0)
    assert not known or (seen == known[last] and fold(seen) == fold(known[last]))
