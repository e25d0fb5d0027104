"""Saves of `titan` on request: what a peer would heal from, written to disk, and read again when a run comes back.

    <run>/titan/saves/step-<n>/rank-<r>.pt      the shards of one rank, with what torchft counts

Only the replica that comes first in the quorum writes, right after a committed synchronisation, when replicas
are equal; all replicas load it. A folder is whole when the controller says so in the run's `saved.json`, after
every rank has answered; one that was begun and never finished is not looked at (RW-57). No collective and no
copy is needed, so ranks of one replica need not write at the same moment. The shards are those of this layout:
another number of ranks a replica cannot read them, and is told so.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from slurm_ft.errors import UsageError

KEPT = 2
State = dict[str, Any]


def folder_of(run_folder: Path, step: int) -> Path:
    return run_folder / "saves" / f"step-{step}"


def write(folder: Path, rank: int, ranks: int, state: State) -> None:
    """Write this rank's part so that it is whole or not there. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f"rank-{rank}.tmp"
    try:
        with open(fresh, "wb") as file:
            torch.save({"ranks": ranks, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(folder / f"rank-{rank}.pt")
    except (OSError, RuntimeError) as failure:
        with contextlib.suppress(OSError):
            fresh.unlink()  # it may be what fills the disk
        # torch closes its archive when a write has failed, which fails in words of its own
        cause = failure if isinstance(failure, OSError) else failure.__context__
        if isinstance(cause, OSError):
            raise cause from None
        raise


def read(folder: Path, rank: int, ranks: int) -> State:
    """This rank's part. Raises UsageError for a save of another layout."""
    try:
        state: State = torch.load(folder / f"rank-{rank}.pt", map_location="cpu", weights_only=True)
    except OSError as failure:
        raise UsageError(f"the save in {folder} cannot be read: {failure.strerror}", "see saved.json") from None
    if state.pop("ranks") != ranks:
        hint = "go on with as many ranks a replica as it was saved with, or remove saved.json to begin anew"
        raise UsageError(f"the save in {folder} is of another number of ranks than {ranks}", hint)
    return state


def remove_old(run_folder: Path, marker: Path, present: int) -> None:
    """Remove the folders that are neither among the newest complete saves nor the present one."""
    kept = {f"step-{present}"}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        saves = json.loads(marker.read_text(encoding="utf-8"))["saves"]
        kept |= {Path(item["path"]).name for item in saves[-KEPT:]}
        for folder in (run_folder / "saves").iterdir():
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)
