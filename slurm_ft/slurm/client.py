"""One polite client of Slurm: each method asks or orders once; nothing waits or repeats.

A question to Slurm has three answers, and they are three types:

    JobView       Slurm knows the job, and this is what it says
    Unknown       Slurm answered, and does not know it (any more: it forgets a job minutes after its end)
    Unreachable   there was no answer that can be read; it says nothing about the job, so change nothing

Questions go through a reader (readers.py): Slurm's commands, or pyslurm. Orders and accounting go through the commands.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from signal import Signals

from slurm_ft.errors import LaunchError, UsageError
from slurm_ft.slurm import json_rows, rows
from slurm_ft.slurm.commands import TIMEOUT, Commands, Run, command_environment
from slurm_ft.slurm.readers import CommandReader, Reader, choose, version
from slurm_ft.slurm.views import AccountRow, Done, JobView, NoAccounting, StepView, Unknown, Unreachable

__all__ = [
    "AccountRow",
    "Done",
    "JobView",
    "NoAccounting",
    "SlurmClient",
    "StepView",
    "Submitted",
    "Unknown",
    "Unreachable",
    "cluster_of",
    "command_environment",
    "read_submission",
]

_JOB_ID = re.compile(r"[0-9]+(?:[_+][0-9]+)?")
_NOT_INSTALLED = "is Slurm's client software on PATH? `module load slurm` on some sites"
_NO_ACCOUNTING = re.compile(r"accounting storage is disabled|not running a supported accounting", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Submitted:
    """What sbatch answered. `cluster` is empty on sites with one cluster; else give it to the client."""

    job_id: str
    cluster: str = ""


class SlurmClient:
    """Asks and orders. `run` is called as `subprocess.run` is.

    `cluster` goes to every command, on sites with several. The commands' environment is made from `environ`.
    """

    def __init__(
        self,
        run: Run = subprocess.run,
        *,
        cluster: str = "",
        environ: Mapping[str, str] = os.environ,
        timeout: float = TIMEOUT,
        reader: Reader | None = None,
    ) -> None:
        self._commands = Commands(run, cluster, environ, timeout)
        self._reader = reader

    @property
    def reader(self) -> Reader:
        """Who asks; chosen at the first question."""
        if self._reader is None:
            real = self._commands.run is subprocess.run
            self._reader = choose(self._commands).reader if real else CommandReader(self._commands)
        return self._reader

    def job(self, job_id: int | str) -> JobView | Unknown | Unreachable:
        """Ask for one job, also one that ended a short while ago. Raises UsageError if the id is not an id."""
        return self.reader.job(_checked_id(job_id))

    def with_base(self, view: JobView) -> JobView:
        """The same job with the state that it is COMPLETING after. Slurm's text does not say it; --json does from 23.11
        on. Where it is not said the view is given back."""
        if view.state.state.name != "COMPLETING" or view.state.base is not None:
            return view
        other = CommandReader(self._commands).by_json(view.job_id)
        return other if isinstance(other, JobView) else view

    def my_jobs(self) -> list[JobView] | Unreachable:
        """Ask for all jobs of this user, with their names."""
        return self.reader.my_jobs()

    def steps(self, job_id: int | str) -> list[StepView] | Unknown | Unreachable:
        """Ask for the steps of a job that Slurm lists now; a dead host's are listed for long.

        Raises UsageError if the id is not an id.
        """
        return self.reader.steps(_checked_id(job_id))

    def account(self, job_id: int | str) -> list[AccountRow] | NoAccounting | Unreachable:
        """Ask the accounting for a job and its steps, all its times in the queue. Raises UsageError as `job` does.

        An empty list: the accounting knows nothing of it, which may change within seconds.
        """
        name = _checked_id(job_id)
        asked = ("--duplicates", f"--jobs={name}")
        form = (f"--delimiter={rows.SEPARATOR}", f"--format={','.join(rows.ACCOUNT_FIELDS)}")
        answer = self._commands.ask("sacct", *asked, "--noheader", "--parsable", *form, extra=rows.TIME_FORMAT)
        if isinstance(answer, Unreachable):
            return answer
        if answer.code:
            return NoAccounting(answer.said) if _NO_ACCOUNTING.search(answer.err) else Unreachable(answer.said)
        found = rows.account(answer.out)
        if found is not None:
            return found
        answer = self._commands.ask("sacct", *asked, "--json")
        found = json_rows.account("" if isinstance(answer, Unreachable) else answer.out)
        return Unreachable("sacct's answer cannot be read") if found is None else found

    def hosts_of_job(self, job_id: int | str) -> tuple[str, ...] | Unknown | Unreachable:
        """Ask for a job's hosts, in Slurm's order; none while it waits. Raises as `job` and `JobView.hosts` do."""
        view = self.job(job_id)
        return view.hosts if isinstance(view, JobView) else view

    def cancel(self, job_id: int | str) -> Done | Unknown | Unreachable:
        """Cancel a job. One that is already ending is done. Raises UsageError if Slurm does not allow it."""
        name = _checked_id(job_id)
        # Without --verbose, scancel is silent about a job that it does not know, and exits 0.
        return self._order(f"cancel job {name}", name, "scancel", "--verbose", name)

    def requeue(self, job_id: int | str) -> Done | Unknown | Unreachable:
        """Put a running job back into the queue; Slurm ends it. Raises UsageError if Slurm does not allow it."""
        name = _checked_id(job_id)
        answer = self._commands.ask("scontrol", "requeue", name)
        if isinstance(answer, Unreachable):
            return answer
        if not answer.code:
            return Done()
        if re.search("permission denied", answer.err, re.IGNORECASE):
            raise UsageError(f"Slurm does not allow you to requeue job {name}.", "its owner can")
        return Unknown(name) if answer.says_unknown else Unreachable(answer.said)

    def signal_step(self, job_id: int | str, step_id: int, signal: Signals) -> Done | Unknown | Unreachable:
        """Send a signal to all processes of one step. Raises UsageError if Slurm does not allow it.

        Done says only that the job is there: scancel 22.05 is silent about a step that a running job does not have.
        """
        name = f"{_checked_id(job_id)}.{step_id:d}"
        word = signal.name.removeprefix("SIG")
        return self._order(f"signal step {name}", name, "scancel", f"--signal={word}", name)

    def version(self) -> tuple[int, int]:
        """Give Slurm's major and minor version, such as (22, 5). Raises LaunchError if nothing tells it."""
        answer = self._commands.ask("squeue", "--version", clustered=False)
        found = version(answer)
        if found is None:
            said = answer.reason if isinstance(answer, Unreachable) else answer.said
            raise LaunchError(f"Slurm's version could not be found out: {said}.", _NOT_INSTALLED)
        return found

    def _order(self, what: str, name: str, *argv: str) -> Done | Unknown | Unreachable:
        answer = self._commands.ask(*argv)
        if isinstance(answer, Unreachable):
            return answer
        if re.search("permission denied", answer.err, re.IGNORECASE):
            raise UsageError(
                f"Slurm does not allow you to {what}.", "its owner and the administrators of the cluster can"
            )
        if answer.says_unknown and _names(name, answer.err):
            return Unknown(name)
        # For a step on some of its job's hosts, scancel 22.05 delivers the signal and then complains of the other
        # hosts, naming the job and not the step, with exit code 225.
        delivered = not answer.code or answer.says_unknown
        return Done() if delivered else Unreachable(answer.said)


def read_submission(text: str) -> Submitted:
    """Read the answer of sbatch: `812345`, `812345;cluster`, or its sentence, with other lines around it.

    Raises LaunchError that shows the answer if there is no job id in it.
    """
    for line in reversed(text.splitlines()):
        match = re.fullmatch(r"([0-9]+)(?:;(\S+))?", line.strip()) or re.fullmatch(
            r"Submitted batch job ([0-9]+)(?: on cluster (\S+))?", line.strip()
        )
        if match:
            return Submitted(match[1], match[2] or "")
    raise LaunchError(
        f"sbatch gave no job id; its answer was {text.strip()!r}.",
        "look for the job with `squeue --me` before you submit again",
    )


def cluster_of(environ: Mapping[str, str], options: Sequence[str] = ()) -> str:
    """The cluster that a person asks for on a site with several: by sbatch's --clusters or -M, else by a variable.
    Of a job that we submitted sbatch says where it is (`read_submission`), whatever has chosen the cluster.

    It may be several, with commas; Slurm's commands look in all of them.
    """
    words = [word for option in options for word in option.split()]
    for word, after in itertools.pairwise([*words, ""]):
        if match := re.fullmatch(r"(?:--clusters?=|-M=?)(.+)", word):
            return match[1].strip("'\"")
        if word in ("--clusters", "--cluster", "-M"):
            return after.strip("'\"")
    return environ.get("SLURM_CLUSTERS") or environ.get("SBATCH_CLUSTERS", "")


def _checked_id(job_id: int | str) -> str:
    name = str(job_id)
    if not _JOB_ID.fullmatch(name):
        raise UsageError(f"{name!r} is not a Slurm job id.", "a job id is a number; a task of an array is 123_4")
    return name


def _names(name: str, text: str) -> bool:
    """Whether text names this job or step, and not one whose id only begins or ends in the same way."""
    return re.search(rf"(?<![0-9.]){re.escape(name)}(?![0-9.])", text) is not None
