"""What a head sees to while its children run."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from slurm_ft.controller import head
from slurm_ft.controller.head import Head, Place
from slurm_ft.errors import TryAgain
from slurm_ft.lease import Claim, Deposed, Lease, take
from slurm_ft.paths import RunPaths
from slurm_ft.spec import ReplicaSpec, RunSpec

ADDRESS = "http://127.0.0.1:4567\n"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    paths.create()
    paths.secret.mkdir(exist_ok=True)
    return paths


def new_head(paths: RunPaths, warn_in: head.WarnIn = lambda: None) -> Head:
    claim = Claim(1, "node1", pid=os.getpid())
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
