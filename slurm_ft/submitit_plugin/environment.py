"""What a task of a self-repairing job sees through `submitit.JobEnvironment`."""

from __future__ import annotations

import os
from pathlib import Path

from submitit.core.logger import get_logger
from submitit.core.utils import JobPaths
from submitit.slurm.slurm import SlurmJobEnvironment

from slurm_ft import env

NAME = "slurm_ft"


class UnfinishedPaths(JobPaths):  # type: ignore[misc]  # submitit's types are not read here
    """A task's files, with the result under a name of the attempt: what an attempt leaves is no result yet."""

    @property
    def result_pickle(self) -> Path:
        return unfinished(super().result_pickle)


def unfinished(result: Path) -> Path:
    """Where a task puts the outcome of an attempt, until it is known to be final."""
    return result.with_name(f"{result.name}.attempt")


class SlurmFTJobEnvironment(SlurmJobEnvironment):  # type: ignore[misc]
    """Tasks are counted through all replicas: task = replica x ranks + rank."""

    @classmethod
    def name(cls) -> str:
        return NAME

    @property
    def paths(self) -> JobPaths:
        return UnfinishedPaths(os.environ["SUBMITIT_FOLDER"], job_id=self.job_id, task_id=self.global_rank)

    @property
    def num_tasks(self) -> int:
        return _number(env.NUM_REPLICA_GROUPS) * _number("WORLD_SIZE")

    @property
    def num_nodes(self) -> int:
        return self.num_tasks // _number("LOCAL_WORLD_SIZE")

    @property
    def node(self) -> int:
        return self.global_rank // _number("LOCAL_WORLD_SIZE")

    @property
    def global_rank(self) -> int:
        return _number(env.REPLICA_GROUP_ID, 0) * _number("WORLD_SIZE") + _number("RANK", 0)

    @property
    def local_rank(self) -> int:
        return _number("LOCAL_RANK", 0)

    def _requeue(self, countdown: int) -> None:
        """The controller, which sent the signal, requeues the job."""
        get_logger().info(f"slurm-ft requeues the job ({countdown} remaining timeouts)")


def _number(name: str, default: int = 1) -> int:
    return int(os.environ.get(name) or default)
