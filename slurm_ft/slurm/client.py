"""One polite client of Slurm's command line: each method runs one command once; nothing waits or repeats.

A question to Slurm has three answers, and they are three types:

    JobView       Slurm knows the job, and this is what it says
    Unknown       Slurm answered, and does not know it (any more: it forgets a job minutes after its end)
    Unreachable   there was no answer that can be read; it says nothing about the job, so change nothing

Commands run with LC_ALL=C and without the variables that change what they print or whom they ask; SLURM_CONF
is kept, and SLURM_JWT, which is a credential. Answers are decoded with replacement, because Slurm passes
bytes through as they are. Only the fields that are needed are asked for, and none of them is free text.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from signal import Signals

from slurm_ft.errors import HostlistError, LaunchError, UsageError
from slurm_ft.slurm import hostlist, units
from slurm_ft.slurm.states import ExitCode, StateField, parse_exit_code, parse_state

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]

TIMEOUT = 30.0
"""Seconds for one command. A squeue that cannot reach slurmctld gives up by itself after about 20."""

_FIELDS = (
    "jobid",
    "jobarrayid",
    "state",
    "reason",
    "numnodes",
    "nodelist",
    "timelimit",
    "timeleft",
    "restartcnt",
    "requeue",
    "exit_code",
)
# A colon with no width means: do not cut. The bar ends each field, the last one too.
_FORMAT = ",".join(f"{field}:|" for field in _FIELDS)
_JOB_ID = re.compile(r"[0-9]+(?:[_+][0-9]+)?")
_KEPT = {"SLURM_CONF", "SLURM_JWT"}
_STRAY = re.compile(r"(?:SLURM|SQUEUE|SCANCEL|SCONTROL|SACCT|SINFO|SBATCH|SRUN|SALLOC)_")
_NOT_INSTALLED = "is Slurm's client software on PATH? `module load slurm` on some sites"


@dataclasses.dataclass(frozen=True)
class JobView:
    """What Slurm says of a job. Times are seconds; `nodelist` is empty while the job waits.

    `restarts` counts how often it was put back into the queue; `requeue` says whether that may happen.
    """

    job_id: str
    state: StateField
    reason: str
    nodes: int
    nodelist: str
    time_limit: int | units.NoTime
    time_left: int | units.NoTime
    restarts: int
    requeue: bool
    exit_code: ExitCode | None

    @property
    def hosts(self) -> tuple[str, ...]:
        """The job's hosts in Slurm's order.

        Raises HostlistError if the job runs and the list does not hold as many as Slurm counts: launch nothing then.
        """
        hosts = tuple(hostlist.expand(self.nodelist))
        if self.state.state.running and len(hosts) != self.nodes:
            raise HostlistError(
                f"Job {self.job_id} has {self.nodes} hosts by Slurm's count, but {len(hosts)} in {self.nodelist!r}.",
                "ask again: the job may be changing its size",
            )
        return hosts


@dataclasses.dataclass(frozen=True)
class Done:
    """Slurm took the order."""


@dataclasses.dataclass(frozen=True)
class Unknown:
    """Slurm does not know this job or step. It may be long over, or never have been there."""

    id: str


@dataclasses.dataclass(frozen=True)
class Unreachable:
    """No answer that can be read. `reason` is what the command said."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Submitted:
    """What sbatch answered. `cluster` is empty on sites with one cluster; else give it to the client."""

    job_id: str
    cluster: str = ""


@dataclasses.dataclass(frozen=True)
class _Answer:
    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """The line that says best what went wrong, for a person: the fatal one, else the first error."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        for sign in ("fatal: ", "error: ", ""):
            for line in lines:
                if sign in line:
                    return line
        return f"exit code {self.code} and no words"


class SlurmClient:
    """Asks and orders through squeue and scancel. `run` is called as `subprocess.run` is.

    `cluster` goes to every command, on sites with several. The commands' environment is made from `environ`.
    """

    def __init__(
        self,
        run: Run = subprocess.run,
        *,
        cluster: str = "",
        environ: Mapping[str, str] = os.environ,
        timeout: float = TIMEOUT,
    ) -> None:
        self._run = run
        self._cluster = cluster
        self._environ = environ
        self._timeout = timeout

    def job(self, job_id: int | str) -> JobView | Unknown | Unreachable:
        """Ask for one job, also one that ended a short while ago. Raises UsageError if the id is not an id."""
        name = _checked_id(job_id)
        answer = self._ask("squeue", "--noheader", "--states=all", f"--jobs={name}", f"--Format={_FORMAT}")
        if isinstance(answer, Unreachable):
            return answer
        if answer.code:
            return Unknown(name) if _says_unknown(answer) else Unreachable(answer.said)
        return _job_view(name, answer.out)

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
        answer = self._ask("scontrol", "requeue", name)
        if isinstance(answer, Unreachable) or not answer.code:
            return Done() if not isinstance(answer, Unreachable) else answer
        if re.search("permission denied", answer.err, re.IGNORECASE):
            raise UsageError(f"Slurm does not allow you to requeue job {name}.", "its owner can")
        return Unknown(name) if _says_unknown(answer) else Unreachable(answer.said)

    def signal_step(self, job_id: int | str, step_id: int, signal: Signals) -> Done | Unknown | Unreachable:
        """Send a signal to all processes of one step. Raises UsageError if Slurm does not allow it.

        Done says only that the job is there: scancel 22.05 is silent about a step that a running job does not have.
        """
        name = f"{_checked_id(job_id)}.{step_id:d}"
        word = signal.name.removeprefix("SIG")
        return self._order(f"signal step {name}", name, "scancel", f"--signal={word}", name)

    def version(self) -> tuple[int, int]:
        """Give Slurm's major and minor version, such as (22, 5). Raises LaunchError if nothing tells it."""
        answer = self._ask("squeue", "--version", clustered=False)
        if isinstance(answer, Unreachable):
            raise LaunchError(f"Slurm's version could not be found out: {answer.reason}.", _NOT_INSTALLED)
        match = re.search(r"slurm\S*\s+([0-9]+)\.([0-9]+)", answer.out, re.IGNORECASE)
        if match is None:
            raise LaunchError(f"Slurm's version could not be found out: {answer.said}.", _NOT_INSTALLED)
        return int(match[1]), int(match[2])

    def _ask(self, program: str, *arguments: str, clustered: bool = True) -> _Answer | Unreachable:
        """Run one command; what it did not live to say is Unreachable."""
        cluster = [f"--clusters={self._cluster}"] if clustered and self._cluster else []
        try:
            done = self._run(
                [program, *cluster, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env=command_environment(self._environ),
                timeout=self._timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Unreachable(f"{program} gave no answer in {self._timeout:g} s")
        except OSError as error:
            return Unreachable(f"{program} could not be run: {error.strerror or error}")
        return _Answer(done.returncode, _decoded(done.stdout), _decoded(done.stderr))

    def _order(self, what: str, name: str, *argv: str) -> Done | Unknown | Unreachable:
        answer = self._ask(*argv)
        if isinstance(answer, Unreachable):
            return answer
        if re.search("permission denied", answer.err, re.IGNORECASE):
            raise UsageError(
                f"Slurm does not allow you to {what}.", "its owner and the administrators of the cluster can"
            )
        if _says_unknown(answer) and _names(name, answer.err):
            return Unknown(name)
        # For a step on some of its job's hosts, scancel 22.05 delivers the signal and then complains of the other
        # hosts, naming the job and not the step, with exit code 225.
        delivered = not answer.code or _says_unknown(answer)
        return Done() if delivered else Unreachable(answer.said)


def command_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Give the environment for Slurm's commands: a known locale, nothing that changes what they print or ask."""
    kept = {name: value for name, value in environ.items() if name in _KEPT or not _STRAY.match(name)}
    return kept | {"LC_ALL": "C"}


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


def _checked_id(job_id: int | str) -> str:
    name = str(job_id)
    if not _JOB_ID.fullmatch(name):
        raise UsageError(f"{name!r} is not a Slurm job id.", "a job id is a number; a task of an array is 123_4")
    return name


def _decoded(text: bytes | None) -> str:
    return (text or b"").decode("utf-8", "replace")


def _says_unknown(answer: _Answer) -> bool:
    return "invalid job id" in answer.err.lower()


def _names(name: str, text: str) -> bool:
    """Whether text names this job or step, and not one whose id only begins or ends in the same way."""
    return re.search(rf"(?<![0-9.]){re.escape(name)}(?![0-9.])", text) is not None


def _job_view(name: str, out: str) -> JobView | Unknown | Unreachable:
    """Find the job's row. An array or a heterogeneous job has several, and one of them bears the id asked
    for.
    """
    lines = [line for line in out.splitlines() if line.strip() and not line.startswith("CLUSTER:")]
    if not lines:
        return Unknown(name)
    for line in lines:
        fields = [field.strip() for field in line.split("|")]
        if len(fields) == len(_FIELDS) + 1 and name in fields[:2]:
            return _parsed(name, dict(zip(_FIELDS, fields, strict=False))) or Unreachable(_unreadable(line))
    return Unreachable(_unreadable(lines[0]))


def _unreadable(line: str) -> str:
    return f"squeue's answer cannot be read: {line.strip()[:200]!r}"


def _parsed(name: str, row: Mapping[str, str]) -> JobView | None:
    try:
        nodes, restarts = _count(row["numnodes"]), int(row["restartcnt"])
    except ValueError:
        return None
    return JobView(
        job_id=name,
        state=parse_state(row["state"]),
        reason=row["reason"],
        nodes=nodes,
        nodelist="" if row["nodelist"] == "(null)" else row["nodelist"],
        time_limit=units.read_time(row["timelimit"]),
        time_left=units.read_time(row["timeleft"]),
        restarts=restarts,
        requeue=row["requeue"] == "1",
        exit_code=parse_exit_code(row["exit_code"]),
    )


def _count(text: str) -> int:
    """Read a number of nodes: the least of a range, and 2K for 2048, as squeue writes round numbers."""
    number = text.split("-")[0]
    return int(number[:-1]) * 1024 if number.endswith("K") else int(number)
