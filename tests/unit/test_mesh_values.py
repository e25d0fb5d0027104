"""ValueMesh, Future and the wire's framing, without any process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft.mesh.errors import MeshError
from slurm_ft.mesh.extent import Extent
from slurm_ft.mesh.futures import Future
from slurm_ft.mesh.remote.pickling import dump
from slurm_ft.mesh.remote.wire import pack, unpack
from slurm_ft.mesh.values import ValueMesh

EXTENT = Extent(("replica", "host", "gpu"), (1, 2, 2))


def with_hole() -> ValueMesh[str]:
    return ValueMesh(EXTENT, {0: "a", 1: "b", 3: "d"}, {2: MeshError("lost")}, "step")


def test_values_are_reached_by_coordinates_and_those_of_size_1_may_be_left_out() -> None:
    values = with_hole()
    assert values.item(host=1, gpu=1) == values.item(replica=0, host=1, gpu=1) == "d"
    with pytest.raises(KeyError):
        values.item(host=1)
    with pytest.raises(TypeError):
        values.item(host=1, gpu=1, node=0)
    with pytest.raises(IndexError):
        values.item(host=2, gpu=1)


def test_a_hole_is_an_error_for_whoever_reaches_for_it_and_no_other() -> None:
    values = with_hole()
    assert [value for _, value in values.ok()] == ["a", "b", "d"]
    assert [dict(point) for point, _ in values.failed()] == [{"replica": 0, "host": 1, "gpu": 0}]
    for reach in (
        lambda: values.item(host=1, gpu=0),
        lambda: list(values),
        lambda: list(values.values()),
        values.check,
    ):
        with pytest.raises(MeshError, match="lost"):
            reach()
    assert list(values.slice(replica=0, host=0).values()) == ["a", "b"]
    with pytest.raises(MeshError):
        values.slice(gpu=0).slice(replica=0).check()


def test_only_errors_that_nobody_looked_at_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        with_hole().failed()
        with_hole().ok()
        ValueMesh(EXTENT, dict.fromkeys(range(4), 1), {})
        assert caplog.text == ""
        with_hole()
    assert "1 of 4 answers of step are errors that nobody looked at, the first: lost" in caplog.text


def test_a_value_that_is_false_is_shown_and_given() -> None:
    values = ValueMesh(EXTENT, dict.fromkeys(range(4), 0), {})
    assert list(values.values()) == [0] * 4 and "gpu: 1/2}: 0" in repr(values)


def test_a_future_can_be_waited_for_by_threads_and_coroutines_again_and_again() -> None:
    raw: concurrent.futures.Future[int] = concurrent.futures.Future()
    converted = []

    def convert(value: int) -> int:
        converted.append(value)
        return value + 1

    future = Future(raw, convert)
    with pytest.raises(TimeoutError, match="the call goes on"):
        future.get(0.01)
    with pytest.raises(TimeoutError):
        future.exception(0.01)

    async def wait_in_vain_then_well() -> int:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(future.as_asyncio(), 0.01)
        assert not future.cancelled()
        raw.set_result(1)
        return await future + await future.as_asyncio()

    assert asyncio.run(wait_in_vain_then_well()) == 4
    assert future.get() == future.result(0) == 2 and future.exception() is None
    assert converted == [1]


def test_cancelling_tells_the_other_side_once_and_not_after_the_result() -> None:
    told = []
    future = Future(concurrent.futures.Future(), int, lambda: told.append(1))
    assert future.cancel() and not future.cancel() and future.cancelled() and told == [1]
    raw: concurrent.futures.Future[int] = concurrent.futures.Future()
    raw.set_result(1)
    assert not Future(raw, int, lambda: told.append(2)).cancel() and told == [1]


@given(st.lists(st.binary(), min_size=1, max_size=4), st.text())
def test_a_packed_message_is_the_same_when_it_is_unpacked(parts: list[bytes], word: str) -> None:
    unpacked = unpack(pack({"k": word}, parts))
    assert unpacked is not None and unpacked[1:] == ({"k": word}, parts)


@given(st.binary(max_size=64))
def test_what_is_no_message_is_none_and_no_exception(data: bytes) -> None:
    unpacked = unpack(data)
    assert unpacked is None or isinstance(unpacked[1], dict)


@given(st.recursive(st.integers() | st.text() | st.binary(), lambda inner: st.lists(inner) | st.tuples(inner)))
def test_what_is_within_the_limit_travels(value: object) -> None:
    import pickle

    assert pickle.loads(dump(value, 2**20, "x")) == value
