"""Local runs: the head in the background, in a session of its own, so that it outlives the terminal.

python -m slurm_ft.submit.local_run RUN-DIR JOB-ID
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from slurm_ft.controller.head import look_after, open_run
from slurm_ft.errors import LaunchError, SlurmFTError
from slurm_ft.paths import RunPaths, read_json
from slurm_ft.spec import RunSpec
from slurm_ft.submit.place import local_place

STARTS_WITHIN = 30.0


def new_job_id(runs: Path, name: str) -> str:
    """A number for a run on this machine, as a job has one; no other folder has it."""
    number = os.getpid()
    while (runs / f"{name}-L{number}").exists():
        number += 1
    return f"L{number}"


def start(paths: RunPaths, spec: RunSpec, job_id: str) -> subprocess.Popen[bytes]:
    """Start the head of a local run in the background; returns when it has written its first event.

    Raises LaunchError, with the head's own words, when it ends before that.
    """
    open_run(paths, spec)
    size = paths.events.stat().st_size if paths.events.exists() else 0
    with open(paths.head_log, "ab") as log:
        before = log.tell()
        head = subprocess.Popen(
            [sys.executable, "-m", "slurm_ft.submit.local_run", str(paths.root), job_id],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    give_up = time.monotonic() + STARTS_WITHIN
    while not (paths.events.exists() and paths.events.stat().st_size > size):
        if head.poll() is not None or time.monotonic() > give_up:
            head.terminate()  # what comes up late must not run without anybody knowing
            head.wait()
            words = paths.head_log.read_text(errors="replace")[before:].strip()
            raise LaunchError(f"the run did not start: {words.removeprefix('error: ')}", f"see {paths.head_log}")
        time.sleep(0.02)
    return head


def main() -> None:
    paths = RunPaths(sys.argv[1])
    try:
        spec = RunSpec.from_json(read_json(paths.spec))
        sys.exit(look_after(paths, local_place(spec, sys.argv[2])))
    except SlurmFTError as error:
        error.show()
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
