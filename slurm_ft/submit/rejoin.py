"""Following a run from one job into the next: after a time limit, into the next link or the requeued job.

The head that ends says where the run goes on, and the head that goes on takes that word away. Who has missed it sees
a session in the run's events that began after one that ended with 75.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from slurm_ft.controller import comeback
from slurm_ft.errors import EXIT_TRY_AGAIN, RunFolderError
from slurm_ft.events import Follower, Kind
from slurm_ft.paths import RunPaths, read_json

SAID_WITHIN = 30.0
"""Seconds within which the head of a run that ended with 75 says how it goes on: it asks Slurm first."""
POLL = 0.5


def goes_on_in(
    paths: RunPaths, job_id: str, ended: Callable[[], bool], wait: Callable[[float], None] = time.sleep
) -> tuple[str, str] | None:
    """The job in which the run goes on after this one, and how in words; None when nothing says that it does.
    `ended` says whether the job has left Slurm."""
    begun = _Begun(paths)
    for _ in range(round(SAID_WITHIN / POLL)):
        last = ended()
        if begun():
            return begun.job_id, comeback.goes_on(begun.job_id, job_id)
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


class _Begun:
    """Callable: has a session begun after one that ended with 75? `job_id` is the job of the last session."""

    def __init__(self, paths: RunPaths) -> None:
        self._events, self._ended_so, self._begun = Follower(paths.events), False, False
        self.job_id = ""

    def __call__(self) -> bool:
        for event in self._events.news():
            if event.kind is Kind.RUN_STARTED:
                self._begun, self.job_id = self._ended_so, str(event.data.get("job_id", ""))
            elif event.kind is Kind.RUN_ENDED:
                again = event.data["code"] == EXIT_TRY_AGAIN
                self._ended_so, self._begun = again, self._begun and not again
        return self._begun


def begun_again(paths: RunPaths, gone: Callable[[], bool], wait: Callable[[float], None] = time.sleep) -> bool:
    """Wait until the run is looked after again; False when its job is gone without that."""
    begun = _Begun(paths)
    while True:
        last = gone()
        if begun():
            return True
        if last:
            return False
        wait(POLL)
