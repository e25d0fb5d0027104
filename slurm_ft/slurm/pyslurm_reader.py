"""pyslurm as a reader: the same answers as the commands give, without a process for each question.

pyslurm is GPL-2.0, so it is never bundled: users install it themselves, as the extra `slurm-ft[pyslurm]`, for
the release of Slurm that they have. Its import ends the whole process where Slurm has no configuration; so
`readers.choose` imports this module only after it has found that `squeue --version` answers and fits.

Where pyslurm loses something, the field is unknown rather than wrong: it takes 128 off an exit code of 128 and more.
"""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import pyslurm

from slurm_ft.slurm import hostlist, readers, rows
from slurm_ft.slurm.states import ExitCode, parse_state
from slurm_ft.slurm.units import NoTime
from slurm_ft.slurm.views import JobView, StepView, Unknown, Unreachable

UNKNOWN_JOB = "Invalid job id"


@dataclasses.dataclass(frozen=True)
class PyslurmReader:
    """Asks through pyslurm."""

    name: str = f"pyslurm {pyslurm.__version__}"

    def job(self, job_id: str) -> JobView | Unknown | Unreachable:
        try:
            if job_id.isdigit():
                return dataclasses.replace(_view(pyslurm.Job.load(int(job_id))), job_id=job_id)
            found = [_view(job) for job in pyslurm.Jobs.load().values()]
        except pyslurm.PyslurmError as error:
            return _failed(job_id, error)
        return readers.pick(job_id, found) or Unknown(job_id)

    def my_jobs(self) -> list[JobView] | Unreachable:
        try:
            return [_view(job) for job in pyslurm.Jobs.load().values() if job.user_id == os.getuid()]
        except pyslurm.PyslurmError as error:
            return Unreachable(str(error))

    def steps(self, job_id: str) -> list[StepView] | Unknown | Unreachable:
        if not job_id.isdigit():
            view = self.job(job_id)
            if not isinstance(view, JobView):
                return view
        try:
            number = int(job_id) if job_id.isdigit() else _number(job_id)
            steps = pyslurm.JobSteps.load(number)
        except pyslurm.PyslurmError as error:
            return _failed(job_id, error)
        named = ((f"{job_id}.{step.id}", step) for step in steps.values())
        return [StepView(name, str(step.name or ""), _hosts(step.allocated_nodes)) for name, step in named]


def _hosts(nodes: Any) -> str:
    """A step's hosts, which pyslurm expands and a job's not."""
    return hostlist.compress(nodes) if isinstance(nodes, list) else rows.hosts(str(nodes or ""))


def _number(job_id: str) -> int:
    """Slurm's own number of a task or a part."""
    return next(int(job.id) for job in pyslurm.Jobs.load().values() if _view(job).array_id == job_id)


def _failed(job_id: str, error: Exception) -> Unknown | Unreachable:
    return Unknown(job_id) if UNKNOWN_JOB in str(error) else Unreachable(str(error))


def _view(job: Any) -> JobView:
    field = parse_state(str(job.state))
    limit = _seconds(job.time_limit)
    left = limit
    if field.state.running and not isinstance(limit, NoTime):
        left = max(0, int(job.end_time or 0) - int(time.time()))
    return JobView(
        job_id=str(job.id),
        state=field,
        reason=str(job.state_reason or "None"),
        nodes=int(job.num_nodes or 0),
        nodelist=rows.hosts(str(job.allocated_nodes or "")),
        time_limit=limit,
        time_left=left,
        restarts=int(job.requeue_count or 0),
        requeue=bool(job.is_requeueable),
        exit_code=_exit_code(job),
        array_id=_array_id(job),
        name=_name(job),
    )


def _name(job: Any) -> str:
    try:
        return str(job.name or "")
    except UnicodeDecodeError:
        return ""


def _seconds(minutes: Any) -> int | NoTime:
    """pyslurm counts limits in minutes, and has None or a word for no limit."""
    return minutes * 60 if isinstance(minutes, int) else NoTime.UNLIMITED


def _exit_code(job: Any) -> ExitCode | None:
    code, signal = int(job.exit_code or 0), int(job.exit_code_signal or 0)
    return ExitCode(0, signal) if not code else None


def _array_id(job: Any) -> str:
    if job.array_id:
        # pyslurm has None for task 0, too.
        waiting = job.array_tasks_waiting
        return f"{job.array_id}_[{waiting}]" if waiting else f"{job.array_id}_{job.array_task_id or 0}"
    if job.heterogeneous_id:
        return f"{job.heterogeneous_id}+{job.heterogeneous_offset or 0}"
    return str(job.id)
