"""Hosts that failed their check, for people: what is wrong, and the line with which an administrator drains them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from slurm_ft.observe import text

LEADER = "slurm-ft: "
"""Begins the reason of a drained node, so that an administrator sees whose finding it is."""


def drain_line(host: str, what: str) -> str:
    """The command that drains a host. It is shown and never run: only administrators may."""
    reason = shlex.quote(text.clean(f"{LEADER}{what}"))
    return f"scontrol update NodeName={host} State=DRAIN Reason={reason}"


def lines(unfit: Mapping[str, str]) -> list[str]:
    """Nothing, or a block about hosts that are unfit as far as the run knows."""
    if not unfit:
        return []
    shown = ["", "unfit hosts; tell your administrators, who may want to drain them:"]
    for host, what in sorted(unfit.items()):
        shown += [f"  {text.clean(f'{host}: {what}')}", f"      {drain_line(host, what)}"]
    return shown
