"""Real processes on this machine, killed for real: what is repaired, and what nobody notices."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import replace

import pytest

from slurm_ft.controller.lighthouse import extension_path
from slurm_ft.events import Kind
from slurm_ft.launch import local
from slurm_ft.spec import Budget, Policy
from tests.local.running import Run
from tests.waiting import wait_until

QUICK = Policy(kill_grace=0.3, stop_grace=0.5, agent_timeout=5.0, orphan_timeout=30.0, backoff=0.1)

needs_torchft = pytest.mark.skipif(extension_path() is None, reason="torchft is not installed here")


def test_a_killed_rank_is_restarted_in_place_and_its_peer_does_not_notice(run: Run) -> None:
    run.start("--replicas=2")
    peer = run.trains(0)
    dead = run.trains(1)
    run.inject(1, "kill")
    assert run.trains(1, attempt=2) != dead
    failed = run.until(Kind.RANK_FAILED, 1).data
    assert (failed["what"], failed["rank"]) == ("rank 0 was killed by SIGKILL", 0)
    run.inject(1, "exit:7")
    run.trains(1, attempt=3)
    assert run.until(Kind.RANK_FAILED, 1, 2).data["what"] == "rank 0 exited with code 7"
    assert run.trains(0) == peer
    assert run.finished() == 0
    assert run.attempts(0) == [(1, "")]
    assert run.attempts(1) == [(1, ""), (2, "in place"), (3, "in place")]
    assert len(run.events(Kind.STEP_LAUNCHED)) == 2


def test_one_dead_rank_ends_the_others_of_its_replica_even_one_that_does_not_listen(run: Run) -> None:
    run.start_with(QUICK, ranks=2, command=(*_stubborn(run),))
    old = [run.trains(0, rank=rank) for rank in (0, 1)]
    os.kill(old[1], signal.SIGSEGV)
    new = [run.trains(0, 2, rank) for rank in (0, 1)]
    assert not {*old} & {*new}
    assert run.until(Kind.RANK_FAILED).data["what"] == "rank 1 was killed by SIGSEGV"
    assert run.finished() == 0
    assert run.attempts(0) == [(1, ""), (2, "in place")]


def _stubborn(run: Run) -> list[str]:
    return [*run.argv()[-2:], "stubborn"]


def test_a_killed_agent_takes_its_ranks_along_and_its_step_is_started_again(run: Run) -> None:
    run.start("--replicas=2")
    peer, dead = run.trains(0), run.trains(1)
    os.kill(run.agent(1), signal.SIGKILL)
    assert run.trains(1, attempt=2) != dead
    wait_until(lambda: not os.path.exists(f"/proc/{dead}"))
    assert run.trains(0) == peer
    assert run.finished() == 0
    assert [event.data["step"] for event in run.events(Kind.STEP_LAUNCHED, 1)] == [1, 2]
    assert run.attempts(1) == [(1, ""), (2, "")]
    assert run.attempts(0) == [(1, "")]


def test_a_rank_that_hangs_its_agent_too_is_found_by_its_silence(run: Run) -> None:
    run.start_with(QUICK)
    run.trains(0)
    os.kill(run.agent(0), signal.SIGSTOP)
    assert run.trains(0, attempt=2)
    assert "silent" in run.until(Kind.AGENT_LOST).data["what"]
    assert run.finished() == 0


def test_nobody_notices_that_the_controller_was_killed(run: Run) -> None:
    run.start("--replicas=2")
    before = [run.trains(0), run.trains(1)]
    endpoint = run.paths.endpoint.read_text()
    os.kill(run.controller(), signal.SIGKILL)
    again = run.until(Kind.CONTROLLER_STARTED, count=2).data
    assert again["adopted"]
    assert (again["endpoint"], run.paths.endpoint.read_text()) == (endpoint, endpoint)
    run.inject(1, "kill")  # the new one does all that the old one did
    run.trains(1, attempt=2)
    assert run.trains(0) == before[0]
    assert os.path.exists(f"/proc/{before[0]}")
    assert run.finished() == 0
    assert run.attempts(0) == [(1, "")]
    assert run.attempts(1) == [(1, ""), (2, "in place")]
    assert len(run.events(Kind.RUN_STARTED)) == 1
    assert len(run.events(Kind.STEP_LAUNCHED)) == 2


def test_a_controller_whose_port_was_taken_meanwhile_is_found_by_its_agents(run: Run) -> None:
    run.start_with(Policy(kill_grace=0.5, orphan_timeout=60.0))
    before = run.trains(0)
    endpoint = run.paths.endpoint.read_text()
    os.kill(run.head.pid, signal.SIGSTOP)  # it must not start the next one before the port is taken
    os.kill(run.controller(), signal.SIGKILL)
    with socket.socket() as stranger:
        address, port = endpoint.removeprefix("tcp://").split(":")
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        wait_until(lambda: _binds(stranger, address, int(port)))
        stranger.listen()
        os.kill(run.head.pid, signal.SIGCONT)
        assert run.until(Kind.CONTROLLER_STARTED, count=2).data["endpoint"] != endpoint
        run.inject(0, "kill")
        assert run.trains(0, attempt=2) != before
        assert run.finished() == 0
    assert run.attempts(0) == [(1, ""), (2, "in place")]


def _binds(stranger: socket.socket, address: str, port: int) -> bool:
    try:
        stranger.bind((address, port))
    except OSError:
        return False
    return True


def test_a_controller_that_dies_while_ranks_are_being_cleared_leaves_no_replica_behind(run: Run) -> None:
    policy = Policy(kill_grace=1.5, stop_grace=0.5, orphan_timeout=60.0)
    run.start_with(policy, ranks=2, command=_stubborn(run))
    run.trains(0)
    os.kill(run.trains(0, rank=1), signal.SIGKILL)
    run.until(Kind.CLEARING)
    os.kill(run.controller(), signal.SIGKILL)  # the other rank does not listen to TERM: it is being cleared
    run.trains(0, attempt=2, rank=1)
    assert not run.events(Kind.AGENT_CLEARED)[0].t < run.events(Kind.CONTROLLER_STARTED)[1].t
    assert run.finished() == 0
    assert run.attempts(0) == [(1, ""), (2, "in place")]


def test_what_happens_while_there_is_no_controller_is_told_to_the_next_one(run: Run) -> None:
    run.start_with(Policy(kill_grace=0.5, orphan_timeout=60.0), replicas=2)
    run.trains(0)
    victim = run.trains(1)
    os.kill(run.head.pid, signal.SIGSTOP)
    os.kill(run.controller(), signal.SIGKILL)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{victim}"))
    os.kill(run.head.pid, signal.SIGCONT)
    run.trains(1, attempt=2)
    assert run.finished() == 0
    assert run.attempts(1) == [(1, ""), (2, "in place")]


def test_a_controller_that_dies_while_the_run_is_stopped_stops_it_soon(run: Run) -> None:
    policy = Policy(kill_grace=0.5, stop_grace=1.5, orphan_timeout=60.0)
    run.start_with(policy, command=_stubborn(run))
    run.trains(0)
    run.head.terminate()
    run.until(Kind.STEP_ENDING)
    os.kill(run.controller(), signal.SIGKILL)
    assert run.ended()[0] == 143
    took = run.until(Kind.RUN_ENDED).t - run.until(Kind.STEP_ENDING).t
    assert took < 5.0


def test_the_head_gives_up_on_a_controller_that_crashes_again_and_again(run: Run) -> None:
    # Killed before it has spoken to its agent, again and again, it is silent: the agent must not give it up first.
    run.start_with(QUICK)
    run.trains(0)
    for count in range(1, 7):
        os.kill(int(run.until(Kind.CONTROLLER_STARTED, count=count).data["pid"]), signal.SIGKILL)
    code, words = run.ended()
    assert code == 1
    assert "the controller crashed again and again" in words
    assert "controller.log" in words


@needs_torchft
def test_a_killed_lighthouse_is_there_again_under_the_same_address(run: Run) -> None:
    run.start()
    run.trains(0)
    dead, address = run.lighthouse(), run.paths.lighthouse.read_text()
    os.kill(dead, signal.SIGKILL)
    wait_until(lambda: run.lighthouse() != dead)
    host, port = address.strip().removeprefix("http://").split(":")
    wait_until(lambda: _answers(host, int(port)))
    wait_until(lambda: run.paths.lighthouse.read_text() == address)
    assert run.finished() == 0


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1).close()
    except OSError:
        return False
    return True


# --- ends --------------------------------------------------------------------------------------------------------


def test_a_killed_head_ends_its_run_in_order(run: Run) -> None:
    run.start("--replicas=2")
    run.trains(0)
    run.trains(1)
    run.head.kill()
    run.all_gone()
    assert run.until(Kind.RUN_ENDED).data["code"] == 143


def test_with_head_and_controller_killed_the_agents_leave_after_a_while(run: Run) -> None:
    run.start_with(replace(QUICK, orphan_timeout=3.0), replicas=2)
    run.trains(0)
    run.trains(1)
    os.kill(run.head.pid, signal.SIGSTOP)
    os.kill(run.controller(), signal.SIGKILL)
    run.head.kill()
    run.all_gone()


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGUSR2, 75)],
)
def test_a_signal_to_the_head_stops_the_run_in_order(run: Run, number: int, code: int) -> None:
    run.start("--replicas=2")
    run.trains(0)
    run.trains(1)
    run.head.send_signal(number)
    assert run.ended()[0] == code
    assert run.until(Kind.RUN_ENDED).data["code"] == code
    assert [row["state"] for row in run.state()["replicas"]] == ["STOPPED", "STOPPED"]


@pytest.mark.parametrize("moment", ["secret", "controller.log", "events.jsonl"])
def test_a_stop_is_not_lost_however_early_it_comes(run: Run, moment: str) -> None:
    run.start()
    wait_until((run.paths.root / moment).exists)
    run.head.terminate()
    code, _ = run.ended()
    assert code in (143, -15)
    assert code == 143 or not run.events(Kind.RUN_STARTED)


def test_a_rank_that_does_not_listen_is_killed_when_the_run_is_stopped(run: Run) -> None:
    run.start_with(QUICK, command=_stubborn(run))
    run.trains(0)
    assert run.call("stop", str(run.paths.root)).returncode == 0
    assert run.ended()[0] == 143


def test_nothing_that_a_rank_leaves_behind_outlives_its_step(run: Run) -> None:
    script = "setsid sleep 60 & exit 0"
    run.start(command=("sh", "-c", script))
    assert run.ended()[0] == 0
    assert local.members(f"{run.paths.root}#") == []


def test_too_few_replicas_end_the_run(run: Run) -> None:
    policy = Policy(min_replicas=2, in_place=Budget(0, 1.0), step=Budget(0, 1.0), kill_grace=0.5)
    run.start_with(policy, replicas=2)
    run.trains(0)
    run.trains(1)
    run.inject(1, "kill")
    assert run.ended()[0] == 1
    assert [row["state"] for row in run.state()["replicas"]] == ["STOPPED", "FAILED"]
