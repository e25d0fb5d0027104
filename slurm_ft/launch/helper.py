"""Small steps beside the replicas' own: one task a host, which looks at something, prints it and ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurm_ft.slurm.hostlist import compress


@dataclass(frozen=True)
class Allocation:
    """What a step asks for on each host: all that the job has there. `options` are the site's own, and come last.
    `task` is how Slurm calls the job where it is a task of an array (`100_1`): its number may be that of the whole
    array, and an order to that would reach all tasks."""

    job_id: str
    cpus_per_host: int
    gpus_per_host: int = 0
    options: tuple[str, ...] = ()
    task: str = ""

    @property
    def ordered(self) -> str:
        """What orders and questions to Slurm call the job."""
        return self.task or self.job_id


MINUTES = 1
"""Slurm's own limit on such a step, in case that whoever waits for it is gone."""


def helper_argv(allocation: Allocation, hosts: Sequence[str], name: str, argv: Sequence[str]) -> list[str]:
    """The srun command line. It shares the CPUs and sees the GPUs of the replicas' steps. Pure."""
    return [
        "srun",
        f"--jobid={allocation.job_id}",
        f"--job-name={name}",
        f"--nodelist={compress(hosts)}",
        f"--nodes={len(hosts)}",
        f"--ntasks={len(hosts)}",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        "--mem=0",
        *([f"--gres=gpu:{allocation.gpus_per_host}"] if allocation.gpus_per_host else []),
        f"--time={MINUTES}",
        "--overlap",
        "--cpu-bind=none",
        "--mpi=none",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--input=none",
        "--export=ALL",
        *argv,
    ]
