"""The time-outs of a run, in the order in which they must come. Pure: from one Policy, and what is set elsewhere.

A time-out of one layer must not end what a lower layer would have repaired. So they form a ladder:

    heartbeat      the Lighthouse no longer counts a replica that is dead
    join           the Lighthouse no longer waits for a replica that is alive and does not ask
    connect        a rank gives up a connection
    process group  a rank gives up a collective with a peer that hangs
    vote           ranks of one replica wait for each other's vote on a step, and for a peer's state
    hang           the controller ends a replica that stands still
    quorum         a rank no longer waits for a quorum, and dies
    step           an agent without a controller ends its ranks

Three of these are often set the wrong way round:

- torchft's `timeout` bounds the vote. A rank whose sibling is still in a collective waits for the sibling's
  time-out first, so it must be longer than the process group's. torchft's defaults are equal (60 s).
- torchft's `quorum_timeout` ends the rank that waits, and a rank in a quorum waits for a peer that hangs in a
  collective, for one that is being repaired where all are needed, and with LocalSGD or DiLoCo for the next
  synchronisation of the others. So it comes after the hang detection, which ends the one that is at fault.
- What the Lighthouse waits for is not `quorum_timeout` but `join` and `heartbeat`: these are short.

The sources of these rules are in docs/training-scripts.md.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import NamedTuple

from slurm_ft.spec import Policy

HANG_AFTER = 300.0
"""Stands for `hang_after` where that is turned off."""

VARIABLES = {
    "timeout": "TORCHFT_TIMEOUT_SEC",
    "quorum_timeout": "TORCHFT_QUORUM_TIMEOUT_SEC",
    "connect_timeout": "TORCHFT_CONNECT_TIMEOUT_SEC",
}
"""torchft's variable for each argument of its Manager. Whole seconds; the variable wins over the argument."""

QUORUM_RETRIES = 600
"""How often a Manager asks again when the Lighthouse is away. torchft pauses for quorum_timeout / (retries + 1)
between two tries, at least 0.1 s, and gives up at quorum_timeout whatever the number."""


class Rung(NamedTuple):
    """One time-out in seconds; `setting` is where it is set."""

    name: str
    seconds: float
    setting: str
    words: str


def torchft_defaults(policy: Policy) -> dict[str, int]:
    """Arguments of torchft's Manager and process group for who does not set them, in whole seconds."""
    hang = policy.hang_after or HANG_AFTER
    group = _between(5, hang / 5, 60)
    return {
        "connect_timeout": _between(2, hang / 30, 10),
        "process_group": group,
        "timeout": group + max(2, group // 2),
        "quorum_timeout": round(max(2 * hang, hang + policy.launch_timeout)),
    }


def _between(least: int, value: float, most: int) -> int:
    return max(least, min(round(value), most))


def ladder(policy: Policy, own: Mapping[str, float] | None = None, in_a_job: bool = True) -> list[Rung]:
    """The time-outs in their order. `own` holds values in seconds that a program has set itself, by the names of
    `torchft_defaults`. On one machine the last rung is left out: there agents without a controller end sooner,
    since no Slurm would clean up after them."""
    torchft = {**torchft_defaults(policy), **(own or {})}
    server = policy.lighthouse
    rungs = [
        Rung("heartbeat", server.heartbeat_timeout_ms / 1000, "lighthouse.heartbeat_timeout_ms",
             "a dead replica no longer counts at the Lighthouse"),
        Rung("join", server.join_timeout_ms / 1000, "lighthouse.join_timeout_ms",
             "a quorum waits so long for a replica that is late"),
        Rung("connect", torchft["connect_timeout"], "connect_timeout", "a connection is given up"),
        Rung("process group", torchft["process_group"], "the process group's timeout",
             "a collective with a peer that hangs is given up"),
        Rung("vote", torchft["timeout"], "timeout", "ranks of a replica wait for each other, and for a peer's state"),
        Rung("hang", policy.hang_after, "--hang-after", "a replica that stands still is ended; 0: never"),
        Rung("quorum", torchft["quorum_timeout"], "quorum_timeout", "a rank that gets no quorum ends"),
        Rung("step", policy.orphan_timeout, "orphan_timeout", "an agent without a controller ends its ranks"),
    ]  # fmt: skip
    return [rung for rung in rungs if rung.seconds > 0 and (in_a_job or rung.name != "step")]


def troubles(rungs: list[Rung]) -> list[str]:
    """A sentence for each pair of neighbours that is in the wrong order."""
    pairs = itertools.pairwise(rungs)
    return [
        f"{low.name} ({low.setting}) is {low.seconds:g} s and {high.name} ({high.setting}) {high.seconds:g} s: "
        f"the first must be shorter, or {CONSEQUENCES[high.name]}"
        for low, high in pairs
        if low.seconds >= high.seconds
    ]


CONSEQUENCES = {
    "join": "a quorum no longer waits for a dead replica only",
    "connect": "a connection is given up while its peer still joins",
    "process group": "a collective ends before a connection to its peers is given up",
    "vote": "a healthy rank gives up its sibling, which only waits for a peer",
    "hang": "a replica is ended for what torchft would have got over",
    "quorum": "a healthy rank dies while it waits for a peer that hangs or is repaired",
    "step": "ranks are ended while they may still get a quorum",
}


def encode(defaults: Mapping[str, int]) -> str:
    """The form in which an agent hands the defaults to the bootstrap of its ranks."""
    return json.dumps(dict(defaults), separators=(",", ":"))
