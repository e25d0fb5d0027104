"""`slurm-ft run --keeper` with real torchtitan ranks that are killed: what comes back, and what is left at the end."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from slurm_ft.events import Kind
from slurm_ft.keeper.place import socket_path
from slurm_ft.launch import local
from slurm_ft.spec import Policy
from tests.local.running import PYTHON, Run
from tests.waiting import wait_until

MISSING = [name for name in ("torch", "torchft", "torchtitan") if importlib.util.find_spec(name) is None]
needs_titan = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: pip install 'slurm-ft[train]'")

PROGRAMS = Path(__file__).with_name("programs")
TITAN = ("titan", "--sync-steps", "8", "--config", "digest_config:small", "--steps")
ALL_OR_WAIT = ("--replicas=2", "--min-replicas=2")
FORWARD, QUORUM, COMMIT, OPTIMIZER = "forward", "quorum", "commit", "optimizer"
SECONDS = 300.0


def train(run: Run, *options: str, kills: Sequence[tuple[int, int, int, str]] = (), steps: int = 24) -> list[str]:
    """Run titan to the end; gives the digests of both replicas' whole states."""
    run.environment |= {"PYTHONPATH": str(PROGRAMS), "KILLS": json.dumps(list(kills)), "OMP_NUM_THREADS": "1"}
    run.start(*ALL_OR_WAIT, *options, command=(*TITAN, str(steps)))
    _, words = run.head.communicate(timeout=SECONDS)
    assert run.head.returncode == 0, words
    return [(run.paths.root / f"digest.{replica}.0").read_text() for replica in (0, 1)]


def healed(run: Run, replica: int) -> list[tuple[str, int]]:
    """Where a replica's state came from at each restart."""
    phases = [event.data for event in run.events(Kind.PHASE, replica) if event.data.get("source")]
    return [(data["source"], data["source_step"]) for data in phases]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The digests of a run without kills and without a keeper."""
    run = Run(tmp_path_factory.mktemp("undisturbed"))
    try:
        return train(run)
    finally:
        run.close()


@needs_titan
def test_diloco_with_kills_ends_bit_for_bit_as_without(run: Run, undisturbed: list[str]) -> None:
    """What theory says. A batch is a function of (seed, step, replica), and an inner step one of weights, moments and
    batch. The outer step is one of the sum of both replicas' changes, and a sum of two does not depend on their
    order. With `--min-replicas 2` no synchronisation is committed by one replica alone: the survivor waits, keeps
    its interval's work, and tries again. So if a killed replica comes back with the state that it had, all
    synchronisations are those of the undisturbed run, and so is the end: weights, inner and outer moments, the
    parameters of the last synchronisation, and torchft's counters.

    Killed here: in a forward pass, twice; when its inner step was done and it was about to ask for the quorum; and
    in the middle of an inner step, whose half is of no use: the snapshot from the start of the interval is taken,
    and the same steps come out once more. (A kill between the vote and the outer step is another matter: the peer
    has committed, the replica heals from it, and its inner moments are then the peer's. See the next test.)
    """
    kills = [(1, 1, 11, FORWARD), (0, 1, 16, QUORUM), (1, 2, 19, OPTIMIZER), (1, 3, 20, FORWARD)]
    assert train(run, "--keeper=both", kills=kills) == undisturbed
    assert healed(run, 0) == [("live", 16)]
    assert healed(run, 1) == [("live", 10), ("snapshot", 16), ("live", 19)]
    report = run.call("report", str(run.paths.root)).stdout
    assert "state from: live memory (step 10)" in report
    assert "state from: a snapshot in memory (step 16)" in report
    assert nothing_is_left(run)


@needs_titan
def test_a_replica_that_its_peers_have_passed_takes_their_state(run: Run) -> None:
    """Killed between the vote and the outer step: the peer has gone on."""
    train(run, "--keeper=live", kills=[(0, 1, 8, COMMIT)], steps=16)
    assert healed(run, 0)[-1][0] == "peer"
    assert "state from: a peer" in run.call("report", str(run.paths.root)).stdout
    assert nothing_is_left(run)


def keepers(run: Run) -> list[int]:
    return [member.pid for member in local.members(f"{run.paths.root}#keeper.")]


def nothing_is_left(run: Run) -> bool:
    gone = not any(socket_path(run.paths.root, host).parent.exists() for host in local.hosts(2))
    return run.all_gone() and gone


def test_a_keeper_outlives_its_agent_and_its_step_and_the_controller_and_leaves_with_the_run(run: Run) -> None:
    run.start("--keeper=live")
    run.trains(0)
    (keeper,) = keepers(run)
    os.kill(run.agent(0), signal.SIGKILL)
    run.trains(0, attempt=2)
    os.kill(run.controller(), signal.SIGKILL)
    run.until(Kind.CONTROLLER_STARTED, count=2)
    run.inject(0, "kill")
    run.trains(0, attempt=3)
    assert keepers(run) == [keeper]
    assert run.finished() == 0
    assert nothing_is_left(run)


def test_a_keeper_that_dies_is_started_again_and_the_ranks_do_not_notice(run: Run) -> None:
    run.start("--keeper=live")
    rank = run.trains(0)
    (keeper,) = keepers(run)
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: len(run.events(Kind.KEEPER)) == 3)
    ended = run.events(Kind.KEEPER)[1].data
    assert (ended["what"], ended["why"]) == ("ended", "the keeper was killed by SIGKILL")
    assert wait_until(lambda: keepers(run)) != [keeper]
    assert run.trains(0) == rank
    assert run.finished() == 0
    assert nothing_is_left(run)


def test_when_head_and_controller_are_killed_the_keeper_leaves_by_itself(run: Run) -> None:
    run.start_with(Policy(kill_grace=0.2, orphan_timeout=3.0), keeper="live")
    run.trains(0)
    assert keepers(run)
    os.kill(run.head.pid, signal.SIGSTOP)
    os.kill(run.controller(), signal.SIGKILL)
    os.kill(run.head.pid, signal.SIGKILL)
    wait_until(lambda: not keepers(run), 15)
    assert nothing_is_left(run)


def test_without_the_option_there_is_no_keeper(run: Run) -> None:
    run.start(command=(PYTHON, "-c", "import os; print(repr(os.environ['SLURM_FT_KEEPER']))"))
    assert run.ended()[0] == 0
    assert run.events(Kind.KEEPER) == [] and run.log(0, 1) == "''\n"
