"""What is known of a run and of each of its replicas, as the events tell it (see fold.py).

Nothing here has a clock, a process or a file; times are seconds since the epoch.

A replica is in one of these states:

    PENDING    no step; one is started as soon as it is due
    PARKED     a host of it is gone and there is no spare: it waits for the host, the run goes on without it
    LAUNCHING  its step was started, its agents have not all reported
    READY      all agents wait for the word to start the ranks
    RUNNING    ranks run, none has committed a step or reported progress
    TRAINING   ranks run and have shown that they get on
    BROKEN     a rank failed; the others have not been told yet
    CLEARING   the agents end what is left of the attempt
    LOST       an agent, or the step itself, is gone; the rest of the step must go too
    FINISHED   all ranks ended well; the step is still there
    ENDING     the step is being ended; `then` says what the replica is after that
    DONE, FAILED, STOPPED     final

What leads from one to the next is in transitions.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from slurm_ft.controller import sameness, saving
from slurm_ft.errors import EXIT_DONE


class State(StrEnum):
    """The states of a replica; see the module's table."""

    PENDING = "PENDING"
    PARKED = "PARKED"
    LAUNCHING = "LAUNCHING"
    READY = "READY"
    RUNNING = "RUNNING"
    TRAINING = "TRAINING"
    BROKEN = "BROKEN"
    CLEARING = "CLEARING"
    LOST = "LOST"
    FINISHED = "FINISHED"
    ENDING = "ENDING"
    DONE = "DONE"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


FINAL = frozenset({State.DONE, State.FAILED, State.STOPPED})
RANKS_RUN = frozenset({State.RUNNING, State.TRAINING})
STEP_EXISTS = frozenset(State) - FINAL - {State.PENDING, State.PARKED}

LONG = 600.0
"""Seconds after which a program that reports nothing is taken to have got on."""

CHECKPOINT = "checkpoint"
"""The phase of a rank that writes one; see slurm_ft.train.progress."""

IN_PLACE = "in place"
BY_STEP = "by step"
SPARE = "spare"


@dataclass(frozen=True)
class Failure:
    """The first failure of an attempt: what people are told, not what it caused elsewhere."""

    t: float
    what: str
    host: str = ""
    rank: int | None = None
    attempt: int = 0
    log: str = ""
    traceback: str = ""
    launch: bool = False
    hung: bool = False
    unfit: bool = False


@dataclass(frozen=True)
class Replica:
    """All that is known of one replica.

    `attempt` counts the starts of its ranks and `step` those of its step, both from 1, 0 before the first.
    `agents` maps the index of each reported host to the port it offers for the next attempt.
    `restarts` keeps the time and rung of every repair. `streak` counts failures since the last progress.
    `due` is when a repair that had to wait may begin. `committed` is the newest step that this attempt committed,
    and `phases` what each of its ranks said last that it does.
    `suspects` are the hosts whose agents fell silent, or did not report when the last step was started.
    `unanswered` counts launches in a row that failed because Slurm did not answer; the next is due at `launch_at`.
    """

    id: int
    hosts: tuple[str, ...]
    ranks_per_host: int = 1
    state: State = State.PENDING
    since: float = 0.0
    attempt: int = 0
    step: int = 0
    pid: int | None = None
    agents: Mapping[int, int] = field(default_factory=dict)
    addresses: Mapping[int, str] = field(default_factory=dict)
    done_ranks: frozenset[int] = frozenset()
    then: State = State.PENDING
    restarts: tuple[tuple[float, str], ...] = ()
    streak: int = 0
    failure: Failure | None = None
    first_failure: Failure | None = None
    ever_joined: bool = False
    progressed: float = 0.0
    committed: int | None = None
    phases: Mapping[int, str] = field(default_factory=dict)
    suspects: tuple[str, ...] = ()
    due: float = 0.0
    unanswered: int = 0
    launch_at: float = 0.0
    why: str = ""

    @property
    def ranks(self) -> int:
        return len(self.hosts) * self.ranks_per_host

    @property
    def writing(self) -> bool:
        """Did a rank say that it writes a checkpoint, and not yet that it does something else?"""
        return CHECKPOINT in self.phases.values()

    @property
    def complete(self) -> bool:
        return len(self.agents) == len(self.hosts)

    def to(self, state: State, t: float, **changes: Any) -> Replica:
        return replace(self, state=state, since=t, **changes)


@dataclass(frozen=True)
class LostHost:
    """A host in whose place a spare stands: when it was lost, and why. It is not used until it works again.

    `away`: nothing was heard of it. Where a replica failed again and again on a host that answers, that it answers
    is no reason to use it again; and a program that fails everywhere would never run out of spares.
    """

    t: float
    why: str
    away: bool = True


@dataclass(frozen=True)
class RunState:
    """The state of a run, as its events tell it. `collective` means that a torchft quorum was seen.

    `save` is the one that is going on. `left` are the replicas whose ranks ended well after they were asked to
    save because the run stops: they were told to leave, and have not finished. `marks` are the last failures.
    `lost` are the hosts that were replaced or are waited for; one that has returned is a spare.
    `broken_off` is a checkpoint that was not written to its end, and since then none was: the replica that
    failed in it, and the step that it had committed.
    """

    replicas: tuple[Replica, ...] = ()
    started: float = 0.0
    stop: str = ""
    stop_code: int = EXIT_DONE
    collective: bool = False
    first_done: float | None = None
    ended: int | None = None
    spares: tuple[str, ...] = ()
    lost: Mapping[str, LostHost] = field(default_factory=dict)
    unfit: Mapping[str, str] = field(default_factory=dict)
    save: saving.Save | None = None
    left: frozenset[int] = frozenset()
    marks: tuple[sameness.Mark, ...] = ()
    broken_off: tuple[int, int] | None = None

    @property
    def running(self) -> dict[int, int]:
        """The attempts of the replicas whose ranks run."""
        return {r.id: r.attempt for r in self.replicas if r.state in RANKS_RUN}

    def with_replica(self, replica: Replica) -> RunState:
        return replace(self, replicas=tuple(replica if replica.id == r.id else r for r in self.replicas))
