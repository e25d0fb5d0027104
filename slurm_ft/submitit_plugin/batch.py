"""The batch step of a submitit job: `python -m slurm_ft.submitit_plugin.batch FOLDER SPEC`.

Looks after the run as `slurm-ft run` does. At the end it hands in, for each task without a result, the outcome of
its last attempt or the run's last words, so that nobody waits for a result that will not come.

A job that has to end for its time limit or a preemption is put back into the queue when task 0 has written what
the next session is to begin with: that is submitit's checkpoint. A task that says it has had its time (submitit's
`max_num_timeout`, or a function that cannot be checkpointed) ends the job.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

from submitit.core.utils import JobPaths, cloudpickle_dump, temporary_save_path

from slurm_ft.controller.comeback import come_back
from slurm_ft.controller.head import look_after, open_run
from slurm_ft.errors import EXIT_FAILED, EXIT_TRY_AGAIN, SlurmFTError
from slurm_ft.launch.session import Session
from slurm_ft.observe.last_words import last_words
from slurm_ft.paths import RunPaths
from slurm_ft.spec import RunSpec
from slurm_ft.submit.place import allocation_place
from slurm_ft.submitit_plugin.environment import unfinished

NOT_AGAIN = "Job not requeued because"
"""submitit's words, in the error that its signal handler raises."""


def run_folder(folder: str | Path, job_id: str) -> Path:
    """The run folder of a job."""
    return Path(folder) / f"{job_id}_run"


def main() -> None:
    folder, spec = sys.argv[1], RunSpec.from_json(json.loads(sys.argv[2]))
    job_id = os.environ["SLURM_JOB_ID"]
    paths = RunPaths(run_folder(folder, job_id))
    try:
        place = allocation_place(os.environ)
        open_run(paths, spec)
        code = look_after(paths, place)
        words = "\n".join(last_words(paths, code))
        if code == EXIT_TRY_AGAIN:
            code = _come_back(paths, folder)
    except SlurmFTError as error:
        error.show()
        code, words = error.exit_code, error.message
    print(words, file=sys.stderr)
    if code != EXIT_TRY_AGAIN:
        hand_in(folder, job_id, spec.replicas * spec.replica.ranks, words)
    sys.exit(code)


def _come_back(paths: RunPaths, folder: str) -> int:
    """Put the job back into the queue, unless task 0 has said why not: then the run has failed."""
    session = Session.read(paths)
    if _has_had_its_time(unfinished(JobPaths(folder, job_id=session.job_id, task_id=0).result_pickle)):
        return EXIT_FAILED
    # submitit itself bounds how often a job comes back; its functions report no steps.
    done = come_back(paths, session, EXIT_TRY_AGAIN, True, idle=True)
    print(f"slurm-ft: {done.words}", file=sys.stderr, flush=True)
    return EXIT_TRY_AGAIN if done.next else EXIT_FAILED


def _has_had_its_time(outcome: Path) -> bool:
    """Does the outcome of an attempt say so? That of one which raised an exception may be there too."""
    try:
        kind, text = pickle.loads(outcome.read_bytes())
    except Exception:  # there is none, or it is of a class that is not known here
        return False
    return kind == "error" and NOT_AGAIN in text


def hand_in(folder: str | Path, job_id: str, tasks: int, words: str) -> None:
    """Give every task that has none a result: that of its last attempt, else an error with these words."""
    for task in range(tasks):
        final = JobPaths(folder, job_id=job_id, task_id=task).result_pickle
        if final.exists():
            continue
        last = unfinished(final)
        if last.exists():
            os.replace(last, final)
            continue
        with temporary_save_path(final) as path:
            cloudpickle_dump(("error", words or "its peers finished the training without it"), path)


if __name__ == "__main__":
    main()
