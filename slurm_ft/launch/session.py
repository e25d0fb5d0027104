"""`session.json`: what a head on another host needs to know to go on, written once by a session's first head.

A session is one job's share of a run. Its first head finds the job in its surroundings (the batch step); a
head that takes over runs in a step of its own on another host, and its controller must not depend on what
Slurm says there.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from slurm_ft.errors import RunFolderError
from slurm_ft.launch.helper import Allocation
from slurm_ft.paths import RunPaths, read_json, write_json


@dataclass(frozen=True)
class Session:
    """`id` tells this session from others in the log; `hosts` are all hosts of the job."""

    id: str
    job_id: str
    hosts: tuple[str, ...]
    cpus_per_host: int = 1
    gpus_per_host: int = 0
    task: str = ""

    @property
    def allocation(self) -> Allocation:
        return Allocation(self.job_id, self.cpus_per_host, self.gpus_per_host, task=self.task)

    def write(self, paths: RunPaths) -> None:
        write_json(paths.session, dataclasses.asdict(self))

    @staticmethod
    def read(paths: RunPaths) -> Session:
        """Raises RunFolderError."""
        value = read_json(paths.session)
        try:
            return Session(**{**value, "hosts": tuple(value["hosts"])})
        except (KeyError, TypeError) as error:
            raise RunFolderError(f"`{paths.session}` cannot be read: {error}", "the file is damaged") from None
