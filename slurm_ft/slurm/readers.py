"""Who asks Slurm: its commands, or pyslurm where that is there and fits. One interface, the same answers.

    CommandReader   squeue as text; where a site's wrapper has made that unreadable, scontrol, then squeue --json
    PyslurmReader   pyslurm (in pyslurm_reader.py)

`choose` takes pyslurm only where it imports and was made for the release of Slurm that is installed, because
its layout of Slurm's structures is that of one release. It asks nobody over the network.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
import time
from typing import Protocol

from slurm_ft.slurm import json_rows, rows
from slurm_ft.slurm.commands import Answer, Commands
from slurm_ft.slurm.views import JobView, StepView, Unknown, Unreachable


class Reader(Protocol):
    """Asks Slurm. Each method asks once; nothing waits or repeats, and nothing raises."""

    @property
    def name(self) -> str:
        """Its name, for people."""
        ...

    def job(self, job_id: str) -> JobView | Unknown | Unreachable:
        """One job, also one that ended a short while ago; by a number, or as `7_1` or `8+0`."""
        ...

    def my_jobs(self) -> list[JobView] | Unreachable:
        """The jobs of this user that wait, run or have just ended, with their names."""
        ...

    def steps(self, job_id: str) -> list[StepView] | Unknown | Unreachable:
        """The steps of one job that Slurm lists now."""
        ...


@dataclasses.dataclass(frozen=True)
class CommandReader:
    """Asks by Slurm's own commands."""

    commands: Commands = dataclasses.field(default_factory=Commands)
    name: str = "commands"

    def job(self, job_id: str) -> JobView | Unknown | Unreachable:
        answer = self._squeue("--states=all", f"--jobs={job_id}", f"--Format={rows.JOB_FORMAT}")
        if isinstance(answer, Unreachable):
            return answer
        if answer.code:
            return Unknown(job_id) if answer.says_unknown else Unreachable(answer.said)
        found = rows.jobs(answer.out)
        if found is not None:
            if not found:
                return Unknown(job_id)
            return pick(job_id, found) or Unreachable(f"squeue's answer cannot be read: it has no row of job {job_id}")
        # A site's wrapper speaks in squeue's place: there are two other ways to ask the same.
        for ask in (self.by_scontrol, self.by_json):
            view = ask(job_id)
            if isinstance(view, JobView):
                return view
        return Unreachable(_unreadable("squeue", answer))

    def by_scontrol(self, job_id: str) -> JobView | Unknown | Unreachable:
        """The same from `scontrol show job`."""
        answer = self.commands.ask("scontrol", "--oneliner", "show", "job", job_id)
        if isinstance(answer, Unreachable):
            return answer
        if answer.code:
            return Unknown(job_id) if answer.says_unknown else Unreachable(answer.said)
        return _picked("scontrol", job_id, rows.scontrol(answer.out), answer)

    def by_json(self, job_id: str) -> JobView | Unknown | Unreachable:
        """The same from `squeue --json`, which before 23.11 lists all jobs whatever was asked for."""
        answer = self.commands.ask("squeue", "--json", "--states=all", f"--jobs={job_id}")
        if isinstance(answer, Unreachable):
            return answer
        if answer.code:
            return Unknown(job_id) if answer.says_unknown else Unreachable(answer.said)
        return _picked("squeue --json", job_id, json_rows.jobs(answer.out, time.time()), answer)

    def my_jobs(self) -> list[JobView] | Unreachable:
        answer = self._squeue("--states=all", "--me", f"--Format={rows.NAMED_FORMAT}")
        if isinstance(answer, Unreachable):
            return answer
        found = None if answer.code else rows.jobs(answer.out, named=True)
        return Unreachable(answer.said if answer.code else _unreadable("squeue", answer)) if found is None else found

    def steps(self, job_id: str) -> list[StepView] | Unknown | Unreachable:
        answer = self._squeue("--steps", f"--jobs={job_id}", f"--format={rows.STEP_FORMAT}")
        if isinstance(answer, Unreachable):
            return answer
        if answer.code:
            return Unknown(job_id) if answer.says_unknown else Unreachable(answer.said)
        found = rows.steps(answer.out)
        return Unreachable(_unreadable("squeue", answer)) if found is None else found

    def _squeue(self, *arguments: str) -> Answer | Unreachable:
        return self.commands.ask("squeue", "--noheader", *arguments)


def pick(job_id: str, found: list[JobView]) -> JobView | None:
    """The row of the job that was asked for, by its number or its id in an array or a heterogeneous job.

    In a federation two clusters may have a row for it: the one that gave it away says REVOKED.
    """
    rows_ = [view for view in found if job_id in (view.job_id, view.array_id)]
    # 8 is the number of 8+0 and the id of the whole, like 7 of 7_[1-3].
    rows_.sort(key=lambda view: (view.state.state.name == "REVOKED", view.job_id != job_id))
    return dataclasses.replace(rows_[0], job_id=job_id) if rows_ else None


def _picked(program: str, job_id: str, found: list[JobView] | None, answer: Answer) -> JobView | Unknown | Unreachable:
    if found is None:
        return Unreachable(_unreadable(program, answer))
    return pick(job_id, found) or Unknown(job_id)


def _unreadable(program: str, answer: Answer) -> str:
    line = next((line.strip() for line in answer.out.splitlines() if line.strip()), "nothing")
    return f"{program}'s answer cannot be read: {line[:200]!r}"


# --- which one ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Choice:
    """A reader and why it is this one, in a few words."""

    reader: Reader
    why: str


def choose(commands: Commands) -> Choice:
    """pyslurm if it imports and fits the installed Slurm, else the commands."""
    if commands.cluster:
        return Choice(CommandReader(commands), "pyslurm asks only the cluster it is on")
    reader, why = _pyslurm(commands)
    return Choice(reader or CommandReader(commands), why)


def _pyslurm(commands: Commands) -> tuple[Reader | None, str]:
    try:
        own = importlib.metadata.version("pyslurm")
    except importlib.metadata.PackageNotFoundError:
        return None, "pyslurm is not installed"
    here = version(commands.ask("squeue", "--version", clustered=False))
    if here is None:
        # Not even tried: the import of pyslurm ends the process where Slurm is not configured.
        return None, f"pyslurm {own} is installed, and Slurm's own version cannot be found out"
    if tuple(map(int, own.split(".")[:2])) != here:
        return None, "pyslurm {} does not fit Slurm {}.{:02d}".format(own, *here)
    try:
        from slurm_ft.slurm.pyslurm_reader import PyslurmReader
    except Exception as error:  # whatever a library that was built for another machine may do
        return None, f"pyslurm {own} cannot be imported: {error}"
    return PyslurmReader(), "it fits the Slurm here"


def version(answer: Answer | Unreachable) -> tuple[int, int] | None:
    """Slurm's release out of `--version`, such as (22, 5); None where nothing tells it."""
    out = "" if isinstance(answer, Unreachable) else answer.out
    match = re.search(r"slurm\S*\s+([0-9]+)\.([0-9]+)", out, re.IGNORECASE)
    return (int(match[1]), int(match[2])) if match else None
