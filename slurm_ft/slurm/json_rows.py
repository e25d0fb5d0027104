"""What `squeue --json`, `scontrol show job --json` and `sacct --json` print, from 22.05 to 26.05.

The shape changed with each data_parser: a number is a number (22.05), or {"set", "infinite", "number"}; a state is
a word, or a list of a base state and its flags, or both below "current"; an exit code is a wait status, or a
pair of such numbers; a step's id is an object, or text. `number`, `state` and `exit_code` read all of them, so
the readers below name no release. What a field does not say is unknown, never zero.

A site's wrapper may print lines around the document: the document is the first JSON object that has "jobs" in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from slurm_ft.slurm.rows import hosts
from slurm_ft.slurm.states import ExitCode, StateField, parse_exit_code, parse_state, parse_states
from slurm_ft.slurm.units import NoTime
from slurm_ft.slurm.views import AccountRow, JobView

Json = Any


def document(out: str) -> Mapping[str, Json] | None:
    """The object with "jobs" in an answer, whatever stands around it; None where there is none."""
    # Names are passed through as they are, so a control character may stand in a string.
    decoder = json.JSONDecoder(strict=False)
    start = out.find("{")
    while start >= 0:
        try:
            found, end = decoder.raw_decode(out, start)
        except ValueError:
            found, end = None, start + 1
        if isinstance(found, dict) and isinstance(found.get("jobs"), list):
            return found
        start = out.find("{", end)
    return None


def number(value: Json) -> int | NoTime:
    """A number in any spelling; UNLIMITED for an infinite one, UNKNOWN for one that is not set."""
    if isinstance(value, Mapping):
        if value.get("infinite"):
            return NoTime.UNLIMITED
        value = value.get("number") if value.get("set") else None
    if isinstance(value, bool) or value is None:
        return NoTime.UNKNOWN
    if isinstance(value, int | float):
        return int(value)
    return int(value) if isinstance(value, str) and value.strip().isdigit() else NoTime.UNKNOWN


def whole(value: Json, default: int = 0) -> int:
    """A count: `default` where it is not known."""
    found = number(value)
    return default if isinstance(found, NoTime) else found


def state(value: Json) -> StateField:
    """A state: a word, a list of words, or an object with one of them below "current"."""
    if isinstance(value, Mapping):
        value = value.get("current")
    if isinstance(value, list):
        return parse_states([str(word) for word in value])
    return parse_state(str(value or ""))


def exit_code(value: Json) -> ExitCode | None:
    """An exit code: a wait status, "code:signal", or an object with return_code and signal."""
    if isinstance(value, Mapping) and "return_code" in value:
        code, signal = number(value["return_code"]), value.get("signal")
        name = signal.get("id", signal.get("signal_id", signal)) if isinstance(signal, Mapping) else signal
        killed = whole(name)
        return (
            None
            if isinstance(code, NoTime) and not killed
            else ExitCode(0 if isinstance(code, NoTime) else code, killed)
        )
    found = number(value)
    return parse_exit_code(str(value or "") if isinstance(found, NoTime) else str(found))


def jobs(out: str, now: float) -> list[JobView] | None:
    """The jobs of `squeue --json` and `scontrol show job --json`; None for what is no such document."""
    found = document(out)
    return None if found is None else [_job(row, now) for row in found["jobs"] if isinstance(row, Mapping)]


def _job(row: Mapping[str, Json], now: float) -> JobView:
    minutes = number(row.get("time_limit"))
    if minutes is NoTime.UNKNOWN:
        minutes = NoTime.UNLIMITED  # so 22.05 writes it, as null
    limit = minutes if isinstance(minutes, NoTime) else minutes * 60
    field = state(row.get("job_state"))
    left = limit
    if field.state.running and not isinstance(limit, NoTime):
        left = max(0, whole(row.get("end_time")) - int(now))
    return JobView(
        job_id=str(whole(row.get("job_id"))),
        state=field,
        reason=str(row.get("state_reason") or "None"),
        nodes=whole(row.get("node_count")),
        nodelist=hosts(str(row.get("nodes") or "")),
        time_limit=limit,
        time_left=left,
        restarts=whole(row.get("restart_cnt")),
        requeue=bool(row.get("requeue")),
        exit_code=exit_code(row.get("exit_code")),
        array_id=_array_id(row),
        name=str(row.get("name") or ""),
    )


def _array_id(row: Mapping[str, Json]) -> str:
    job = str(whole(row.get("job_id")))
    if array := whole(row.get("array_job_id")):
        task = number(row.get("array_task_id"))
        tasks = row.get("array_task_string")
        return f"{array}_[{tasks}]" if isinstance(task, NoTime) and tasks else f"{array}_{whole(task)}"
    if het := whole(row.get("het_job_id")):
        return f"{het}+{whole(row.get('het_job_offset'))}"
    return job


def account(out: str) -> list[AccountRow] | None:
    """The jobs and steps of `sacct --json`, each job before its steps; None for what is no such document."""
    found = document(out)
    if found is None:
        return None
    return [row for job in found["jobs"] if isinstance(job, Mapping) for row in _account(job)]


def _account(job: Mapping[str, Json]) -> Iterator[AccountRow]:
    name = _array_id(_as_queued(job))
    cluster = str(job.get("cluster") or "")
    field = state(job.get("state"))
    yield AccountRow(
        job_id=name,
        step="",
        name=str(job.get("name") or ""),
        state=field,
        exit_code=exit_code(job.get("exit_code")),
        derived=exit_code(job.get("derived_exit_code")),
        nodes=whole(job.get("allocation_nodes")),
        nodelist=hosts(str(job.get("nodes") or "")),
        cluster=cluster,
        **_times(job),
    )
    for row in job.get("steps") or ():
        about, nodes = row.get("step") or {}, row.get("nodes") or {}
        yield AccountRow(
            job_id=name,
            step=_step(about.get("id"), str(about.get("name") or "")),
            name=str(about.get("name") or ""),
            state=state(row.get("state")),
            exit_code=exit_code(row.get("exit_code")),
            derived=None,
            nodes=whole(nodes.get("count")),
            nodelist=hosts(str(nodes.get("range") or "")),
            memory=_memory(row),
            cluster=cluster,
            **_times(row),
        )


_NAMED_STEPS = {"-5": "batch", "-4": "extern", "-6": "interactive"}


def _step(value: Json, name: str) -> str:
    """`1.2` and {"step_id": 2} and 2 are step 2; the batch step is a word, or a number close to 2 to the 32."""
    if isinstance(value, Mapping):
        value = value.get("step_id", "")
    step = str(value if value is not None else "").rpartition(".")[2]
    if step.isdigit() and int(step) > 2**31:
        step = str(int(step) - 2**32)
    return _NAMED_STEPS.get(step, step)


def _memory(step: Mapping[str, Json]) -> int | None:
    """The most resident memory of a task, which is in bytes below "requested": that means measured here."""
    most = ((step.get("tres") or {}).get("requested") or {}).get("max") or ()
    found = next((number(item.get("count")) for item in most if item.get("type") == "mem"), NoTime.UNKNOWN)
    return None if isinstance(found, NoTime) else math.ceil(found / 1024**2)


def _as_queued(job: Mapping[str, Json]) -> Mapping[str, Json]:
    """sacct's ids under the names that squeue has for them."""
    array, het = job.get("array") or {}, job.get("het") or {}
    return {
        "job_id": job.get("job_id"),
        "array_job_id": array.get("job_id"),
        "array_task_id": array.get("task_id"),
        "array_task_string": array.get("task"),
        "het_job_id": het.get("job_id"),
        "het_job_offset": het.get("job_offset"),
    }


def _times(row: Mapping[str, Json]) -> Mapping[str, Any]:
    times = row.get("time") or {}
    start, end = whole(times.get("start")), whole(times.get("end"))
    return {"start": float(start) or None, "end": float(end) or None, "elapsed": whole(times.get("elapsed"))}
