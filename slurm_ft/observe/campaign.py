"""A campaign of faults against a running run: strikes by a schedule, each at a replica that is healthy then.

The command line and the soak use it. `wait` and `clock` are arguments, so that a test neither sleeps nor
depends on the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from slurm_ft import faults
from slurm_ft.controller.state import State
from slurm_ft.errors import RunFailed
from slurm_ft.faults import Strike
from slurm_ft.observe import requests
from slurm_ft.observe.requests import Now, Patience, Wait, Watch
from slurm_ft.paths import RunPaths


@dataclass(frozen=True)
class Shape:
    """Ranks and hosts of each replica."""

    ranks: int
    hosts: int


@dataclass(frozen=True)
class Blow:
    """What came of a strike: whom it hit, or why it did not fall."""

    strike: Strike
    replica: int | None = None
    rank: int = 0
    why_not: str = ""


Striker = Callable[[Strike, int | None, int], str]
"""Carries a strike out at a replica (None: at the run) and a rank; gives why it could not, or ''."""


def asking(paths: RunPaths, watch: Watch, wait: Wait = time.sleep, clock: Now = time.monotonic) -> Striker:
    """Strikes by asking the run itself, as `slurm-ft inject` does."""

    def strike(what: Strike, replica: int | None, rank: int) -> str:
        request = requests.injection(replica, rank, what.kind)
        try:
            requests.inject(paths, request, watch, Patience(requests.ANSWER_SECONDS, wait, clock))
        except RunFailed as error:
            return error.message
        return ""

    return strike


def run(
    strikes: Iterable[Strike],
    watch: Watch,
    shape: Shape,
    striker: Striker,
    tell: Callable[[Blow], None],
    wait: Wait = time.sleep,
    clock: Now = time.monotonic,
) -> None:
    """Strike by the schedule until it is over or the run has ended. `tell` hears of each strike."""
    began = clock()
    for strike in strikes:
        while clock() - began < strike.at:
            watch.look()
            if watch.ended is not None:
                return
            wait(min(requests.POLL_SECONDS, max(0.0, strike.at - (clock() - began))))
        watch.look()
        if watch.ended is not None:
            return
        tell(_strike(strike, watch, shape, striker))


def healthy(watch: Watch) -> list[int]:
    """The replicas that train now."""
    return [replica.id for replica in watch.ledger.state.replicas if replica.state is State.TRAINING]


def _strike(strike: Strike, watch: Watch, shape: Shape, striker: Striker) -> Blow:
    whom = faults.aim(strike, healthy(watch), shape.ranks, shape.hosts)
    if whom is None:
        return Blow(strike, why_not="the last healthy replica is spared")
    replica, rank = whom
    hits_run = faults.parse(strike.kind)[0].target is faults.Target.RUN
    why_not = striker(strike, None if hits_run else replica, rank)
    return Blow(strike, None if hits_run else replica, rank, why_not)
