"""The communicators of both GPU libraries on fakes: set-up, results, errors, abort, another membership."""

import array
import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.native import ranks as body
from tests.native import workshop
from tests.native.groups import Ranks

platforms = pytest.mark.parametrize("platform", ["cuda", "rocm"])


def make_id(platform: str, environ: dict[str, str]) -> bytes:
    done = workshop.program("collective_programs", platform, "print_id", environ=environ)
    return bytes.fromhex(workshop.said(done))


def start(
    monkeypatch: pytest.MonkeyPatch, platform: str, count: int, what: Callable[..., Any], *rest: Any, **settings: object
) -> Ranks:
    """Ranks on fake devices: what the loader has to see is in their environment from their start."""
    environ = workshop.fake_environ(platform, **settings)
    group = make_id(platform, environ)
    with monkeypatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        place = (environ["SLURM_FT_NATIVE_LIB"], platform)
        return Ranks(count, body.in_group, place, group, count, what, rest)


@platforms
def test_results_are_right(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    with start(monkeypatch, platform, 2, body.one_reduction, 70_000) as ranks:
        assert ranks.hear_all() == [[3.0, 3.0]] * 2


@platforms
def test_many_calls_in_a_row_wait_for_the_library_to_take_each(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    """Non-blocking NCCL refuses a call before it is done with the last; the fake does so too."""
    with start(monkeypatch, platform, 2, body.reductions, 3) as ranks:
        one, two = ranks.hear_all()
    assert one == two
    dice = random.Random(3)
    for got in one:
        count = dice.choice([0, 1, 2, 15, 16, 17, 1000, 65536, 65537, 200_000])
        kind = dice.choice("bBiIqQfd")
        dice.choice(["sum", "product", "max", "min"])
        dice.randrange(2)
        assert len(got) == count * array.array(kind).itemsize


@platforms
def test_a_killed_peer_is_an_error_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    with start(monkeypatch, platform, 3, body.shrink_after_error, 1) as ranks:
        ranks.hear_all()
        ranks.kill(1)
        for rank in (0, 2):
            assert ranks.hear(rank) == ("PeerLost", [4.0, 4.0])


@platforms
def test_split(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    with start(monkeypatch, platform, 3, body.split_by_parity) as ranks:
        assert ranks.hear_all() == [[2, 6.0, 6.0], [None, 6.0, 6.0], [2, 6.0, 6.0]]


@platforms
def test_an_asynchronous_error_is_raised_by_wait(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    with start(monkeypatch, platform, 1, body.reduce_until_error, (), FAKE_NCCL_ERROR_AFTER=3) as ranks:
        ranks.hear(0)
        name, words, _ = ranks.hear(0)
    assert name == "PeerLost"
    assert "asynchronous error" in words and "and its detail" in words


PROGRAMS = ["stuck_operation", "stuck_set_up", "wrong_calls", "several_streams"]


@platforms
@pytest.mark.parametrize("program", PROGRAMS)
def test_one_rank(platform: str, program: str) -> None:
    environ = workshop.fake_environ(platform)
    assert workshop.said(workshop.program("collective_programs", platform, program, environ=environ)) == "fine"


@platforms
def test_an_abort_that_hangs_itself_is_given_up(platform: str) -> None:
    environ = workshop.fake_environ(platform, FAKE_NCCL_ABORT_HANGS=1)
    begin = time.monotonic()
    done = workshop.program("collective_programs", platform, "abort_hangs", environ=environ)
    assert workshop.said(done) == "fine"
    assert time.monotonic() - begin < workshop.LIMIT / 2


@platforms
@pytest.mark.parametrize("call", ["GetUniqueId", "InitRankConfig", "GetAsyncError", "AllReduce", "Finalize", "Destroy"])
def test_each_call_may_fail(platform: str, call: str) -> None:
    environ = workshop.fake_environ(platform, FAKE_NCCL_FAIL=call)
    said = workshop.said(workshop.program("collective_programs", platform, "whole_life", environ=environ))
    # Finalize fails: the communicator is aborted instead. Destroy fails: closing says so.
    assert said == ("fine" if call == "Finalize" else "NativeError")


@platforms
def test_what_an_older_library_lacks_is_absent_and_the_rest_works(platform: str) -> None:
    environ = workshop.fake_environ(platform) | {"LD_LIBRARY_PATH": str(workshop.fakes(platform, old=True))}
    assert workshop.said(workshop.program("collective_programs", platform, "old_library", environ=environ)) == "fine"


@platforms
def test_without_the_library_memory_still_works(platform: str, tmp_path: Any) -> None:
    driver = workshop.FAKE_NAMES[platform][0]
    os.symlink(workshop.fakes(platform) / driver, tmp_path / driver)
    environ = workshop.fake_environ(platform) | {"LD_LIBRARY_PATH": str(tmp_path)}
    said = workshop.said(workshop.program("collective_programs", platform, "no_library", environ=environ))
    if said == "there is one":
        pytest.skip("this machine has an NCCL or RCCL of its own")
    assert said == "fine"
