"""Would the warning before the time limit reach us, or kill the shell above us?

`#SBATCH --signal=B:USR2@120` goes to the process of the batch script alone. With `exec slurm-ft run` that is
slurm-ft. Without it that is bash, which dies of the signal, and the job with it; a bash with a trap runs it only
when its child has ended, unless the child is in the background and bash waits for it with `wait`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

ADVICE = (
    "the time limit's warning (SIGUSR2) goes to the shell of this job's script, which would die of it: "
    "write `exec slurm-ft run ...` as its last line"
)


def warning_would_kill(surroundings: Mapping[str, str], proc: Path = Path("/proc"), parent: int | None = None) -> bool:
    """Is the process above us the job's batch script, and would it die of SIGUSR2?"""
    if "SLURM_JOB_ID" not in surroundings or "SLURM_STEP_ID" in surroundings:
        return False
    place = proc / str(os.getppid() if parent is None else parent)
    try:
        words = (place / "cmdline").read_bytes().split(b"\0")
        status = (place / "status").read_text()
    except OSError:
        return False
    # Slurm starts the script under this name; an `exec` keeps the process and not the name.
    if not any(word.endswith(b"/slurm_script") for word in words):
        return False
    return not any(_has(status, field, signal.SIGUSR2) for field in ("SigCgt", "SigIgn"))


def _has(status: str, field: str, number: int) -> bool:
    for line in status.splitlines():
        name, _, mask = line.partition(":")
        if name == field:
            return bool(int(mask, 16) >> (number - 1) & 1)
    return False
