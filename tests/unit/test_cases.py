"""Troubles from public bug reports, about supervision, signals, environment and status: each with its right answer.

The ids are those of the project's collection of cases. Cases that need a real Slurm, or real processes, are named
in the tests of those folders.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_ft import env
from slurm_ft.agent.address import PORTS, free_port
from slurm_ft.agent.ends import tail
from slurm_ft.agent.environ import Place, rank_environment
from slurm_ft.controller.state import State
from slurm_ft.errors import EXIT_LAUNCH
from slurm_ft.events import Kind
from slurm_ft.launch.base import StepRequest
from slurm_ft.launch.srun import Allocation, step_argv, step_environment
from slurm_ft.paths import RunPaths
from slurm_ft.slurm.client import JobView, SlurmClient, Unknown, Unreachable
from slurm_ft.slurm.states import Phase, parse_state
from slurm_ft.slurm.units import NoTime, read_time
from slurm_ft.spec import Budget, Policy
from tests.world import World

QUICK = Policy(in_place=Budget(1, 600.0), step=Budget(2, 1800.0), backoff=0.0)
STEP = step_argv(StepRequest(RunPaths("/r"), 3, 2, ("n1", "n2")), Allocation("7", 8))


def place(**changes: object) -> Place:
    known: dict[str, object] = {
        "run": "/r", "replica": 0, "replicas": 2, "min_replicas": 1, "attempt": 1, "rank": 0, "local_rank": 0,
        "ranks": 1, "ranks_per_host": 1, "first_host": "n1", "port": 20000, "socket": "@s", "lighthouse": "",
        "error_file": "/r/e",
    }  # fmt: skip
    return Place(**(known | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "name", "uid"),
    [
        ("CANCELLED by 1000", "CANCELLED", 1000),
        ("CANCELLED by 0", "CANCELLED", 0),
        ("CANCELLED+", "CANCELLED", None),
        ("OUT_OF_ME+", "OUT_OF_MEMORY", None),
        ("CA", "CANCELLED", None),
        ("OOM", "OUT_OF_MEMORY", None),
        ("NF", "NODE_FAIL", None),
        ("PR", "PREEMPTED", None),
        ("RQ", "REQUEUED", None),
        ("CG", "COMPLETING", None),
    ],
)
def test_rw_01_a_state_field_with_words_after_it(text: str, name: str, uid: int | None) -> None:
    found = parse_state(text)
    assert (found.state.name, found.cancelled_by) == (name, uid)


def test_rw_01_a_state_that_nobody_knows_is_never_taken_for_running() -> None:
    found = parse_state("BRAND_NEW")
    assert found.state.phase is Phase.UNKNOWN and not found.state.running and "BRAND_NEW" in found.words


def test_rw_04_the_first_error_is_the_cause_and_what_it_causes_elsewhere_is_not() -> None:
    world = World(hosts=2, ranks=16, policy=QUICK)
    world.up(0)
    world.fail(0, "rank 13 exited with code 134: HIP failure: 'invalid device pointer'", rank=13)
    for rank in (0, 1, 31):
        world.fail(0, f"rank {rank} was killed by SIGABRT", rank=rank)
    failure = world.replica(0).failure
    assert failure is not None and failure.rank == 13 and "HIP failure" in failure.what
    assert len(world.supervisor.state.marks) == 1


def test_rw_13_no_site_default_decides_when_the_rest_of_a_step_is_killed() -> None:
    assert "--wait=60" in STEP and "--kill-on-bad-exit=1" in STEP
    assert not {"SLURM_WAIT", "SLURM_KILL_BAD_EXIT"} & step_environment({"SLURM_WAIT": "30"}, "/r").keys()


def test_rw_20_a_run_that_did_not_reach_its_goal_does_not_exit_with_0() -> None:
    world = World(policy=QUICK)
    for _ in range(3):
        world.exit(0, "srun exited with code 0: srun: error: Node failure on node0")  # it exits with 0, and lies
    world.settle()
    assert world.code == EXIT_LAUNCH


def test_rw_30_logs_come_at_once_and_each_attempt_has_its_own() -> None:
    assert rank_environment({}, place(), {})["PYTHONUNBUFFERED"] == "1"
    assert rank_environment({"PYTHONUNBUFFERED": ""}, place(), {})["PYTHONUNBUFFERED"] == ""  # the user's value wins
    assert "--unbuffered" in STEP
    paths = RunPaths("/r")
    assert len({paths.rank_log(0, attempt, rank) for attempt in (1, 2) for rank in (0, 1)}) == 4


def test_rw_34_a_port_is_outside_the_ephemeral_range_and_free() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert PORTS.stop <= max(low, 32_000)
    with socket.socket() as taken:
        port = free_port()
        taken.bind(("", port))
        taken.listen()
        assert all(free_port() != port for _ in range(20))


def test_rw_35_near_the_time_limit_nothing_is_started_again_and_no_failure_is_counted() -> None:
    world = World(replicas=2, policy=QUICK)
    world.up(0), world.up(1)
    world.fail(0)
    before = len(world.effects)
    world.stop(75)  # group 0 was killed early by the end that has begun
    world.settle()
    assert not [effect for effect in world.effects[before:] if effect.startswith(("launch", "start"))]
    assert world.code == 75


def test_rw_40_a_new_incarnation_starts_only_when_the_old_step_is_gone_and_has_a_number_of_its_own() -> None:
    world = World(policy=QUICK)
    world.up(0)
    world.silent(0)
    world.wait(100.0)
    assert world.effects.count("launch 0.2") == 0  # its ranks may well go on
    world.exit(0)
    world.up(0)
    assert (world.replica(0).step, world.replica(0).attempt) == (2, 2)


@pytest.mark.parametrize(
    "words",
    [
        "srun: error: Task launch for StepId=55.4 failed on node n07: Job credential expired",
        "srun: error: Unable to create step for job 7: Memory required by task is not available",
    ],
    ids=["RW-41 clock skew", "RW-48 the step cannot be made"],
)
def test_rw_41_rw_48_a_step_that_was_never_launched_is_no_failure_of_the_program(words: str) -> None:
    world = World(replicas=2, spares=1, policy=QUICK)
    world.up(0)
    world.exit(1, f"srun exited with code 97: {words}")
    failure = world.replica(1).failure
    assert failure is not None and failure.launch and words in failure.what
    assert world.effects[-1] == "launch 1.2"  # once more on the same host, then elsewhere
    world.exit(1, f"srun exited with code 97: {words}")
    assert world.effects[-1] == "launch 1.3 with spare0"
    assert world.replica(0).state is State.TRAINING


def test_rw_46_a_step_names_its_hosts_and_its_launch_is_bounded() -> None:
    assert "--nodelist=n[1-2]" in STEP and "--nodes=2" in STEP and not any("no-kill" in word for word in STEP)
    world = World(policy=Policy(launch_timeout=50.0, backoff=0.0))
    world.wait(51.0)
    assert world.effects[-1].startswith("end 0.1")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90 * 60), ("30:00", 1800), ("1:30:00", 5400), ("2-12", 216_000), ("2-12:30", 217_800),
     ("1-00:00:00", 86_400)],
)  # fmt: skip
def test_rw_47_time_limits_in_all_their_spellings(text: str, seconds: int) -> None:
    assert read_time(text) == seconds


@pytest.mark.parametrize("text", ["UNLIMITED", "INVALID", "NOT_SET", "N/A", ""])
def test_rw_47_words_for_a_time_are_no_number(text: str) -> None:
    assert isinstance(read_time(text), NoTime)


def answer(out: bytes = b"", err: bytes = b"", code: int = 0) -> object:
    client = SlurmClient(lambda argv, **_: subprocess.CompletedProcess(argv, code, out, err))
    return client.job("7")


def test_rw_52_known_unknown_and_no_answer_are_three_things() -> None:
    assert isinstance(answer(err=b"slurm_load_jobs error: Invalid job id specified", code=1), Unknown)
    for words in (b"Socket timed out on send/recv operation", b"Unable to contact slurm controller (connect failure)"):
        assert isinstance(answer(err=b"slurm_load_jobs error: " + words, code=1), Unreachable)


def test_rw_54_bytes_that_are_no_text_cost_nothing(tmp_path: Path) -> None:
    row = b"7|7|RUNNING|d\xe9j\xe0|1|n1|30:00|29:59|0|1|0|\n"
    assert isinstance(answer(row), JobView)
    (tmp_path / "0.log").write_bytes("Öl".encode()[:1] + b"\nlast line\n")
    assert tail(tmp_path / "0.log").endswith("last line")


def test_rw_55_a_restarted_controller_adopts_what_runs_and_launches_nothing_twice() -> None:
    world = World(replicas=3, policy=QUICK)
    world.up(0), world.up(1), world.up(2)
    before = list(world.effects)
    world.restart()
    world.wait(60.0)
    assert world.effects == before
    world.supervisor.taken[1] = 9  # an agent of a step that no record has survived called, and was sent away
    world.exit(1)
    assert world.effects[-1] == "launch 1.10"


def test_rw_58_a_step_finds_its_python_whatever_was_exported() -> None:
    assert "--export=ALL" in STEP and sys.executable in STEP
    kept = step_environment({"SLURM_EXPORT_ENV": "NONE", "SLURM_CONF": "/cm/slurm.conf", "PATH": "/bin"}, "/r")
    assert "SLURM_EXPORT_ENV" not in kept and kept["SLURM_CONF"] == "/cm/slurm.conf" and kept["PATH"] == "/bin"


def test_rw_31_rw_44_what_the_user_set_stays_and_no_proxy_is_asked_for_hosts_of_the_run() -> None:
    given = {"NCCL_SOCKET_IFNAME": "hsn0", "http_proxy": "http://proxy:3128", "no_proxy": "10.0.0.0/8"}
    seen = rank_environment(given, place(), {}, ["n1", "10.1.2.3"])
    assert seen["NCCL_SOCKET_IFNAME"] == "hsn0"
    assert {"10.0.0.0/8", "localhost", "n1", "10.1.2.3"} <= set(seen["no_proxy"].split(","))


def test_every_rank_bears_the_mark_by_which_its_leftovers_are_found() -> None:
    """RW-14."""
    seen = rank_environment({}, place(host="n1", attempt=4), {})
    assert (seen[env.RUN], seen[env.HOST], seen[env.ATTEMPT]) == ("/r", "n1", "4")


def test_launches_wait_while_the_run_folder_does_not_answer_and_all_else_goes_on() -> None:
    world = World(replicas=2, policy=QUICK)
    world.up(0), world.up(1)
    world.held = "the run folder's file system does not answer"
    world.exit(1)
    world.wait(10.0)
    assert "as soon as it can be: the run folder's file system" in world.supervisor.reasons[1]
    world.fail(0)
    world.cleared(0)  # rung 1 needs no file
    assert world.replica(0).attempt == 2
    world.held = ""
    world.wait(1.0)
    assert [e.kind for e in world.recorded][-1] is Kind.STEP_LAUNCHED
