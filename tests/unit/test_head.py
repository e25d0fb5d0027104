"""What a head sees to while its children run."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from slurm_ft.controller import head
from slurm_ft.controller.head import Head, Place
from slurm_ft.errors import LaunchError, RunFailed, TryAgain
from slurm_ft.lease import Claim, Deposed, Lease, read, take
from slurm_ft.paths import RunPaths
from slurm_ft.spec import ReplicaSpec, RunSpec

ADDRESS = "http://127.0.0.1:4567\n"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    paths.create()
    paths.secret.mkdir(exist_ok=True)
    return paths


def new_head(paths: RunPaths, warn_in: head.WarnIn = lambda: None, silence: float = 0.0) -> Head:
    claim = Claim(1, "node1", pid=os.getpid(), silence=silence)
    assert take(paths.lease, claim)
    place = Place("12", ("node1",), "node1", "127.0.0.1")
    return Head(paths, RunSpec("r", ReplicaSpec(("true",)), 1), place, Lease(paths.lease, claim), warn_in)


def test_nobody_finds_the_last_lighthouse_while_the_next_one_starts_on_its_port(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[list[str]]()
    monkeypatch.setattr(head.Child, "start", lambda child: started.append(list(child._argv())))
    one = new_head(paths)
    one._start_lighthouse()
    one._lighthouse_address = ADDRESS
    paths.lighthouse.write_text(ADDRESS)
    one._start_lighthouse()
    assert [argv[4] for argv in started] == ["--port=0", "--port=4567"]
    assert (paths.lighthouse.read_text(), one._lighthouse_address) == ("", "")


def test_a_deposed_head_leaves_the_address_of_its_successors_lighthouse_alone(paths: RunPaths) -> None:
    one = new_head(paths)
    paths.lighthouse.write_text(ADDRESS)
    assert take(paths.lease, Claim(2, "node2"))
    with pytest.raises(Deposed):
        one._start_lighthouse()
    assert paths.lighthouse.read_text() == ADDRESS


@pytest.mark.parametrize(
    ("found", "kept"), [(None, ADDRESS), ("http://127.0.0.9:1\n", ADDRESS), (ADDRESS, ADDRESS), ("", "")]
)
def test_an_address_that_is_gone_or_of_another_is_put_right(paths: RunPaths, found: str | None, kept: str) -> None:
    one = new_head(paths)
    one._lighthouse_address = ADDRESS
    if found is not None:
        paths.lighthouse.write_text(found)
    assert not one._office()
    assert paths.lighthouse.read_text() == kept


def test_a_slurm_that_does_not_answer_is_asked_again_for_the_time_that_is_left(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [TryAgain("busy"), 0.0]

    def warn_in() -> float | None:
        answer = answers.pop(0)
        if isinstance(answer, TryAgain):
            raise answer
        return answer

    monkeypatch.setattr(head, "ASK_AGAIN", 0.0)
    one = new_head(paths, warn_in)
    asyncio.run(one._set_alarm())
    assert (answers, one._asked) == ([], signal.SIGUSR2)


# --- the controller ---------------------------------------------------------------------------------------------

DONE = "printf 3 > /proc/self/fd/{fd}; exit 3"
"""A controller that says that the run has ended with 3."""


@pytest.fixture
def controllers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the next controllers do, as lines for a shell, in this order."""
    scripts = list[str]()

    def argv(paths: RunPaths, place: Place, epoch: int, last_word: int) -> list[str]:
        return ["/bin/sh", "-c", scripts.pop(0).format(fd=last_word)]

    monkeypatch.setattr(head, "_controller_argv", argv)
    monkeypatch.setattr(head, "LONGEST_PAUSE", 0.0)
    monkeypatch.setattr(head, "RENEW", 0.0)
    return scripts


@pytest.mark.parametrize("code", [1, 2, 97, 0, 70])
def test_a_controller_that_cannot_go_on_with_a_run_at_once_does_not_end_it(
    paths: RunPaths, controllers: list[str], code: int
) -> None:
    """The run folder may be away for a moment, and Python ends with 1 when it cannot read a module."""
    controllers += ["kill -KILL $$", f"exit {code}", DONE]
    assert asyncio.run(new_head(paths)._keep_controller()) == 3
    assert not controllers


def test_nor_does_the_first_one_of_a_head_that_took_the_run_over(paths: RunPaths, controllers: list[str]) -> None:
    controllers += ["exit 2", DONE]
    assert asyncio.run(new_head(paths, silence=10.0)._keep_controller()) == 3


def test_nor_does_one_that_had_come_into_office(paths: RunPaths, controllers: list[str]) -> None:
    one = new_head(paths)
    Lease.share(paths.lease, 1).renew()
    controllers += ["exit 97", DONE]
    assert asyncio.run(one._keep_controller()) == 3


@pytest.mark.parametrize("code", [2, 97])
def test_a_controller_that_cannot_begin_a_run_ends_it_with_its_code(
    paths: RunPaths, controllers: list[str], code: int
) -> None:
    controllers += [f"exit {code}"]
    assert asyncio.run(new_head(paths)._keep_controller()) == code


@pytest.mark.parametrize("code", [head.EXIT_CRASHED, head.EXIT_DEPOSED])
def test_a_run_may_end_with_any_code(paths: RunPaths, controllers: list[str], code: int) -> None:
    controllers += [f"printf {code} > /proc/self/fd/{{fd}}; exit {code}"]
    assert asyncio.run(new_head(paths)._keep_controller()) == code


def test_a_controller_that_crashes_again_and_again_is_given_up(paths: RunPaths, controllers: list[str]) -> None:
    controllers += ["exit 70"] * (head.MOST_CRASHES + 2)
    with pytest.raises(RunFailed, match="again and again"):
        asyncio.run(new_head(paths)._keep_controller())
    assert len(controllers) == 1


def test_the_first_new_controller_comes_at_once_and_the_next_ones_after_longer_and_longer_pauses(
    paths: RunPaths,
) -> None:
    child = new_head(paths)._controller
    pauses = [child.pause for _ in range(head.MOST_CRASHES) if child.may_start_again()]
    assert pauses == [0.0, 1.0, 2.0, 4.0, 4.0]


def failing(monkeypatch: pytest.MonkeyPatch, *fails: bool) -> None:
    """Starting a child fails, as in a run folder that is away, or does not."""
    left, start = list(fails), head.Child.start

    def tried(child: head.Child) -> None:
        if left.pop(0):
            raise OSError(5, "Input/output error")
        start(child)

    monkeypatch.setattr(head.Child, "start", tried)


def test_a_controller_that_cannot_be_started_again_yet_is_tried_again(
    paths: RunPaths, controllers: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, False, True, True, False)
    controllers += ["exit 70", DONE]
    assert asyncio.run(new_head(paths)._keep_controller()) == 3
    assert capfd.readouterr().err.count("cannot be started yet: [Errno 5]") == 2


def test_a_run_whose_first_controller_cannot_be_started_ends(
    paths: RunPaths, controllers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, True)
    with pytest.raises(LaunchError, match="Input/output error"):
        asyncio.run(new_head(paths)._keep_controller())


def test_a_stop_is_not_kept_waiting_by_a_controller_that_cannot_be_started(
    paths: RunPaths, controllers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, False, True)
    controllers += ["exit 70"]
    one = new_head(paths)
    one._asked = signal.SIGTERM
    with pytest.raises(LaunchError):
        asyncio.run(one._keep_controller())


def spawned(one: Head) -> None:
    one._controller.watched = object()  # type: ignore[assignment]  # a process that is on its way
    one._controller.started = time.monotonic()


def test_the_lease_is_renewed_until_the_controller_does_so_itself(paths: RunPaths) -> None:
    """A controller needs seconds to start; meanwhile no other host may take the run for one without a head."""
    one = new_head(paths)
    spawned(one)
    for beat in (1, 2, 3):
        assert not one._office()
        assert read(paths.lease, 1).beat == beat
    theirs = Lease.share(paths.lease, 1)
    theirs.renew()
    for _ in range(2):
        assert not one._office()
        assert read(paths.lease, 1).beat == theirs.claim.beat


def test_a_head_does_not_take_its_controllers_beats_for_its_own(paths: RunPaths) -> None:
    """Both count on by one each second."""
    one = new_head(paths)
    spawned(one)
    theirs = Lease.share(paths.lease, 1)
    theirs.renew()
    one._lease.renew()  # it had looked a moment before
    for _ in range(2):
        assert not one._office()
        theirs.renew()
    assert one._handed_over


def test_a_controller_that_does_not_come_in_its_time_loses_the_run_to_another_host(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "COMES_WITHIN", -1.0)
    one = new_head(paths)
    spawned(one)
    assert not one._office()
    assert read(paths.lease, 1).beat == 0
