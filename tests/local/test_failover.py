"""The head is lost with everything beside it, and an agent brings up the next one. Without Slurm a host is a
name, so what dies here are the processes that would have been on the head host."""

from __future__ import annotations

import os
import signal

from slurm_ft import lease
from slurm_ft.events import Kind, read
from slurm_ft.spec import Policy
from tests.local.running import Run
from tests.waiting import wait_until

QUICK = Policy(kill_grace=0.3, stop_grace=0.5, agent_timeout=5.0, head_timeout=8.0, orphan_timeout=60.0, backoff=0.1)
SECONDS = 90.0


def office(run: Run) -> list[int]:
    """The processes of the head: itself, the Lighthouse and the controller."""
    ours = ("slurm_ft.controller.", "slurm_ft.submit.local_run", "slurm_ft.submit.takeover")
    return [pid for pid, words in run.ours() if any(word in words for word in ours)]


def lose_the_head(run: Run) -> None:
    """All at once, as with a host: none of them sees another one die. Children first: a stopped process whose
    parent dies is woken up by the kernel."""
    pids = sorted(office(run), reverse=True)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)


def newest(run: Run) -> lease.Claim:
    claim = lease.newest(run.paths.lease)
    assert claim is not None
    return claim


def started(run: Run, epoch: int) -> bool:
    events = read(run.paths.events)
    return any(event.kind is Kind.ADOPTED and event.epoch == epoch for event in events)


def test_a_run_whose_head_is_lost_goes_on_under_another_one_and_no_rank_notices(run: Run) -> None:
    run.start_with(QUICK, replicas=2)
    ranks = [run.trains(0), run.trains(1)]
    lose_the_head(run)
    wait_until(lambda: started(run, 2), SECONDS, "a second head has all agents")
    run.inject(1, "kill")  # the new one does all that the old one did
    run.trains(1, attempt=2)
    assert run.trains(0) == ranks[0] and os.path.exists(f"/proc/{ranks[0]}")
    lose_the_head(run)
    wait_until(lambda: started(run, 3), SECONDS, "a third head has all agents")
    assert newest(run).epoch == 3
    run.finish()
    wait_until(lambda: run.events(Kind.RUN_ENDED), SECONDS, "the run ends")
    assert run.events(Kind.RUN_ENDED)[0].data["code"] == 0
    assert run.all_gone(SECONDS)
    assert newest(run).ended == 0
    assert len(run.events(Kind.RUN_STARTED)) == 1
    assert run.attempts(0) == [(1, "")]
    assert run.attempts(1) == [(1, ""), (2, "in place")]
    assert [event.epoch for event in run.events(Kind.HEAD_STARTED)] == [1, 2, 3]


def test_a_head_that_was_only_stopped_finds_itself_deposed_harms_nothing_and_knows_the_end(run: Run) -> None:
    run.start_with(QUICK, replicas=2)
    ranks = [run.trains(0), run.trains(1)]
    old = office(run)
    for pid in old:
        os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: started(run, 2), SECONDS, "a second head has all agents")
    for pid in old:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: [pid for pid in office(run) if pid in old] == [run.head.pid], SECONDS, "its children are gone")
    assert [run.trains(0), run.trains(1)] == ranks
    assert len(office(run)) == len(old) + 1
    run.finish()
    assert run.ended()[0] == 0
    assert run.all_gone(SECONDS)
    assert run.attempts(0) == run.attempts(1) == [(1, "")]
    assert len(run.events(Kind.RUN_ENDED)) == 1
    assert not run.events(Kind.STEP_ENDING)[0].t < run.events(Kind.RANK_DONE)[0].t
