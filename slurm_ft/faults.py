"""The faults that can be put into a running run on purpose, and a random plan of them.

Each fault strikes a rank, a host of a replica, or the run itself; `FAULTS` is the whole list. It is read by
the command that asks, by the controller and the agent that carry it out, and by the docs.

A `Campaign` strikes again and again. `schedule` says when and with what, from a seed; `aim` says at which
replica, once it is known which are healthy. Both are pure: the same seed and the same healthy replicas give
the same strikes.
"""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from slurm_ft.errors import UsageError


class Target(StrEnum):
    """What a fault strikes."""

    RANK = "rank"
    HOST = "host"
    RUN = "run"


@dataclass(frozen=True)
class Fault:
    """A kind of fault. One with `lasts` ends by itself after so many seconds, if not told otherwise."""

    name: str
    target: Target
    what: str
    lasts: float | None = None


_RANK, _HOST, _RUN = Target.RANK, Target.HOST, Target.RUN

FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill", _RANK, "SIGKILL"),
        Fault("term", _RANK, "SIGTERM"),
        Fault("segv", _RANK, "SIGSEGV"),
        Fault("exit", _RANK, "leaves from within with code N"),
        Fault("stop", _RANK, "SIGSTOP: it is halted and not ended"),
        Fault("hang", _RANK, "its main thread waits for ever, the others run on"),
        Fault("gil-deadlock", _RANK, "a thread takes Python's lock and never gives it back"),
        Fault("oom", _RANK, "takes memory up to the limit of its cgroup; refused where there is none"),
        Fault("comm-abort", _RANK, "its communication with the other replicas is aborted"),
        Fault("agent", _HOST, "SIGKILL to the agent"),
        Fault("srun", _HOST, "SIGKILL to the srun client of the step"),
        Fault("host", _HOST, "all processes of the run on the host are frozen for good"),
        Fault("partition", _HOST, "all processes of the run on the host are frozen, and thawed later", 30.0),
        Fault("controller", _RUN, "SIGKILL to the controller"),
        Fault("lighthouse", _RUN, "SIGKILL to the Lighthouse"),
        Fault("disk-full", _RUN, "the log of events is refused as if the run folder were full", 10.0),
        Fault("slow-fs", _RUN, "the log of events waits as if the run folder hung", 10.0),
    )
}

NEEDS_SLURM = frozenset({"srun"})
NEEDS_LIMIT = frozenset({"oom"})
NEEDS_SPARE = frozenset({"host", "partition"})
BY_DEFAULT = tuple(
    "exit:1" if name == "exit" else name for name in FAULTS if name not in NEEDS_SLURM | NEEDS_LIMIT | NEEDS_SPARE
)
"""What a campaign uses when nothing is said: what works everywhere and costs no host."""


def parse(kind: str) -> tuple[Fault, int]:
    """The fault and, for `exit:N`, its number (0 for the others). Raises UsageError for one that there is not."""
    exits = re.fullmatch(r"exit:(\d{1,3})", kind)
    if exits and int(exits[1]) < 256:
        return FAULTS["exit"], int(exits[1])
    if kind in FAULTS and kind != "exit":
        return FAULTS[kind], 0
    near = difflib.get_close_matches(kind, FAULTS, 1)
    guess = f"did you mean `{near[0]}`? " if near else ""
    raise UsageError(f"`{kind}` is no kind of fault", f"{guess}`slurm-ft inject --help` lists them")


@dataclass(frozen=True)
class Strike:
    """One fault of a campaign: `at` seconds after its beginning. `pick` and `pick_rank`, in [0, 1), choose whom."""

    at: float
    kind: str
    pick: float
    pick_rank: float


def schedule(seed: int, kinds: Sequence[str], every: float, duration: float) -> Iterator[Strike]:
    """The strikes of a campaign: one in `every` seconds on average, from half to one and a half of that apart."""
    dice = random.Random(seed)
    at = 0.0
    while (at := at + every * dice.uniform(0.5, 1.5)) <= duration:
        yield Strike(at, dice.choice(kinds), dice.random(), dice.random())


def aim(strike: Strike, healthy: Sequence[int], ranks: int, hosts: int) -> tuple[int, int] | None:
    """The replica and the rank to strike; None when it must not fall, because the last healthy replica would.

    A rank stands for the host it is on; a replica has `ranks` ranks, evenly on `hosts` hosts.
    """
    target = parse(strike.kind)[0].target
    if target is Target.RUN:
        return 0, 0
    if len(healthy) < 2:
        return None
    replica = sorted(healthy)[int(strike.pick * len(healthy))]
    if target is Target.RANK:
        return replica, int(strike.pick_rank * ranks)
    return replica, int(strike.pick_rank * hosts) * (ranks // hosts)
