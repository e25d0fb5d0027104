"""A head on another host: `python -m slurm_ft.submit.takeover --run-dir DIR --epoch N ...`.

An agent starts it in a step of its own, or without Slurm as a process of its own, after it has claimed the epoch
(slurm_ft/agent/successor.py). It goes on in the session that the first head began. Two things that the batch
script would have done are its own: Slurm's warning before the time limit goes to the batch script alone, so it
sets an alarm; and the job does not end with it, so it ends the job. A first head that was only stopped does
that by itself, with the run's exit code, so it is given a moment.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial

from slurm_ft.controller.comeback import come_back
from slurm_ft.controller.head import Place, give_back, govern
from slurm_ft.errors import SlurmFTError, TryAgain
from slurm_ft.launch.session import Session
from slurm_ft.lease import Deposed, Lease
from slurm_ft.paths import RunPaths, read_json
from slurm_ft.slurm.client import JobView, SlurmClient, Unreachable
from slurm_ft.spec import Policy, RunSpec
from slurm_ft.submit.slurm_job import warning_seconds

BATCH_ENDS_WITHIN = 4.0
ASK_AGAIN = 30.0


def time_until_warning(job_id: str, policy: Policy) -> float | None:
    """Seconds until the run must be warned of the job's time limit; None when there is none. Raises TryAgain when
    Slurm does not answer."""
    view = SlurmClient().job(job_id)
    if isinstance(view, Unreachable):
        raise TryAgain(f"Slurm does not say how much time job {job_id} has: {view.reason}")
    left = view.time_left if isinstance(view, JobView) else None
    return max(1.0, float(left - warning_seconds(policy))) if isinstance(left, int) else None


def end_job(job_id: str) -> None:
    """End the job, which outlives its batch script's host. Tries until Slurm answers."""
    time.sleep(BATCH_ENDS_WITHIN)
    while isinstance(answer := SlurmClient().cancel(job_id), Unreachable):
        print(f"slurm-ft: job {job_id} cannot be ended yet: {answer.reason}", file=sys.stderr, flush=True)
        time.sleep(ASK_AGAIN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--address", required=True, help="what the other hosts reach this one by")
    options = parser.parse_args()
    paths = RunPaths(options.run_dir)
    with open(paths.head_log, "ab") as log:  # srun's own pipes end with srun
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        sys.exit(_take_over(paths, options.epoch, options.host, options.address))
    except SlurmFTError as error:
        error.show()
        sys.exit(error.exit_code)


def _take_over(paths: RunPaths, epoch: int, host: str, address: str) -> int:
    lease = Lease.resume(paths.lease, epoch)
    spec, session = RunSpec.from_json(read_json(paths.spec)), Session.read(paths)
    local = spec.cluster == "local"
    place = Place(session.job_id, session.hosts, host, address)
    try:
        warn_in = partial(time_until_warning, session.allocation.ordered, spec.policy)
        code = govern(paths, spec, place, lease, (lambda: None) if local else warn_in)
    except Deposed:
        return 0
    give_back(paths, spec, lease, code)
    if not local:
        try:
            # A job whose batch host is dead cannot be put back, but a chain may have to be cancelled.
            if words := come_back(paths, session, code, may_requeue=False).words:
                print(f"slurm-ft: {words}", file=sys.stderr, flush=True)
        finally:
            end_job(session.allocation.ordered)
    return code


if __name__ == "__main__":
    main()
