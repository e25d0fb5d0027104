"""What a rank that has ended left in the run folder: its exception, or the end of its log."""

from __future__ import annotations

import json
import os
from pathlib import Path

from slurm_ft.paths import RunPaths

TAIL_BYTES = 4000


def read_error(path: Path) -> tuple[str, str]:
    """(message, traceback) from torch elastic's error file; empty when there is none."""
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return "", ""
    if not isinstance(message, dict):
        return str(message or ""), ""
    extra = message.get("extraInfo") or {}
    return str(message.get("message", "")), str(extra.get("py_callstack", ""))[-TAIL_BYTES:]


def tail(path: Path) -> str:
    """The end of a log, for a rank that left no traceback."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return "\n".join(file.read().decode("utf-8", errors="replace").splitlines()[-20:])
    except OSError:
        return ""


def left_by(paths: RunPaths, replica: int, attempt: int, rank: int) -> tuple[str, str]:
    """A rank's exception in one line, and its traceback; without one the end of its log."""
    message, traceback = read_error(paths.error(replica, attempt, rank))
    return message, traceback or tail(paths.rank_log(replica, attempt, rank))
