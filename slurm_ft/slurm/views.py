"""What Slurm says of a job, a step or a row of its accounting, whatever it was asked with.

JobView, StepView, AccountRow     Slurm knows it, and this is what it says
Unknown                           Slurm answered, and does not know it (any more)
Unreachable                       there was no answer that can be read; it says nothing, so change nothing
"""

from __future__ import annotations

import dataclasses

from slurm_ft.errors import HostlistError
from slurm_ft.slurm import hostlist
from slurm_ft.slurm.states import ExitCode, StateField
from slurm_ft.slurm.units import NoTime


@dataclasses.dataclass(frozen=True)
class JobView:
    """What Slurm says of a job. Times are seconds; `nodelist` is empty while the job waits.

    `job_id` is the id asked for, or Slurm's own number. `array_id` is the id by which a task of an array or a part
    of a heterogeneous job is known (`7_1`, `8+0`), else the same as `job_id`. `restarts` counts how often it was put
    back into the queue; `requeue` says whether that may happen.
    """

    job_id: str
    state: StateField
    reason: str
    nodes: int
    nodelist: str
    time_limit: int | NoTime
    time_left: int | NoTime
    restarts: int
    requeue: bool
    exit_code: ExitCode | None
    array_id: str = ""
    name: str = ""

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
class StepView:
    """A step that Slurm lists: its id (`12.3`, `12.batch`), its name, and its hosts as a hostlist."""

    step_id: str
    name: str
    nodelist: str


@dataclasses.dataclass(frozen=True)
class AccountRow:
    """One row of the accounting: a job (`step` is empty) or one of its steps.

    `start` and `end` are seconds since 1970, None where there is none yet. `derived` is the highest exit code of a
    job's steps, as Slurm computes it; steps have none. `memory` is the most that one task of a step had resident, in
    MiB; None where it was not measured. A job that was put back into the queue has several rows.
    """

    job_id: str
    step: str
    name: str
    state: StateField
    exit_code: ExitCode | None
    derived: ExitCode | None
    nodes: int
    nodelist: str
    start: float | None
    end: float | None
    elapsed: int
    memory: int | None = None
    cluster: str = ""

    @property
    def id(self) -> str:
        return f"{self.job_id}.{self.step}" if self.step else self.job_id


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
class NoAccounting:
    """This cluster keeps no accounting, or nothing of it can be read. `reason` is what sacct said."""

    reason: str
