"""Calls: every process answers with a value or an error, and neither is lost or mixed up."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import pytest

from slurm_ft.errors import SpecError, UsageError
from slurm_ft.mesh import (
    Actor,
    ActorError,
    Allocation,
    CallTimeout,
    NotPicklable,
    PayloadTooLarge,
    ProcessMesh,
    ResultError,
    SupervisionError,
    context,
    current_rank,
    endpoint,
)
from tests.mesh.conftest import MakeMesh
from tests.waiting import wait_until

SOON = 20.0


class Counted:
    """No actor."""


def where() -> tuple[int, dict[str, int]]:
    return context().rank.index, dict(current_rank())


class Counter(Actor):
    def __init__(self, start: int) -> None:
        self.count = start

    @endpoint
    def add(self, much: int) -> int:
        self.count += much
        return self.count

    @endpoint
    async def look(self) -> int:
        return self.count

    @endpoint
    def fail_at(self, gpu: int) -> int:
        if current_rank()["gpu"] == gpu:
            raise ZeroDivisionError("as asked")
        return self.count

    @endpoint
    def note(self, folder: str) -> None:
        Path(folder, str(context().rank.index)).write_text(str(self.count))

    @endpoint
    def hang(self, folder: str) -> None:
        mine = Path(folder, str(context().rank.index))
        try:
            mine.write_text("began")
            time.sleep(60)
        finally:
            mine.write_text("interrupted")

    @endpoint
    async def hang_async(self, folder: str) -> None:
        mine = Path(folder, str(context().rank.index))
        try:
            mine.write_text("began")
            await asyncio.sleep(60)
        finally:
            mine.write_text("interrupted")

    @endpoint
    async def cancel_itself(self) -> None:
        raise asyncio.CancelledError

    @endpoint
    async def leave(self) -> None:
        sys.exit(4)

    def hidden(self) -> None:
        """No endpoint."""


def test_every_process_answers_under_its_own_coordinates(mesh: ProcessMesh) -> None:
    values = mesh.call(where).get(SOON)
    assert len(values) == 4
    for point, (index, here) in values.items():
        assert mesh.rank(**point) == index
        assert point == mesh.point(index) and dict(point) == here
    assert values.item(host=1, gpu=0) == (2, {"replica": 0, "host": 1, "gpu": 0})
    assert len(set(mesh.call(os.getpid).get(SOON).values())) == 4


def test_a_slice_of_a_slice_calls_its_own_processes_and_they_count_from_0(mesh: ProcessMesh) -> None:
    second = mesh.slice(replica=0).slice(host=1)
    assert second.sizes == {"gpu": 2}
    assert list(second.call(where).get(SOON).values()) == [(2, {"gpu": 0}), (3, {"gpu": 1})]
    column = mesh.slice(gpu=slice(1, 2)).slice(replica=0, gpu=0)
    assert list(column.call(where).get(SOON).values()) == [(1, {"host": 0}), (3, {"host": 1})]
    assert mesh.flatten("rank").slice(rank=slice(0, 4, 3)).call(where).get(SOON).item(rank=1) == (3, {"rank": 1})
    cut = mesh.flatten("rank").split(rank=("pp", "tp"), tp=2).rename(pp="stage")
    assert cut.slice(stage=1, tp=0).call_one(where).get(SOON)[0] == 2


def test_an_actor_keeps_its_state_and_answers_sync_and_async(mesh: ProcessMesh) -> None:
    counter = mesh.spawn("counter", Counter, 10)
    assert list(counter.add.call(5).get(SOON).values()) == [15] * 4
    assert counter.slice(host=0).slice(replica=0, gpu=1).add.call_one(1).get(SOON) == 16
    assert list(counter.look.call().get(SOON).values()) == [15, 16, 15, 15]
    counter.stop()
    with pytest.raises(ActorError, match="was stopped"):
        counter.look.call().get(SOON).check()


def test_an_async_endpoint_answers_while_a_sync_one_is_busy(mesh: ProcessMesh, tmp_path: Path) -> None:
    counter = mesh.spawn("counter", Counter, 1)
    one = counter.slice(replica=0, host=0, gpu=0)
    busy = one.hang.call_one(str(tmp_path))
    wait_until(lambda: list(tmp_path.iterdir()))
    assert one.look.call_one().get(SOON) == 1
    assert not busy.done()
    assert busy.cancel()


def test_an_exception_comes_with_its_traceback_and_coordinates_and_the_others_values(mesh: ProcessMesh) -> None:
    counter = mesh.spawn("counter", Counter, 7)
    values = counter.fail_at.call(1).get(SOON)
    assert [(dict(point)["gpu"], value) for point, value in values.ok()] == [(0, 7), (0, 7)]
    (point, error), _ = values.failed()
    assert isinstance(error, ActorError) and isinstance(error.exception, ZeroDivisionError)
    assert point == error.point == mesh.point(1)
    assert "in fail_at" in error.traceback and "as asked" in str(error) and "local0" in str(error)
    assert "worker.py" not in error.traceback
    with pytest.raises(ActorError):
        values.item(host=0, gpu=1)
    with pytest.raises(ActorError):
        list(values.values())
    assert counter.look.call().get(SOON).check().size == 4  # the actor lives on


def test_a_constructor_that_raises_is_told_to_every_caller(mesh: ProcessMesh) -> None:
    counter = mesh.spawn("counter", Counter)
    assert len(counter.initialized.get(SOON).failed()) == 4
    for _ in range(2):
        (_, error), *_ = counter.add.call(1).get(SOON).failed()
        assert "its constructor raised: TypeError" in str(error)


class Remote(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("only one")


def test_an_exception_that_cannot_travel_still_tells_its_story(mesh: ProcessMesh) -> None:
    def fail() -> None:
        raise Remote(1, 2)

    (_, error), *_ = mesh.call(fail).get(SOON).failed()
    assert isinstance(error, ActorError) and error.exception is None
    assert "Remote: only one" in str(error)


def test_a_function_that_cannot_be_pickled_is_one_sentence_at_the_caller(mesh: ProcessMesh) -> None:
    lock = threading.Lock()
    with pytest.raises(NotPicklable, match=r"^guarded\(\) or its arguments cannot be pickled: .*lock"):

        def guarded() -> object:
            return lock

        mesh.call(guarded)
    assert mesh.call(os.getpid).get(SOON).check()


class OnlyThere:
    """Its unpickling works in the processes and fails here."""

    def __reduce__(self) -> object:
        return refuse_in, (os.getpid(),)


def refuse_in(pid: int) -> OnlyThere:
    raise RuntimeError("not in this process")


@pytest.mark.parametrize(("make", "words"), [(threading.Lock, "cannot be pickled"), (OnlyThere, "cannot be unpickled")])
def test_a_result_that_cannot_travel_is_an_error_of_its_place_alone(mesh: ProcessMesh, make: type, words: str) -> None:
    values = mesh.call(lambda: make() if current_rank()["gpu"] else "fine").get(SOON)
    assert [value for _, value in values.ok()] == ["fine", "fine"]
    for _, error in values.failed():
        assert isinstance(error, ResultError) and words in str(error)
    assert len(values.failed()) == 2


def test_large_data_is_kept_out_of_the_control_channel_unless_one_call_allows_it(mesh: ProcessMesh) -> None:
    large = bytes(17 * 2**20)
    with pytest.raises(PayloadTooLarge, match="more than the limit of 16 MiB") as caught:
        mesh.call(len, large)
    assert "torch.distributed" in caught.value.hint
    one = mesh.slice(replica=0, host=0, gpu=0)
    assert one.options(limit=2**25).call_one(len, large).get(SOON) == len(large)
    with pytest.raises(ResultError, match="more than the limit of 16 MiB"):
        one.call_one(bytes, len(large)).get(SOON)
    with pytest.raises(TypeError):
        one.options(size=1)
    assert one.options(limit=2**25).options(timeout=SOON).call_one(bytes, len(large)).get(SOON) == large


def test_a_call_with_a_time_out_gives_the_values_that_came_and_frees_the_late(
    mesh: ProcessMesh, tmp_path: Path
) -> None:
    def late(folder: str) -> int:
        if context().rank.index == 3:
            try:
                time.sleep(60)
            finally:
                Path(folder, "freed").touch()
        return context().rank.index

    began = time.monotonic()
    values = mesh.options(timeout=3).call(late, str(tmp_path)).get(SOON)
    assert time.monotonic() - began < SOON
    assert [value for _, value in values.ok()] == [0, 1, 2]
    ((_, error),) = values.failed()
    assert isinstance(error, CallTimeout) and isinstance(error, TimeoutError)
    wait_until((tmp_path / "freed").exists)
    assert mesh.call(os.getpid).get(SOON).check()


def test_waiting_with_a_time_out_consumes_nothing(mesh: ProcessMesh, tmp_path: Path) -> None:
    def wait_for(file: str) -> str:
        while not os.path.exists(file):
            time.sleep(0.01)
        return "came"

    future = mesh.call(wait_for, str(tmp_path / "go"))
    with pytest.raises(TimeoutError, match="the call goes on"):
        future.get(0.05)
    (tmp_path / "go").touch()
    assert list(future.get(SOON).values()) == list(future.result().values()) == ["came"] * 4
    assert future.exception() is None and future.done()


@pytest.mark.parametrize("name", ["hang", "hang_async"])
def test_cancelling_ends_the_wait_and_the_work(mesh: ProcessMesh, tmp_path: Path, name: str) -> None:
    counter = mesh.spawn("counter", Counter, 0)
    future = getattr(counter, name).call(str(tmp_path))
    wait_until(lambda: len(list(tmp_path.iterdir())) == 4)
    queued = counter.add.call(1) if name == "hang" else None
    assert queued is None or queued.cancel()
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.get(SOON)
    wait_until(lambda: all(file.read_text() == "interrupted" for file in tmp_path.iterdir()))
    assert list(counter.add.call(0).get(SOON).values()) == [0] * 4  # what was queued and cancelled did not run
    assert not future.cancel()


class Odd(BaseException):
    """Not an Exception."""


def test_whatever_is_raised_is_an_answer(make_mesh: MakeMesh) -> None:
    def raise_odd() -> None:
        raise Odd("thing")

    mesh = make_mesh(1, 1)
    counter = mesh.spawn("counter", Counter, 0)
    before = mesh.call(os.getpid).get(SOON).item()
    ((_, cancelled),) = counter.cancel_itself.call().get(SOON).failed()
    ((_, odd),) = mesh.call(raise_odd).get(SOON).failed()
    assert "CancelledError" in str(cancelled) and "Odd: thing" in str(odd)
    assert mesh.call(os.getpid).get(SOON).item() == before
    ((_, left),) = counter.leave.call().get(SOON).failed()
    assert isinstance(left, SupervisionError) and left.failure.code == 4


def test_stream_gives_each_answer_as_it_comes(mesh: ProcessMesh, tmp_path: Path) -> None:
    def first_is_last(folder: str) -> int:
        me = context().rank.index
        while me == 0 and not os.path.exists(f"{folder}/go"):
            time.sleep(0.01)
        return me

    seen = []
    for arrival in mesh.stream(first_is_last, str(tmp_path)):
        seen.append((arrival.get(), arrival.point))
        if len(seen) == 3:
            (tmp_path / "go").touch()
    assert [value for value, _ in seen][-1] == 0 and sorted(value for value, _ in seen) == [0, 1, 2, 3]
    assert all(mesh.point(value) == point for value, point in seen)


def test_broadcast_choose_and_call_one(mesh: ProcessMesh, tmp_path: Path) -> None:
    counter = mesh.spawn("counter", Counter, 3)
    counter.note.broadcast(str(tmp_path))
    wait_until(lambda: sorted(file.name for file in tmp_path.iterdir()) == ["0", "1", "2", "3"])
    assert {counter.add.choose(0).get(SOON) for _ in range(8)} == {3}
    assert len({mesh.choose(os.getpid).get(SOON) for _ in range(64)}) > 1
    with pytest.raises(UsageError, match="one process, and this has 4"):
        counter.add.call_one(1)


def test_what_a_broadcast_raises_is_logged(mesh: ProcessMesh, caplog: pytest.LogCaptureFixture) -> None:
    counter = mesh.spawn("counter", Counter, 3)
    counter.fail_at.broadcast(0)
    wait_until(lambda: "ZeroDivisionError: as asked" in caplog.text)


def test_errors_that_nobody_looks_at_are_logged(mesh: ProcessMesh, caplog: pytest.LogCaptureFixture) -> None:
    mesh.call(divmod, 1, 0).get(SOON)
    assert "4 of 4 answers of divmod are errors that nobody looked at" in caplog.text


def test_an_endpoint_is_not_called_directly_and_a_wrong_name_lists_the_right_ones(mesh: ProcessMesh) -> None:
    counter = mesh.spawn("counter", Counter, 3)
    with pytest.raises(TypeError, match=r"counter\.add\.call"):
        counter.add(1)
    with pytest.raises(AttributeError, match="add, cancel_itself, fail_at, hang"):
        counter.hidden  # noqa: B018
    with pytest.raises(TypeError, match="Counted is no subclass"):
        mesh.spawn("x", Counted)  # type: ignore[arg-type]


def test_coroutines_and_threads_wait_for_the_same_mesh(mesh: ProcessMesh) -> None:
    async def many() -> list[int]:
        answers = await asyncio.gather(*(mesh.call(abs, -n).as_asyncio() for n in range(50)))
        seen = [arrival.get() async for arrival in mesh.stream(abs, -7)]
        assert seen == [7] * 4
        return [next(iter(values.values())) for values in answers]

    assert asyncio.run(many()) == list(range(50))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: list(mesh.call(abs, -n).get(SOON).values()), range(50)))
    assert answers == [[n] * 4 for n in range(50)]


def test_a_forked_child_is_told_that_the_mesh_is_not_its_own(mesh: ProcessMesh) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            mesh.call(os.getpid)
        except UsageError as error:
            code = 7 if "forked child" in error.message else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert mesh.call(os.getpid).get(SOON).check()


def test_what_processes_print_is_in_their_logs(mesh: ProcessMesh) -> None:
    mesh.call(lambda: print(f"I am {context().rank.index}")).get(SOON).check()
    for point, log in mesh.logs().items():
        assert f"I am {point.rank}\n" in log.read_text()


def test_processes_know_their_place_in_torchs_words(mesh: ProcessMesh) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    values = mesh.call(lambda: [os.environ[name] for name in names]).get(SOON)
    assert values.item(host=1, gpu=0) == ["2", "0", "4", "2"]


def test_a_notebook_shows_tables(mesh: ProcessMesh) -> None:
    assert "<td>up</td>" in mesh._repr_html_() and "4 up" in repr(mesh)
    values = mesh.call(where).get(SOON)
    assert values._repr_html_().count("<tr>") == 5 and "ValueMesh({replica: 1" in repr(values)


def test_64_processes_on_8_hosts_answer(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(8, 8, replicas=4)
    assert mesh.sizes == {"replica": 4, "host": 2, "gpu": 8}
    values = mesh.call(where).get(180)  # 8 times three Pythons and 64 forks, maybe on two cores
    assert [index for index, _ in values.values()] == list(range(64))
    assert [index for index, _ in mesh.slice(replica=2, gpu=7).call(where).get(SOON).values()] == [39, 47]


def test_processes_start_with_the_environment_and_the_modules_asked_for(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(1, 1, environment={"COLOUR": "red"}, preload=("colorsys",))
    assert mesh.call(os.getenv, "COLOUR").get(SOON).item() == "red"
    assert mesh.call(lambda: "colorsys" in sys.modules).get(SOON).item()
    assert mesh.call(lambda: "zmq" in sys.modules).get(SOON).item() is False
    mesh.stop()
    with pytest.raises(UsageError, match="was stopped"):
        mesh.call(os.getpid)


def test_meshes_beside_each_other_keep_to_themselves_and_logs_stay_where_they_were_asked_for(tmp_path: Path) -> None:
    local = Allocation.local(hosts=1)
    with local.processes({"dp": 2, "tp": 1}, folder=tmp_path) as one, local.processes(folder=tmp_path) as other:
        assert one.sizes == {"replica": 1, "host": 1, "dp": 2, "tp": 1}
        one.call(print, "hello").get(SOON).check()
        seen = [*one.call(os.getpid).get(SOON).values(), *other.call(os.getpid).get(SOON).values()]
        assert len(set(seen)) == 3
        log = one.logs().item(dp=1)
    assert log.read_text() == "hello\n"
    assert len(list(tmp_path.iterdir())) == 2 and not list(tmp_path.glob("*/secret"))


@pytest.mark.parametrize(
    ("per_host", "options", "words"),
    [
        ({"gpu": 0}, {}, "per_host has 0 along gpu"),
        ({"host": 2}, {}, "that name is taken"),
        ({"gpu": 1}, {"replicas": 0, "spares": -1}, "2 problems"),
        ({"gpu": 1}, {"replicas": 3}, "3 replicas of 1 host need 3 hosts"),
        ({"gpu": 1}, {"spares": 2}, "1 replica of 1 host and 2 spares"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_with_all_that_is_wrong(
    per_host: dict[str, int], options: dict[str, int], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        Allocation.local(hosts=2).processes(per_host, **options)


def test_outside_of_a_job_there_is_no_allocation_here() -> None:
    with pytest.raises(UsageError, match="no Slurm allocation around") as caught:
        Allocation.here({})
    assert "Allocation.local()" in caught.value.hint
