"""Slurm's words in one table, and in plain words.

Every job state and flag that Slurm documents stands in `STATES` once, with its phase. Four phases, not three:
PREEMPTED, NODE_FAIL, COMPLETING and their like are ENDING. They look final, but Slurm may put the same
job id back in the queue, so only its absence from the queue, or a FINAL state, is the end. What is not in the
table is UNKNOWN and keeps its text; it is never taken for running, and nothing here raises.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import signal
from collections.abc import Sequence

from slurm_ft.slurm.reasons import reason_words as reason_words


class Phase(enum.Enum):
    """Where in its life a job is."""

    PENDING = "waiting for nodes"
    RUNNING = "holds nodes"
    ENDING = "over for now; the same job id may be queued again"
    FINAL = "over for good"
    UNKNOWN = "cannot be told"


@dataclasses.dataclass(frozen=True)
class State:
    """One job state: the short code of squeue, the long name, the phase, and what it means."""

    code: str
    name: str
    phase: Phase
    words: str

    @property
    def pending(self) -> bool:
        return self.phase is Phase.PENDING

    @property
    def running(self) -> bool:
        return self.phase is Phase.RUNNING

    @property
    def final(self) -> bool:
        return self.phase is Phase.FINAL


_P, _R, _E, _F = Phase.PENDING, Phase.RUNNING, Phase.ENDING, Phase.FINAL

STATES = (
    State("PD", "PENDING", _P, "waiting for nodes"),
    State("CF", "CONFIGURING", _P, "its nodes are starting"),
    State("PO", "POWER_UP_NODE", _P, "its nodes are being powered up"),
    State("EX", "EXPEDITING", _P, "waiting at the head of the queue"),
    State("RQ", "REQUEUED", _P, "going back into the queue"),
    State("RF", "REQUEUE_FED", _P, "going back into the federation's queue"),
    State("RH", "REQUEUE_HOLD", _P, "back in the queue, held"),
    State("SE", "SPECIAL_EXIT", _P, "back in the queue, held after a special exit code"),
    State("RD", "RESV_DEL_HOLD", _P, "held because its reservation was deleted"),
    State("R", "RUNNING", _R, "running"),
    State("RS", "RESIZING", _R, "running, changing its size"),
    State("SI", "SIGNALING", _R, "running, being sent a signal"),
    State("S", "SUSPENDED", _R, "suspended"),
    State("ST", "STOPPED", _R, "stopped by a signal, keeps its nodes"),
    State("CG", "COMPLETING", _E, "ending, its nodes are being cleaned up"),
    State("SO", "STAGE_OUT", _E, "ending, its data are being copied out"),
    State("UD", "UPDATE_DB", _E, "ending, the accounting is being told"),
    State("PR", "PREEMPTED", _E, "preempted by a more important job"),
    State("NF", "NODE_FAIL", _E, "one of its nodes failed"),
    State("BF", "BOOT_FAIL", _E, "its nodes did not start"),
    State("LF", "LAUNCH_FAILED", _E, "it could not be started on its nodes"),
    State("RC", "RECONFIG_FAIL", _E, "its nodes could not be set up"),
    State("CD", "COMPLETED", _F, "ended with exit code 0"),
    State("F", "FAILED", _F, "ended with an exit code other than 0"),
    State("CA", "CANCELLED", _F, "cancelled"),
    State("TO", "TIMEOUT", _F, "reached its time limit"),
    State("OOM", "OUT_OF_MEMORY", _F, "ran out of memory"),
    State("DL", "DEADLINE", _F, "could not end before its deadline"),
    State("RV", "REVOKED", _F, "given to another cluster of the federation"),
)
"""All states. The codes of POWER_UP_NODE, EXPEDITING, UPDATE_DB, LAUNCH_FAILED and RECONFIG_FAIL are ours."""

FLAGS = frozenset(
    {
        "COMPLETING", "CONFIGURING", "EXPEDITING", "LAUNCH_FAILED", "POWER_UP_NODE", "RECONFIG_FAIL", "REQUEUED",
        "REQUEUE_FED", "REQUEUE_HOLD", "RESIZING", "RESV_DEL_HOLD", "REVOKED", "SIGNALING", "SPECIAL_EXIT",
        "STAGE_OUT", "STOPPED", "UPDATE_DB",
    }
)  # fmt: skip
"""The states that Slurm keeps beside another one. As text it prints only one word, the flag; --json lists both."""

_BY_WORD = {word: state for state in STATES for word in (state.code, state.name)}
_BY_UID = re.compile(r"\bby ([0-9]+)")


@dataclasses.dataclass(frozen=True)
class StateField:
    """A state as Slurm wrote it. `cancelled_by` is the user number after "CANCELLED by", if there was one.

    `base` is the state below a flag: a COMPLETING job that was CANCELLED is in the state COMPLETING.
    """

    state: State
    raw: str
    cancelled_by: int | None = None
    base: State | None = None

    @property
    def cancelled(self) -> bool:
        """Is it CANCELLED, or COMPLETING after that?"""
        return "CANCELLED" in (self.state.name, self.base.name if self.base else "")

    @property
    def words(self) -> str:
        """The state in plain words, with who cancelled it."""
        if self.cancelled_by is None:
            return self.state.words
        who = "root" if self.cancelled_by == 0 else f"user {self.cancelled_by}"
        return f"{self.state.words} by {who}"


def parse_state(text: str) -> StateField:
    """Read a state field: a name, a code, a name that a narrow column cut ("OUT_OF_ME+"), words after any of
    them.

    Other text gives phase UNKNOWN and says "unknown: <text>".
    """
    raw = text.strip()
    word = raw.split(maxsplit=1)[0].upper() if raw else ""
    state = _BY_WORD.get(word.rstrip("+")) or _completed(word)
    if state is None:
        return StateField(State("?", "UNKNOWN", Phase.UNKNOWN, f"unknown: {raw}"), raw)
    by = _BY_UID.search(raw)
    return StateField(state, raw, int(by[1]) if by else None)


def parse_states(words: Sequence[str]) -> StateField:
    """Read the list of --json: a base state and its flags. A flag that can be read decides, as in Slurm's own text."""
    fields = [parse_state(word) for word in words if word]
    known = [field for field in fields if field.state.phase is not Phase.UNKNOWN]
    raw = ",".join(words)
    if not known:
        return dataclasses.replace(parse_state(raw), raw=raw)
    flags = [field for field in known if field.state.name in FLAGS]
    base = next((field for field in known if field.state.name not in FLAGS), None)
    first = flags[0] if flags else known[0]
    return StateField(first.state, raw, first.cancelled_by, base.state if base and flags else None)


def _completed(word: str) -> State | None:
    """Complete a name that a column cut. COMPLET+ could be two states, and is none."""
    if not word.endswith("+") or len(word) < 4:
        return None
    fitting = [state for state in STATES if state.name.startswith(word.rstrip("+"))]
    return fitting[0] if len(fitting) == 1 else None


@dataclasses.dataclass(frozen=True)
class ExitCode:
    """How a job or step ended: the exit code of its program, and the signal that ended it (0 for none)."""

    code: int
    signal: int

    @property
    def status(self) -> int:
        """One number, as a shell gives it: 128 + n after signal n, else the exit code."""
        return 128 + self.signal if self.signal else self.code

    @property
    def pair(self) -> str:
        """As Slurm writes it: `0:9`."""
        return f"{self.code}:{self.signal}"

    @property
    def words(self) -> str:
        if not self.signal:
            return f"exit code {self.code}"
        return f"killed by signal {self.signal}{_signal_name(self.signal)}"


def _signal_name(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""


def parse_exit_code(text: str) -> ExitCode | None:
    """Read "1:9" (exit code, signal) or the wait status that `squeue -O exit_code` prints. None for other
    text.
    """
    if match := re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text.strip()):
        return ExitCode(int(match[1]), int(match[2]))
    if match := re.fullmatch(r"[0-9]{1,9}", text.strip()):
        status = int(match[0])
        return ExitCode(status >> 8 & 0xFF, status & 0x7F)
    return None
