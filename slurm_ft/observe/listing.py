"""The list of runs in a folder, the newest first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_ft.observe import runs, text
from slurm_ft.observe.status import Snapshot
from slurm_ft.paths import RunPaths

COLUMNS = ("NAME", "JOB", "STATE", "REPLICAS", "RESTARTS", "STEP", "STARTED", "ELAPSED")
RIGHT = ("REPLICAS", "RESTARTS", "STEP", "ELAPSED")


@dataclass(frozen=True)
class Entry:
    """One run of the list. `state` is as in `Snapshot.state`."""

    folder: Path
    snapshot: Snapshot
    state: str
    troubles: tuple[str, ...]


def entries(folder: Path, now: float) -> list[Entry]:
    """The runs in a folder. A run that cannot be read is listed with what is known of it."""
    found = []
    for root in runs.all_runs(folder):
        paths = RunPaths(root)
        reading = runs.read(paths, now)
        alive = runs.is_alive(paths, reading.snapshot, now)
        found.append(Entry(root, reading.snapshot, reading.snapshot.state(alive), reading.troubles))
    return found


def lines(found: list[Entry], now: float, header: bool = True) -> list[str]:
    return text.table(COLUMNS, [_cells(entry, now) for entry in found], RIGHT, header)


def _cells(entry: Entry, now: float) -> list[str]:
    snapshot = entry.snapshot
    started = text.iso(snapshot.started)
    return [
        snapshot.name or entry.folder.name,
        snapshot.job_id or runs.job_in_name(entry.folder) or text.NOTHING,
        entry.state,
        str(len(snapshot.replicas)),
        str(snapshot.restarts),
        text.number(snapshot.step, 0),
        text.NOTHING if started is None else started.partition(".")[0] + "Z",
        text.elapsed(_elapsed(entry, now)),
    ]


def _elapsed(entry: Entry, now: float) -> float | None:
    return entry.snapshot.elapsed(now, entry.state != "DEAD")


def to_json(found: list[Entry], now: float) -> dict[str, Any]:
    """The form of `slurm-ft list --json`, schema 1."""
    return {"schema": 1, "runs": [_json(entry, now) for entry in found]}


def _json(entry: Entry, now: float) -> dict[str, Any]:
    snapshot = entry.snapshot
    return {
        "name": snapshot.name or entry.folder.name,
        "folder": str(entry.folder.absolute()),
        "job_id": snapshot.job_id or runs.job_in_name(entry.folder),
        "state": entry.state.partition(":")[0],
        "exit_code": snapshot.ended,
        "replicas": len(snapshot.replicas),
        "restarts": snapshot.restarts,
        "step": snapshot.step,
        "started": text.iso(snapshot.started),
        "elapsed": text.rounded(_elapsed(entry, now)),
    }
