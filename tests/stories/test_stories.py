"""Histories of runs, replayed into the real Supervisor: what it does, and how the run ends.

A history is what happens, in the words of `World`'s methods; `effects` is all that the Supervisor did to the
world: `launch r.s` starts step s of replica r, `start r.a` the ranks of attempt a, `clear r.a` ends what is
left of them, `end r.s` ends a step.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace

import pytest

from slurm_ft.controller.state import State
from slurm_ft.events import Kind
from slurm_ft.spec import Budget, Policy
from tests.world import World

QUICK = Policy(in_place=Budget(1, 600.0), step=Budget(1, 1800.0), backoff=0.0)
SEGV = "rank 0 was killed by SIGSEGV"


@dataclass(frozen=True)
class Story:
    """`ends` is the exit code, None when the run goes on; `because` is part of a reason that was given."""

    history: str
    effects: str
    ends: int | None
    because: str = ""
    replicas: int = 1
    hosts: int = 1
    ranks: int = 1
    policy: Policy = QUICK
    launcher_works: bool = True
    spares: int = 0


STORIES = {
    "all end well": Story(
        replicas=2,
        history="up 0; up 1; done 0; exit 0; done 1; exit 1",
        effects="launch 0.1; launch 1.1; start 0.1; start 1.1; end 0.1 grace 30; end 1.1 grace 30",
        ends=0,
        because="2 of 2 replicas finished",
    ),
    "a replica waits for all its agents, and is done when all its ranks are": Story(
        hosts=2,
        ranks=2,
        history="join 0 1; wait 5.0; join 0 0; done 0 3 1 0; wait 1.0; done 0 2; exit 0",
        effects="launch 0.1; start 0.1; end 0.1 grace 30",
        ends=0,
    ),
    "a rank dies, its replica is restarted in place, and commits": Story(
        replicas=2,
        history="up 0; up 1; commit 0; fail 1; commit 0; cleared 1; commit 1; done 0; done 1; exit 0; exit 1",
        effects="launch 0.1; launch 1.1; start 0.1; start 1.1; clear 1.1; start 1.2; end 0.1 grace 30; "
                "end 1.1 grace 30",
        ends=0,
    ),
    "two hosts: the ranks start again when both are cleared": Story(
        hosts=2,
        history=f"up 0; fail 0 '{SEGV}' 1; cleared 0 1; wait 0.5; cleared 0 0",
        effects="launch 0.1; start 0.1; clear 0.1; start 0.2",
        ends=None,
    ),
    "ranks that die of the first one's death are one failure": Story(
        hosts=2,
        history=f"up 0; fail 0 '{SEGV}' 1; fail 0 'rank 0 exited with code 1' 0; cleared 0; "
                "progress 0; fail 0; cleared 0",
        effects="launch 0.1; start 0.1; clear 0.1; start 0.2; clear 0.2; end 0.1 grace 5",
        ends=None,
        because="its step is being ended: rank 0 was killed by SIGKILL",
    ),
    "no more steps are on their way up at once than the policy allows": Story(
        replicas=4,
        policy=replace(QUICK, launches_at_once=2),
        history="up 1; wait 1.0; exit 0; up 0; up 2",
        effects="launch 0.1; launch 1.1; start 1.1; launch 2.1; launch 0.2; start 0.1; launch 3.1; start 2.1",
        ends=None,
        because="its step was started",
    ),
    "who has to wait for a launch is told why": Story(
        replicas=3,
        policy=replace(QUICK, launches_at_once=2),
        history="wait 1.0",
        effects="launch 0.1; launch 1.1",
        ends=None,
        because="its step waits: 2 others are being started",
    ),
    "an agent is killed: a new step on the same hosts": Story(
        replicas=2,
        history="up 0; up 1; exit 1; up 1; done 1; exit 1; done 0; exit 0",
        effects="launch 0.1; launch 1.1; start 0.1; start 1.1; launch 1.2; start 1.2; end 1.2 grace 30; "
                "end 0.1 grace 30",
        ends=0,
    ),
    "an agent is silent: its step is ended before another one starts": Story(
        hosts=2,
        history="up 0; silent 0 1; wait 3.0; exit 0; up 0",
        effects="launch 0.1; start 0.1; end 0.1 grace 5; launch 0.2; start 0.2",
        ends=None,
    ),
    "the agent of a broken replica dies too: one failure, a new step": Story(
        history="up 0; fail 0; silent 0; exit 0; up 0",
        effects="launch 0.1; start 0.1; clear 0.1; end 0.1 grace 5; launch 0.2; start 0.2",
        ends=None,
    ),
    "agents that do not clear in time are ended with their step": Story(
        history="up 0; fail 0; wait 19.0; wait 2.0; exit 0; up 0",
        effects="launch 0.1; start 0.1; clear 0.1; end 0.1 grace 5; launch 0.2; start 0.2",
        ends=None,
    ),
    "the same replica is killed twice in a row: first in place, then by a new step": Story(
        replicas=2,
        history="up 0; up 1; fail 1; cleared 1; progress 1; fail 1; cleared 1; exit 1; up 1; done 1; done 0; exit 1; "
                "exit 0",
        effects="launch 0.1; launch 1.1; start 0.1; start 1.1; clear 1.1; start 1.2; clear 1.2; end 1.1 grace 5; "
                "launch 1.2; start 1.3; end 1.2 grace 30; end 0.1 grace 30",
        ends=0,
    ),
    "a budget is full again when its time is over": Story(
        history="up 0; fail 0; cleared 0; progress 0; wait 601.0; fail 0; cleared 0",
        effects="launch 0.1; start 0.1; clear 0.1; start 0.2; clear 0.2; start 0.3",
        ends=None,
    ),
    "it always crashes: in place, by step, then given up for good": Story(
        history="join 0; fail 0; cleared 0; fail 0; cleared 0; exit 0; join 0; fail 0; cleared 0; exit 0",
        effects="launch 0.1; start 0.1; clear 0.1; start 0.2; clear 0.2; end 0.1 grace 5; launch 0.2; start 0.3; "
                "clear 0.3; end 0.2 grace 5",
        ends=93,
        because="it failed again and again without any progress",
    ),
    "it crashes again and again, but it had trained before": Story(
        policy=Policy(in_place=Budget(0, 1.0), step=Budget(0, 1.0)),
        history="up 0; fail 0; cleared 0; exit 0",
        effects="launch 0.1; start 0.1; clear 0.1; end 0.1 grace 5",
        ends=1,
        because="1 of 1 replicas failed",
    ),
    "the second repair without progress waits longer than the first": Story(
        policy=Policy(in_place=Budget(9, 600.0), backoff=1.0),
        history="join 0; fail 0; cleared 0; fail 0; cleared 0; wait 0.9; restart; wait 0.2; fail 0; cleared 0; "
                "wait 1.9; wait 0.2",
        effects="launch 0.1; start 0.1; clear 0.1; start 0.2; clear 0.2; start 0.3; clear 0.3; start 0.4",
        ends=None,
    ),
    "Slurm is away: the launch waits longer each time, and neither budget nor spare is used": Story(
        policy=Policy(step=Budget(1, 1800.0), backoff=0.0),
        spares=1,
        history="up 0; exit 0; away 0; wait 1.9; wait 0.2; away 0; wait 3.9; wait 0.2; restart; up 0; exit 0",
        effects="launch 0.1; start 0.1; launch 0.2; launch 0.3; launch 0.4; start 0.2",
        ends=1,
        because="1 of 1 replicas failed",
    ),
    "a Slurm that has just come back may refuse a step, one that was never away means it": Story(
        policy=Policy(step=Budget(1, 1800.0), backoff=0.0),
        history="up 0; exit 0; away 0; wait 2.1; refused 0; wait 4.1; up 0; exit 0",
        effects="launch 0.1; start 0.1; launch 0.2; launch 0.3; launch 0.4; start 0.2",
        ends=1,
    ),
    "refused without having been away, it uses the budget": Story(
        policy=Policy(step=Budget(1, 1800.0), backoff=0.0),
        history="up 0; exit 0; refused 0",
        effects="launch 0.1; start 0.1; launch 0.2",
        ends=1,
    ),
    "Slurm is away when the run begins": Story(
        history="away 0; wait 2.1; up 0; done 0; exit 0",
        effects="launch 0.1; launch 0.2; start 0.1; end 0.2 grace 30",
        ends=0,
    ),
    "stop while all train": Story(
        replicas=2,
        history="up 0; up 1; stop 143; exit 1; exit 0",
        effects="launch 0.1; launch 1.1; start 0.1; start 1.1; end 0.1 grace 30; end 1.1 grace 30",
        ends=143,
        because="a stop was asked for",
    ),
    "the time limit is near: the run may be requeued": Story(
        history="up 0; stop 75 'the time limit is near'; stop 143 'it got SIGTERM'; exit 0",
        effects="launch 0.1; start 0.1; end 0.1 grace 30",
        ends=75,
    ),
    "the time limit is near and somebody asks for a stop: it does not come back": Story(
        history="up 0; stop 75 'the time limit is near'; stop 143; exit 0",
        effects="launch 0.1; start 0.1; end 0.1 grace 30",
        ends=143,
    ),
    "stop before the agents have reported": Story(
        history="stop 130; exit 0",
        effects="launch 0.1; end 0.1 grace 5",
        ends=130,
    ),
    "stop during a restart in place": Story(
        history="up 0; fail 0; stop 143; exit 0",
        effects="launch 0.1; start 0.1; clear 0.1; end 0.1 grace 5",
        ends=143,
    ),
    "stop while a step ends to be started again": Story(
        history="up 0; silent 0; stop 143; exit 0",
        effects="launch 0.1; start 0.1; end 0.1 grace 5",
        ends=143,
    ),
    "stop while a restart waits for its time": Story(
        policy=Policy(in_place=Budget(0, 1.0), step=Budget(9, 600.0), backoff=10.0),
        history="join 0; exit 0; join 0; exit 0; wait 1.0; stop 143",
        effects="launch 0.1; start 0.1; launch 0.2; start 0.2",
        ends=143,
    ),
    "a stop comes when the last rank has just ended": Story(
        history="up 0; done 0; stop 143; exit 0",
        effects="launch 0.1; start 0.1; end 0.1 grace 30",
        ends=0,
    ),
    "the peers have finished when a replica dies: it is not started again": Story(
        replicas=2,
        history="up 0; up 1; quorum 0; done 0; exit 0; fail 1; exit 1",
        effects="launch 0.1; launch 1.1; start 0.1; start 1.1; end 0.1 grace 30; end 1.1 grace 5",
        ends=0,
        because="1 of 2 replicas finished",
    ),
    "the peers finish while a replica that was restarted has no part in the training yet": Story(
        replicas=2,
        history="up 0; up 1; quorum 0; fail 1; cleared 1; done 0; exit 1; exit 0",
        effects="launch 0.1; launch 1.1; start 0.1; start 1.1; clear 1.1; start 1.2; end 0.1 grace 30; "
                "end 1.1 grace 30",
        ends=0,
    ),
    "a replica that trains has a while to finish after its peers": Story(
        replicas=2,
        history="up 0; up 1; quorum 0; done 0; exit 0; wait 59.0; done 1; exit 1",
        effects="launch 0.1; launch 1.1; start 0.1; start 1.1; end 0.1 grace 30; end 1.1 grace 30",
        ends=0,
        because="2 of 2",
    ),
    "and is ended when that is over": Story(
        replicas=2,
        history="up 0; up 1; quorum 0; done 0; exit 0; wait 59.0; wait 1.0; exit 1",
        effects="launch 0.1; launch 1.1; start 0.1; start 1.1; end 0.1 grace 30; end 1.1 grace 30",
        ends=0,
        because="1 of 2",
    ),
    "without a quorum replicas have nothing to do with each other": Story(
        replicas=2,
        history="up 0; up 1; done 0; exit 0; wait 100.0; fail 1; cleared 1; done 1; exit 1",
        effects="launch 0.1; launch 1.1; start 0.1; start 1.1; end 0.1 grace 30; clear 1.1; start 1.2; "
                "end 1.1 grace 30",
        ends=0,
    ),
    "no step can be started": Story(
        launcher_works=False,
        history="wait 1.0",
        effects="launch 0.1 fails; launch 0.2 fails",
        ends=97,
        because="no step could be started",
    ),
    "the launcher itself fails: no spare is spent on that": Story(
        spares=2,
        launcher_works=False,
        history="wait 1.0; launcher mended; wait 1.0",
        effects="launch 0.1 fails; launch 0.2 fails",
        ends=97,
    ),
    "the launcher works again after a while": Story(
        launcher_works=False,
        policy=Policy(step=Budget(9, 600.0), backoff=1.0),
        history="wait 1.0; wait 2.0; launcher mended; wait 3.9; wait 0.1; up 0",
        effects="launch 0.1 fails; launch 0.2 fails; launch 0.3 fails; launch 0.4 fails; launch 0.5; start 0.1",
        ends=None,
    ),
    "a step never comes up": Story(
        history="wait 119.0; wait 1.0; exit 0; wait 120.0; exit 0",
        effects="launch 0.1; end 0.1 grace 5; launch 0.2; end 0.2 grace 5",
        ends=97,
    ),
    "srun refuses at once, the second one comes up": Story(
        history="exit 0 'srun exited with code 97: srun: error: Unable to create step'; up 0",
        effects="launch 0.1; launch 0.2; start 0.1",
        ends=None,
    ),
    "a host falls silent: a spare takes its place at once": Story(
        hosts=2,
        spares=1,
        history="up 0; silent 0 1; exit 0; up 0",
        effects="launch 0.1; start 0.1; end 0.1 grace 5; launch 0.2 with spare0; start 0.2",
        ends=None,
    ),
    "a host does not come back after its step was lost: a spare takes its place": Story(
        replicas=2,
        spares=1,
        history="up 0; up 1; exit 1 'srun exited with code 0: Node failure on node1'; exit 1; up 1",
        effects="launch 0.1; launch 1.1; start 0.1; start 1.1; launch 1.2; launch 1.3 with spare0; start 1.2",
        ends=None,
    ),
    "Slurm gives up one of two hosts: a spare takes its place": Story(
        hosts=2,
        spares=1,
        history="up 0; exit 0 'srun exited with code 0: srun: error: Node failure on node1'; up 0",
        effects="launch 0.1; start 0.1; launch 0.2 with spare0; start 0.2",
        ends=None,
    ),
    "Slurm gives up one of two hosts, there is no spare, and refuses its steps: the replica waits for that host": Story(
        replicas=2,
        hosts=2,
        history="up 0; up 1; exit 0 'srun exited with code 0: srun: error: Node failure on node1'; exit 0",
        effects="launch 0.1; launch 1.1; start 0.1; start 1.1; launch 0.2",
        ends=None,
        because="waits for node1",
    ),
    "two hosts of one replica fall silent: each gets a spare": Story(
        hosts=2,
        spares=2,
        history="up 0; silent 0 0; silent 0 1; exit 0; up 0",
        effects="launch 0.1; start 0.1; end 0.1 grace 5; launch 0.2 with spare0 with spare1; start 0.2",
        ends=None,
    ),
    "a busy Slurm refuses the first step: the second one comes up, and no spare is taken": Story(
        spares=1,
        history="exit 0 'srun exited with code 97'; up 0",
        effects="launch 0.1; launch 0.2; start 0.1",
        ends=None,
    ),
    "a host that is dead from the start: a spare takes its place after one more try": Story(
        spares=1,
        history="exit 0 'srun exited with code 97'; exit 0 'srun exited with code 97'; up 0",
        effects="launch 0.1; launch 0.2; launch 0.3 with spare0; start 0.1",
        ends=None,
    ),
    "a stop while replicas that train each for itself have work left": Story(
        replicas=2,
        history="up 0; up 1; done 0; exit 0; stop 75; exit 1",
        effects="launch 0.1; launch 1.1; start 0.1; start 1.1; end 0.1 grace 30; end 1.1 grace 30",
        ends=75,
    ),
    "two hosts fall silent and there is one spare: it is taken once": Story(
        replicas=2,
        spares=1,
        history="up 0; up 1; silent 0; silent 1; exit 0; exit 1; up 1; up 0",
        effects="launch 0.1; launch 1.1; start 0.1; start 1.1; end 0.1 grace 5; end 1.1 grace 5; "
                "launch 0.2 with spare0; launch 1.2; start 1.2; start 0.2",
        ends=None,
    ),
    "on the spare all budgets are full again": Story(
        spares=1,
        history="up 0; silent 0; exit 0; up 0; fail 0; cleared 0; progress 0; fail 0; cleared 0; exit 0; up 0",
        effects="launch 0.1; start 0.1; end 0.1 grace 5; launch 0.2 with spare0; start 0.2; clear 0.2; start 0.3; "
                "clear 0.3; end 0.2 grace 5; launch 0.3 with spare0; start 0.4",
        ends=None,
    ),
    "a host fails its check before the first attempt: a spare takes its place at once": Story(
        replicas=2,
        spares=1,
        history="unfit 0; up 1; exit 0; up 0",
        effects="launch 0.1; launch 1.1; end 0.1 grace 5; start 1.1; launch 0.2 with spare0; start 0.1",
        ends=None,
    ),
    "one host of two fails its check, before or after the other is there: the spare takes its place": Story(
        hosts=2,
        spares=2,
        history="join 0 0; unfit 0 1; exit 0; unfit 0 0; exit 0; up 0",
        effects="launch 0.1; end 0.1 grace 5; launch 0.2 with spare0; end 0.2 grace 5; "
                "launch 0.3 with spare1 with spare0; start 0.1",
        ends=None,
    ),
    "a host fails its check when a broken replica is to start again there": Story(
        spares=1,
        history="up 0; fail 0; unfit 0; exit 0; up 0",
        effects="launch 0.1; start 0.1; clear 0.1; end 0.1 grace 5; launch 0.2 with spare0; start 0.2",
        ends=None,
    ),
    "a host fails its check and there is no spare: it is tried again, then given up as a launch failure": Story(
        policy=Policy(step=Budget(1, 1800.0), backoff=0.0),
        history="unfit 0; exit 0; unfit 0; exit 0",
        effects="launch 0.1; end 0.1 grace 5; launch 0.2; end 0.2 grace 5",
        ends=97,
        because="0 of 8 GPUs are there",
    ),
    "a spare that fails its check is not taken; the next one is": Story(
        spares=2,
        history="up 0; spare spare0 unfit; silent 0; exit 0; up 0",
        effects="launch 0.1; start 0.1; end 0.1 grace 5; launch 0.2 with spare1; start 0.2",
        ends=None,
    ),
    "the only spare is unfit: the replica is started again where it was": Story(
        spares=1,
        history="up 0; spare spare0 unfit; silent 0; exit 0; up 0",
        effects="launch 0.1; start 0.1; end 0.1 grace 5; launch 0.2; start 0.2",
        ends=None,
    ),
    "a spare that passes its check again is taken": Story(
        spares=1,
        history="up 0; spare spare0 unfit; spare spare0 fit; silent 0; exit 0; up 0",
        effects="launch 0.1; start 0.1; end 0.1 grace 5; launch 0.2 with spare0; start 0.2",
        ends=None,
    ),
    "a program that crashes everywhere takes no spare": Story(
        spares=1,
        policy=Policy(in_place=Budget(0, 1.0), step=Budget(0, 1.0)),
        history="join 0; fail 0; cleared 0; exit 0",
        effects="launch 0.1; start 0.1; clear 0.1; end 0.1 grace 5",
        ends=93,
    ),
    "a replica that trained for itself is given up, the others finish: the run has failed": Story(
        replicas=2,
        policy=Policy(in_place=Budget(0, 1.0), step=Budget(0, 1.0)),
        history="up 0; up 1; fail 1; cleared 1; exit 1; done 0; exit 0",
        effects="launch 0.1; launch 1.1; start 0.1; start 1.1; clear 1.1; end 1.1 grace 5; end 0.1 grace 30",
        ends=1,
    ),
    "failures that come slowly, without progress, use the budget up all the same": Story(
        policy=Policy(in_place=Budget(1, 100.0), step=Budget(0, 1.0)),
        history="join 0; wait 200.0; fail 0; cleared 0; wait 200.0; fail 0; cleared 0; exit 0",
        effects="launch 0.1; start 0.1; clear 0.1; start 0.2; clear 0.2; end 0.1 grace 5",
        ends=93,
    ),
    "a step of two hosts is refused: nobody knows which host is bad, and no spare is taken": Story(
        hosts=2,
        spares=1,
        history="exit 0; exit 0",
        effects="launch 0.1; launch 0.2",
        ends=97,
    ),
    "too few replicas are left": Story(
        replicas=3,
        policy=Policy(min_replicas=2, in_place=Budget(0, 1.0), step=Budget(0, 1.0)),
        history="up 0; up 1; up 2; fail 1; cleared 1; exit 1; fail 2; cleared 2; exit 0; exit 2",
        effects="launch 0.1; launch 1.1; launch 2.1; start 0.1; start 1.1; start 2.1; clear 1.1; end 1.1 grace 5; "
                "clear 2.1; end 2.1 grace 5; end 0.1 grace 30",
        ends=1,
        because="2 of 3 replicas failed",
    ),
    "a replica is given up, the others finish": Story(
        replicas=3,
        policy=Policy(min_replicas=2, in_place=Budget(0, 1.0), step=Budget(0, 1.0)),
        history="up 0; up 1; up 2; quorum 0; fail 1; cleared 1; exit 1; done 0; done 2; exit 2; exit 0",
        effects="launch 0.1; launch 1.1; launch 2.1; start 0.1; start 1.1; start 2.1; clear 1.1; end 1.1 grace 5; "
                "end 0.1 grace 30; end 2.1 grace 30",
        ends=0,
        because="2 of 3 replicas finished",
    ),
}  # fmt: skip


def told(story: Story, until: int | None = None, restart_after: int | None = None) -> World:
    """The world after a story, or after the first `until` things of it; `restart_after` so many of them the
    controller dies and another one takes over."""
    world = World(story.replicas, story.hosts, story.ranks, story.policy, story.launcher_works, story.spares)
    for number, line in enumerate(story.history.split("; ")[:until], 1):
        name, *words = shlex.split(line)
        getattr(world, name)(*map(_argument, words))
        if number == restart_after:
            world.restart()
    return world


def _argument(word: str) -> int | float | str:
    if word.isdigit():
        return int(word)
    return float(word) if word.replace(".", "").isdigit() else word


@pytest.mark.parametrize("name", STORIES)
def test_the_story(name: str) -> None:
    story = STORIES[name]
    world = told(story)
    assert "; ".join(world.effects) == story.effects
    assert world.code == story.ends
    reasons = [*world.supervisor.reasons.values(), *(str(e.data.get("why")) for e in world.recorded)]
    assert any(story.because in reason for reason in reasons)


@pytest.mark.parametrize("name", STORIES)
def test_the_story_is_the_same_when_the_controller_dies_at_any_moment_of_it(name: str) -> None:
    story = STORIES[name]
    for moment in range(1, len(story.history.split("; ")) + 1):
        world = told(story, restart_after=moment)
        assert ("; ".join(world.effects), world.code) == (story.effects, story.ends), f"it died after {moment} events"


@pytest.mark.parametrize("name", STORIES)
def test_every_story_can_be_stopped_at_any_moment(name: str) -> None:
    story = STORIES[name]
    for moment in range(len(story.history.split("; "))):
        world = told(story, until=moment)
        world.stop()
        world.settle()
        assert world.code in (143, 0, story.ends)
        assert not world.steps and not world.running


# --- what the log and the state say of it ------------------------------------------------------------------------


def test_the_log_of_a_restart_in_place_names_the_rung_and_both_attempts() -> None:
    world = told(STORIES["a rank dies, its replica is restarted in place, and commits"])
    starts = [event.data for event in world.recorded if event.kind is Kind.RANKS_STARTED and event.replica == 1]
    assert starts == [{"attempt": 1, "rung": "", "ranks": 1}, {"attempt": 2, "rung": "in place", "ranks": 1}]
    assert [rung for _, rung in world.replica(1).restarts] == ["in place"]


def test_a_restart_by_step_is_counted_once_and_its_ranks_are_not_counted_as_one_in_place() -> None:
    world = told(STORIES["the same replica is killed twice in a row: first in place, then by a new step"])
    assert [rung for _, rung in world.replica(1).restarts] == ["in place", "by step"]
    assert world.replica(1).attempt == 3
    assert world.replica(0).restarts == ()


def test_the_first_failure_is_kept_whatever_comes_after_it() -> None:
    world = told(STORIES["ranks that die of the first one's death are one failure"])
    first, last = world.replica(0).first_failure, world.replica(0).failure
    assert first is not None and last is not None
    assert (first.what, first.rank, last.what) == (SEGV, 1, "rank 0 was killed by SIGKILL")


def test_a_failure_counts_from_when_it_happened_not_from_when_it_was_heard_of() -> None:
    world = World()
    world.up(0)
    world.take(Kind.RANK_FAILED, 0, attempt=1, rank=0, what="x", age=2.5)
    failure = world.replica(0).failure
    assert failure is not None and failure.t == world.now - 2.5


def test_a_requeued_run_goes_on_counting_attempts_and_steps() -> None:
    world = World()
    world.supervisor.take(
        Kind.RUN_STARTED, session="next", replicas=[["a"]], ranks_per_host=1, attempts={"0": 4}, steps={"0": 2}
    )
    world.steps.clear()
    world.supervisor.act()
    world.join(0)
    assert world.effects[-2:] == ["launch 0.3", "start 0.5"]
    assert world.replica(0).restarts == ()


def test_the_reason_of_a_waiting_replica_says_how_long_and_what_for() -> None:
    world = World(policy=Policy(in_place=Budget(3, 600.0), backoff=8.0))
    world.join(0)
    for _ in range(2):
        world.fail(0)
        world.cleared(0)
    world.wait(1.0)
    assert world.supervisor.reasons[0] == "rank 0 was killed by SIGKILL; restarted in place in 7.0 s (1 of 3 used)"


def test_the_reason_of_a_failed_replica_stays_when_the_run_is_over() -> None:
    world = told(STORIES["it always crashes: in place, by step, then given up for good"])
    assert world.replica(0).state is State.FAILED
    assert world.supervisor.reasons[0] == "rank 0 was killed by SIGKILL; 2 restarts are used up"
