"""Events in plain words: one line each, for the live view and for scripts.

A training commits thousands of steps; a person wants to see what changed. So `Narrator` keeps back what
repeats: it tells a replica's progress at most every `PROGRESS_SECONDS`, a quorum only when its members
change, a commit only when it is the first of an attempt, when it failed for the first time, or when another try
of the same work succeeded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slurm_ft.errors import EXIT_FAILED, EXIT_LAUNCH, EXIT_PERMANENT, EXIT_TRY_AGAIN, EXIT_USAGE
from slurm_ft.events import Event, Kind
from slurm_ft.faults import FAULTS, Target
from slurm_ft.observe.text import clean, hostlist, pad, plural
from slurm_ft.observe.text import short as text_short

PROGRESS_SECONDS = 10.0

Data = Mapping[str, Any]


def exit_meaning(code: int | None) -> str:
    """An exit code of slurm-ft, a rank or a step, in words."""
    if code is None:
        return "it has not ended"
    known = {
        0: "done",
        EXIT_FAILED: "the training failed",
        EXIT_USAGE: "what was asked cannot be done as asked",
        EXIT_TRY_AGAIN: "it may work later: requeue it",
        EXIT_PERMANENT: "it will fail again in the same way: do not requeue it",
        EXIT_LAUNCH: "Slurm or the local launcher could not start it",
    }
    if code in known:
        return known[code]
    return f"ended by {signal_name(code - 128)}" if 128 < code < 193 else "a code of the program's own"


def signal_name(number: int) -> str:
    import signal

    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Narrator:
    """Turns events into lines: seconds since the start, replica, what happened."""

    def __init__(self) -> None:
        self.start: float | None = None
        self._told: dict[int, float] = {}
        self._quorum: Any = None
        self._committed: set[tuple[int | None, Any]] = set()

    def line(self, event: Event) -> str | None:
        """The line for an event, or None for one that is kept back."""
        if self.start is None or event.kind is Kind.RUN_STARTED:
            self.start = event.t
        words = self._words(event)
        if words is None:
            return None
        who = "-" if event.replica is None else str(event.replica)
        return f"{pad(f'{event.t - self.start:.1f}s', 8, right=True)} {pad(who, 3, right=True)}  {clean(words)}"

    def _words(self, event: Event) -> str | None:
        kind, data = event.kind, event.data
        if kind is Kind.COMMIT:
            return self._commit(event)
        if kind is Kind.QUORUM:
            return self._quorum_words(data)
        if kind is Kind.PROGRESS:
            return self._progress(event)
        return _WORDS[kind](data) if kind in _WORDS else None

    def _commit(self, event: Event) -> str | None:
        data = event.data
        step, again = data.get("step", "?"), data.get("again") is True
        if not data.get("committed"):
            # Not yet lost: the same work may be tried again. Of the further tries only the one that succeeds is news.
            return None if again else f"step {step} was not committed ({plural(_count(data, 'lost'), 'training step')})"
        key = (event.replica, data.get("attempt"))
        first = key not in self._committed
        self._committed.add(key)
        if again:
            return f"step {step} was committed at another try: nothing is lost"
        if not first:
            return None
        return f"committed step {step}, the first of attempt {data.get('attempt', '?')}"

    def _quorum_words(self, data: Data) -> str | None:
        if data.get("quorum_id") == self._quorum:
            return None
        self._quorum = data.get("quorum_id")
        return f"quorum {self._quorum} at step {data.get('step', '?')}"

    def _progress(self, event: Event) -> str | None:
        replica = -1 if event.replica is None else event.replica
        if event.t - self._told.get(replica, float("-inf")) < PROGRESS_SECONDS:
            return None
        self._told[replica] = event.t
        loss = event.data.get("loss")
        tail = f", loss {loss:.4f}" if isinstance(loss, int | float) else ""
        return f"training step {event.data.get('step', '?')}{tail}"


def _count(data: Data, name: str) -> int:
    value = data.get(name)
    return value if isinstance(value, int) else 0


def _run_started(data: Data) -> str:
    replicas = data.get("replicas")
    groups = replicas if isinstance(replicas, list) else []
    hosts = sum(len(group) for group in groups if isinstance(group, list))
    job = f" in job {data['job_id']}" if data.get("job_id") else ""
    size = f"{plural(len(groups), 'replica')} on {plural(hosts, 'host')}"
    return f"run {data.get('name', '')}{job} started: {size}"


def _head_started(data: Data) -> str | None:
    if not data.get("silence"):
        return None
    silence = text_short(data["silence"]) if isinstance(data["silence"], int | float) else "some time"
    return f"the head on {data.get('before', '?')} was not heard for {silence}: {data.get('host', '?')} takes over"


def _controller(data: Data) -> str | None:
    return f"the controller was started again on {data.get('host', '?')}" if data.get("adopted") else None


def _step_launched(data: Data) -> str:
    hosts = data.get("hosts")
    where = f" on {hostlist(hosts)}" if isinstance(hosts, list) and hosts else ""
    return f"step {data.get('step', '?')} launched{where}"


def _ranks_started(data: Data) -> str:
    where = f", restarted {data['rung']}" if data.get("rung") else ""
    return f"attempt {data.get('attempt', '?')}: {plural(_count(data, 'ranks'), 'rank')} started{where}"


def _rank_failed(data: Data) -> str:
    where = f" on {data['host']}" if data.get("host") else ""
    where += f", GPU {data['gpu']}" if data.get("gpu") else ""
    asked = " (injected)" if data.get("injected") else ""
    return f"{data.get('what', 'a rank failed')}{where}{asked}"


def _agent_lost(data: Data) -> str:
    return f"the agent on {data.get('host', '?')} is lost: {data.get('what', 'no reason given')}"


def _step_ending(data: Data) -> str:
    return f"its step is being ended: {data.get('why', 'no reason given')}"


def _step_exited(data: Data) -> str:
    code = data.get("code")
    return f"step {data.get('step', '?')} ended" + ("" if code in (0, None) else f" with exit code {code}")


def _injected(data: Data) -> str:
    if data.get("error"):
        return f"inject {data.get('kind', '')}: {data['error']}"
    kind = str(data.get("kind", ""))
    fault = FAULTS.get(kind.partition(":")[0])
    if fault is None or fault.target is Target.RANK:
        return f"injected {kind} into rank {data.get('rank', '?')}"
    return f"injected {kind}: {fault.what}"


SOURCES = {"live": "live memory", "snapshot": "a snapshot in memory", "peer": "a peer", "disk": "disk"}


def state_words(data: Data) -> str:
    """Where a restarted replica has its state from; `source` and `source_step` of a phase."""
    source = str(data.get("source") or "peer")
    step = data.get("source_step")
    return SOURCES.get(source, source) + (f" (step {step})" if isinstance(step, int) else "")


def _keeper(data: Data) -> str | None:
    if data.get("what") == "started":
        return None
    hosts = data.get("hosts")
    where = f" on {hostlist(hosts)}" if isinstance(hosts, list) and hosts else ""
    return f"the keeper{where} {data.get('what', '?')}: {data.get('why', 'no reason given')}"


def _stop(data: Data) -> str:
    return f"the run is being stopped: {data.get('why', 'no reason given')}"


def _run_ended(data: Data) -> str:
    code = data.get("code")
    meaning = exit_meaning(code) if isinstance(code, int) else "unknown"
    return f"run ended with exit code {code} ({meaning}): {data.get('why', '')}"


def time_of_day(t: Any) -> str:
    import time

    return time.strftime("%H:%M:%S", time.localtime(t)) if isinstance(t, int | float) else "?"


def _save_ended(data: Data) -> str:
    if not data.get("complete"):
        return f"nothing complete was saved: {data.get('why', 'no reason given')}"
    where = f" in {data['path']}" if data.get("path") else ""
    return f"step {data.get('step', '?')} is saved{where}, {data.get('why', '')}"


_WORDS: dict[Kind, Callable[[Data], str | None]] = {
    Kind.RUN_STARTED: _run_started,
    Kind.HEAD_STARTED: _head_started,
    Kind.CONTROLLER_STARTED: _controller,
    Kind.ADOPTED: lambda data: f"{plural(_count(data, 'agents'), 'agent')} reported to the new controller",
    Kind.STEP_LAUNCHED: _step_launched,
    Kind.RANKS_STARTED: _ranks_started,
    Kind.PHASE: lambda data: f"healed from {state_words(data)}" if data.get("phase") == "healed" else None,
    Kind.PROGRESSED: lambda data: f"attempt {data.get('attempt', '?')} trains",
    Kind.TORCHFT_ERROR: lambda data: f"rank {data.get('rank', '?')}: torchft reports {data.get('error', '?')}",
    Kind.RANK_FAILED: _rank_failed,
    Kind.RANK_DONE: lambda data: f"rank {data.get('rank', '?')} ended well",
    Kind.AGENT_LOST: _agent_lost,
    Kind.STEP_ENDING: _step_ending,
    Kind.STEP_EXITED: _step_exited,
    Kind.HOST_REPLACED: lambda data: f"the spare {data.get('spare', '?')} takes the place of {data.get('bad', '?')}",
    Kind.PARKED: lambda data: f"it waits for {hostlist(data.get('hosts', []))}: {data.get('why', '')}",
    Kind.DELAYED: lambda data: f"its repair waits until {time_of_day(data.get('until'))}: {data.get('why', '')}",
    Kind.HOST_UNFIT: lambda data: f"{data.get('host', '?')} failed its check: {data.get('what', '?')}",
    Kind.HOST_FIT: lambda data: f"{data.get('host', '?')} passes its check again",
    Kind.STOP_REQUESTED: _stop,
    Kind.SAVE_REQUESTED: lambda data: f"the ranks are asked to save: {data.get('why', 'no reason given')}",
    Kind.SAVE_ENDED: _save_ended,
    Kind.INJECTED: _injected,
    Kind.KEEPER: _keeper,
    Kind.NOTE: lambda data: str(data.get("text", "")),
    Kind.RUN_ENDED: _run_ended,
}
