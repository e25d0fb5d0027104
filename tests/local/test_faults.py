"""`slurm-ft inject` with every kind of fault that a laptop allows: it strikes, and it is repaired."""

from __future__ import annotations

import os
import re
import signal

from slurm_ft.events import Kind
from slurm_ft.spec import Policy
from tests.local.running import Run
from tests.processes import lives
from tests.waiting import wait_until

QUICK = Policy(kill_grace=0.3, stop_grace=0.5, agent_timeout=5.0, orphan_timeout=30.0, backoff=0.1, hang_after=1.0)


def test_hangs_that_only_progress_shows_are_found_and_the_cause_is_known_to_be_on_purpose(run: Run) -> None:
    run.start_with(QUICK, replicas=2)
    run.trains(0)
    run.trains(1)
    for attempt, kind in enumerate(("hang", "gil-deadlock"), 1):
        run.inject(1, kind)
        run.trains(1, attempt + 1)
        assert "stood still" in run.until(Kind.RANK_FAILED, 1, attempt).data["what"]
    assert run.finished() == 0
    assert run.attempts(0) == [(1, "")]


def test_a_host_that_falls_silent_is_replaced_and_harms_nothing_when_it_comes_back(run: Run) -> None:
    """All its processes are frozen and thawed later: no connection is reset, as when a network is cut and heals."""
    run.start_with(QUICK, replicas=2)
    run.trains(0)
    frozen = run.trains(1)
    agent = run.agent(1)
    out = run.call("inject", str(run.paths.root), "--replica=1", "--kind=partition", "--seconds=60")
    assert out.returncode == 0, out.stderr
    run.trains(1, attempt=2)
    assert "is silent" in run.until(Kind.AGENT_LOST, 1).data["what"]
    wait_until(lambda: not (lives(frozen) or lives(agent)), what="what was frozen is gone before it can thaw")
    assert run.finished() == 0
    assert run.attempts(0) == [(1, "")]
    for pid in _freezers(run):
        os.kill(pid, signal.SIGKILL)


def _freezers(run: Run) -> list[int]:
    return [pid for pid, words in run.ours() if "freeze.py" in words]


def test_the_controller_the_lighthouse_and_an_agent_are_struck_and_the_ranks_of_others_do_not_notice(run: Run) -> None:
    run.start_with(QUICK, replicas=2)
    peer = run.trains(0)
    run.trains(1)
    controller = run.controller()
    for kind in ("controller", "lighthouse"):
        out = run.call("inject", str(run.paths.root), f"--kind={kind}")
        assert out.returncode == 0 or (kind == "lighthouse" and "no Lighthouse" in out.stderr), out.stderr
        run.until(Kind.CONTROLLER_STARTED, count=2)
    assert int(run.until(Kind.CONTROLLER_STARTED, count=2).data["pid"]) != controller
    run.inject(1, "agent")
    run.trains(1, attempt=2)
    assert run.trains(0) == peer
    assert run.finished() == 0
    assert (run.attempts(0), run.attempts(1)) == ([(1, "")], [(1, ""), (2, "")])


def test_what_cannot_be_struck_is_refused_with_a_reason(run: Run) -> None:
    run.start_with(QUICK)
    run.trains(0)
    refused = {
        ("--replica=0", "--kind=srun"): "a local run has no srun",
        ("--replica=0", "--kind=kill", "--rank=7"): "is not running",
        ("--kind=kill",): "say which with --replica",
        ("--replica=9", "--kind=hang"): "there is no replica 9",
    }
    for options, words in refused.items():
        out = run.call("inject", str(run.paths.root), *options)
        assert out.returncode in (1, 2) and words in out.stderr, out.stderr
    assert run.finished() == 0


def test_a_campaign_strikes_by_its_seed_and_spares_the_last_healthy_replica(run: Run) -> None:
    run.start_with(QUICK, replicas=2)
    run.trains(0)
    run.trains(1)
    campaign = ("--every=0.4", "--for=4", "--seed=7", "--kind=kill", "--kind=exit:3", "--kind=agent")
    planned = run.call("inject", str(run.paths.root), *campaign, "--dry-run").stdout
    out = run.call("inject", str(run.paths.root), *campaign)
    assert out.returncode == 0, out.stderr
    struck = re.findall(r"s  (\S+): struck", out.stderr)
    assert struck and set(struck) <= {"kill", "exit:3", "agent"}
    assert re.findall(r"s  (\S+)", planned) == re.findall(r"s  (\S+): ", out.stderr)
    assert sum(not event.data["error"] for event in run.events(Kind.INJECTED)) == len(struck)
    assert run.finished() == 0


def test_a_full_and_a_stalled_run_folder_lose_no_event_and_stop_nobody(run: Run) -> None:
    run.start_with(QUICK, replicas=2)
    peers = [run.trains(0), run.trains(1)]
    for kind, words in (("disk-full", "cannot be written"), ("slow-fs", "does not answer")):
        request = run.call("inject", str(run.paths.root), f"--kind={kind}", "--seconds=1.5")
        # The answer is an event, so it comes when events can be written again.
        assert request.returncode == 0, request.stderr
        run.noted(words, "events waited in memory")
    assert [run.trains(0), run.trains(1)] == peers
    assert run.finished() == 0
    assert run.attempts(0) == run.attempts(1) == [(1, "")]
