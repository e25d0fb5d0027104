"""The same failure again and again, and hosts on which too much fails. Pure.

A failure has a sign: what it was and where (the exception's type and the line that raised it, else the signal or
the exit code), and the training step at which it came. Restarts do not help against a failure that comes back
with the same sign at the same step in most replicas: the run is stopped before the night is burnt with them.
A failure on purpose has no sign, and neither has the loss of a host, of an agent or of a step: these are not the
program's. An attempt that reports no steps and ran for long has got on, so its failure is not the same either.

A host is worn out when more attempts have failed on it, of whatever replica, than its budget allows, and far
more than on any other host: then it is not the program.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_ft.spec import Budget

LAST_PLACE = re.compile(r'^\s*File "([^"\n]+)", line (\d+)', re.MULTILINE)
EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*)(?::|$)")
KEPT = 500
MORE_THAN_ELSEWHERE = 3
"""How many times as many failures a worn-out host has as any other."""


@dataclass(frozen=True)
class Mark:
    """One failure of a replica: `step` is the training step, None when it was before the first or is not known."""

    t: float
    replica: int
    host: str
    sign: str
    step: int | None


def sign(data: Mapping[str, Any], ran_long: bool = False) -> str:
    """What a failed rank's failure was and where, in words; '' for one that says nothing about the program."""
    if data.get("injected") or ran_long:
        return ""
    if data.get("hung"):
        return "it stood still"
    if data.get("oom"):
        return "it was killed for lack of memory"
    traceback = str(data.get("traceback", ""))
    places = LAST_PLACE.findall(traceback)
    if places:
        lines = [line for line in traceback.splitlines() if line.strip()]
        found = EXCEPTION.match(lines[-1])
        name = found.group(1) if found else "an exception"
        return f"{name} at {places[-1][0]}:{places[-1][1]}"
    if data.get("signal"):
        return str(data["signal"])
    code = data.get("code")
    return f"exit code {code}" if isinstance(code, int) else ""


def repeated(marks: Sequence[Mark], replicas: Iterable[int], times: int) -> str:
    """Why it is no use to go on, or ''. `replicas` are those that still try; `times` is how often is too often.

    Only the newest failure is asked about: whatever came before it, it has not stopped the run then.
    """
    last = marks[-1] if marks else None
    trying = set(replicas)
    if last is None or not last.sign or not trying or times <= 0:
        return ""
    counts = Counter(mark.replica for mark in marks if (mark.sign, mark.step) == (last.sign, last.step))
    hit = [replica for replica in trying if counts[replica] >= times]
    if 2 * len(hit) <= len(trying):
        return ""
    where = "before the first step" if last.step is None else f"at step {last.step}"
    return f"the same failure {where} {times} times in {len(hit)} of {len(trying)} replicas: {last.sign}"


def worn_out(marks: Sequence[Mark], now: float, budget: Budget) -> frozenset[str]:
    """The hosts on which too much has failed."""
    counts = Counter(mark.host for mark in marks if mark.host and mark.sign and now - mark.t < budget.seconds)
    bad = set()
    for host, count in counts.items():
        elsewhere = max((other for name, other in counts.items() if name != host), default=0)
        if count > budget.restarts and count >= MORE_THAN_ELSEWHERE * elsewhere:
            bad.add(host)
    return frozenset(bad)
