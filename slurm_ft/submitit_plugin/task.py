"""One rank of a submitit job: `python -m slurm_ft.submitit_plugin.task FOLDER`.

submitit writes a task's outcome when the function returns or raises. An exception is not final here: the rank is
started again. So the outcome goes under a name of its own, and is handed in only when it is a success; what is
left at the end of the run, batch.py hands in.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from submitit.core.submission import process_job
from submitit.core.utils import JobPaths

from slurm_ft import env
from slurm_ft.submitit_plugin.environment import SlurmFTJobEnvironment


def main() -> None:
    folder = sys.argv[1]
    os.environ["SUBMITIT_FOLDER"] = folder
    here = SlurmFTJobEnvironment()
    final = JobPaths(folder, job_id=here.job_id, task_id=here.global_rank)
    _link_log(final.stdout)
    here.paths.result_pickle.unlink(missing_ok=True)  # of an attempt before this one
    process_job(folder)
    os.replace(here.paths.result_pickle, final.result_pickle)


def _link_log(name: Path) -> None:
    """Let `job.stdout()` find this attempt's log."""
    rank = os.environ
    log = Path(rank[env.RUN], "replicas", rank[env.REPLICA], f"attempt_{rank[env.ATTEMPT]}", f"{rank['RANK']}.log")
    beside = name.with_name(f".{name.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        beside.symlink_to(log)
        os.replace(beside, name)


if __name__ == "__main__":
    main()
