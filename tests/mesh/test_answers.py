"""Answers that come late, come in pieces, or cannot be told: nobody else's is lost for them."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from slurm_ft.errors import UsageError
from slurm_ft.mesh import Actor, ProcessMesh, context, endpoint
from slurm_ft.mesh.errors import MeshError
from tests.mesh.conftest import MakeMesh
from tests.waiting import wait_until

SOON = 30.0


def wait_for(path: str) -> int:
    while not Path(path).exists():
        time.sleep(0.01)
    return int(context().rank["gpu"])


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class Raises(Actor):
    @endpoint
    async def later(self) -> None:
        raise Mute

    @endpoint
    def now(self) -> None:
        raise Mute


def test_who_stops_waiting_for_a_stream_takes_no_answer_from_others(make_mesh: MakeMesh, tmp_path: Path) -> None:
    mesh = make_mesh(1, 2)
    go = str(tmp_path / "go")

    async def story() -> None:
        stream = mesh.stream(wait_for, go)

        async def read() -> None:
            async for _ in stream:
                pass

        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(read(), 0.2)

    asyncio.run(story())
    other = mesh.call(os.getpid)
    Path(go).touch()
    assert len(list(other.get(SOON).check().values())) == 2
    mesh.restart().get(SOON).check()
    assert len(list(mesh.call(os.getpid).get(SOON).check().values())) == 2


def test_a_stream_that_is_cancelled_while_answers_come_ends_for_all(mesh: ProcessMesh) -> None:
    for _ in range(20):
        stream = mesh.stream(os.getpid)
        stream.cancel()
        assert len(list(stream)) <= 4
    assert len(list(mesh.call(os.getpid).get(SOON).check().values())) == 4


def test_a_large_answer_that_is_cancelled_on_its_way_does_not_spoil_the_next_ones(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(1, 1)
    mesh.call(os.getpid).get(SOON).check()
    for pause in (0.0, 0.01, 0.02, 0.04, 0.08):
        future = mesh.options(limit=1 << 30).call(bytes, 50_000_000)
        time.sleep(pause)
        future.cancel()
    assert len(list(mesh.call(os.getpid).get(SOON).check().values())) == 1


class Odd(BaseException):
    pass


class Unmakeable(Actor):
    def __init__(self) -> None:
        raise Odd("no actor")

    @endpoint
    async def later(self) -> None: ...

    @endpoint
    def now(self) -> None: ...


@pytest.mark.parametrize("name", ["now", "later"])
def test_whatever_a_constructor_raises_is_the_answer_of_its_endpoints(mesh: ProcessMesh, name: str) -> None:
    actor: Any = mesh.spawn(f"unmakeable-{name}", Unmakeable)
    values = getattr(actor, name).call().get(SOON)
    assert len(values.failed()) == 4 and "its constructor raised: Odd" in str(values.failed()[0][1])


@pytest.mark.parametrize("name", ["now", "later"])
def test_a_broadcast_to_actors_whose_constructor_raised_is_logged_here_and_there(
    mesh: ProcessMesh, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    actor: Any = mesh.spawn(f"unheard-{name}", Unmakeable)
    getattr(actor, name).broadcast()
    wait_until(lambda: caplog.text.count("its constructor raised: Odd: no actor") == 4)
    log = mesh.logs().item(replica=0, host=0, gpu=0).read_text()
    assert f"unheard-{name}.{name} (broadcast) raised" in log and 'raise Odd("no actor")' in log


@pytest.mark.parametrize("name", ["now", "later"])
def test_an_exception_that_cannot_tell_its_own_text_is_an_answer(mesh: ProcessMesh, name: str) -> None:
    actor: Any = mesh.spawn(f"raises-{name}", Raises)
    values = getattr(actor, name).call().get(SOON)
    assert [type(error) for _, error in values.failed()] and "Mute" in str(next(iter(values.failed()))[1])
    assert len(list(mesh.call(os.getpid).get(SOON).check().values())) == 4


class Unpicklable:
    def __reduce__(self) -> Any:
        raise Mute


def test_a_result_whose_pickling_cannot_tell_what_is_wrong_is_an_error_of_its_place(mesh: ProcessMesh) -> None:
    values = mesh.call(Unpicklable).get(SOON)
    assert len(list(values.failed())) == 4
    assert len(list(mesh.call(os.getpid).get(SOON).check().values())) == 4


def leave_beside_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(600,)).start()
    sys.exit(3)


def test_a_process_that_leaves_beside_a_thread_that_does_not_is_repaired(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(1, 1)
    before = mesh.call(os.getpid).get(SOON).item()
    with pytest.raises(MeshError):
        mesh.call(leave_beside_a_thread).get(SOON).check()
    wait_until(lambda: list(mesh.states().values()) == ["up"])
    assert mesh.call(os.getpid).get(SOON).item() != before


@pytest.mark.parametrize("timeout", [timedelta(seconds=5), "5"])
def test_a_time_out_that_is_no_number_is_refused_at_once(mesh: ProcessMesh, timeout: Any) -> None:
    with pytest.raises(UsageError, match="timeout is"):
        mesh.options(timeout=timeout)
