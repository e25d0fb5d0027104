"""torchft's own way on Slurm, for the recovery benchmark: a job per replica, and a loop that submits again.

    python slurm_runner.py FOLDER        (FOLDER/task.json: how many replicas, and the trainer's command)

Asks squeue what is there and submits what is missing. The interval is the shortest that a cluster of one
user bears; a shared one is asked every 5 to 10 s.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

INTERVAL = 0.2
START = "BENCH_START"
"""As trainer.py reads it; this process imports no torch."""


def submit(replica: int, task: dict[str, object], folder: Path, start: int = 1) -> str:
    """One job, the replica's `start`th; gives its id."""
    trainer = task["trainer"]
    assert isinstance(trainer, list)
    script = f"#!/bin/bash\nexport REPLICA_GROUP_ID={replica} NUM_REPLICA_GROUPS={task['replicas']} {START}={start}\n"
    script += f"exec {shlex.join([sys.executable, *map(str, trainer)])}\n"
    options = ["--parsable", "--no-requeue", "-N1", "-n1", "--mem=1", f"--output={folder}/job-%j.log"]
    done = subprocess.run(["sbatch", *options], input=script, text=True, capture_output=True, check=True)
    return done.stdout.strip()


def alive() -> set[str]:
    """Ids of the jobs that wait or run."""
    argv = ["squeue", "--noheader", "--format=%i", "--states=PENDING,RUNNING,CONFIGURING"]
    return set(subprocess.run(argv, text=True, capture_output=True, check=True).stdout.split())


def ended(folder: Path) -> set[int]:
    """Replicas that have trained all steps."""
    try:
        lines = (folder / "log").read_text().splitlines()
    except FileNotFoundError:
        return set()
    return {json.loads(line)["replica"] for line in lines if '"end"' in line}


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    folder = Path(sys.argv[1])
    task = json.loads((folder / "task.json").read_text())
    jobs = {replica: submit(replica, task, folder) for replica in range(task["replicas"])}
    starts = dict.fromkeys(jobs, 1)
    try:
        while not ended(folder):
            time.sleep(INTERVAL)
            there = alive()
            for replica, job in jobs.items():
                if job not in there and not ended(folder):
                    print(f"detected replica {replica}: job {job} is gone", flush=True)
                    starts[replica] += 1
                    jobs[replica] = submit(replica, task, folder, starts[replica])
        time.sleep(2)  # the others end within a step or two
    finally:
        subprocess.run(["scancel", "--full", *jobs.values()], env=os.environ, check=False)


if __name__ == "__main__":
    main()
