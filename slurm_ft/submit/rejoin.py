"""Following a run from one job into the next: after a time limit, into the next link or the requeued job."""

from __future__ import annotations

import time
from collections.abc import Callable

from slurm_ft.errors import RunFolderError
from slurm_ft.observe.runs import Over
from slurm_ft.paths import RunPaths, read_json

SAID_WITHIN = 30.0
"""Seconds within which the head of a run that ended with 75 says how it goes on: it asks Slurm first."""
POLL = 0.5


def goes_on_in(
    paths: RunPaths, job_id: str, ended: Callable[[], bool], wait: Callable[[float], None] = time.sleep
) -> tuple[str, str] | None:
    """The job in which the run goes on after this one, and how in words; None when nothing says that it does.
    `ended` says whether the job has left Slurm."""
    for _ in range(round(SAID_WITHIN / POLL)):
        last = ended()
        try:
            said = read_json(paths.again)
            if said.get("after") == job_id:
                return str(said["job_id"]), str(said["how"])
        except (RunFolderError, KeyError):
            pass
        if last:
            return None
        wait(POLL)
    return None


def begun_again(paths: RunPaths, gone: Callable[[], bool], wait: Callable[[float], None] = time.sleep) -> bool:
    """Wait until the run is looked after again; False when its job is gone without that."""
    over = Over(paths)
    while True:
        last = gone()
        if not over():
            return True
        if last:
            return False
        wait(POLL)
