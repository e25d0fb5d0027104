"""What people ask of a running run, as files in its folder: an inject request, or a stop.

Files work from any host that shares the folder, with no address to find and no key to hold; whoever may
write there may ask. The answer to a request is an event that bears its id.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from slurm_ft import faults
from slurm_ft.errors import RunFolderError, UsageError
from slurm_ft.paths import RunPaths, read_json


@dataclass(frozen=True)
class Inject:
    """Hurt a rank, a host or the run on purpose, with a kind of slurm_ft.faults. A fault of the run has no replica."""

    id: str
    replica: int | None
    rank: int
    kind: str
    seconds: float | None = None


def stop_is_asked_for(paths: RunPaths) -> bool:
    """Is there a stop file? It is taken away, so that the run can be started again."""
    with contextlib.suppress(OSError):
        paths.stop.unlink()
        return True
    return False


def taken(paths: RunPaths, complain: Callable[[str], None]) -> Iterator[Inject]:
    """The requests that wait, each taken once. `complain` is told of one that cannot be understood."""
    with contextlib.suppress(OSError):
        for path in sorted(paths.control.glob("*.json")):
            try:
                request = _understood(read_json(path))
            except (RunFolderError, UsageError, KeyError, TypeError, ValueError) as error:
                complain(f"the request {path.name} was not understood: {error}")
                path.unlink(missing_ok=True)
                continue
            path.unlink(missing_ok=True)
            yield request


def _understood(value: dict[str, object]) -> Inject:
    kind, replica, rank, seconds = value["kind"], value.get("replica"), value.get("rank", 0), value.get("seconds")
    fault, _ = faults.parse(str(kind))
    if fault.target is faults.Target.RUN:
        replica = None
    elif not isinstance(replica, int):
        raise ValueError(f"the replica is {replica!r}")
    if not isinstance(rank, int) or not isinstance(seconds, float | int | None):
        raise ValueError(f"the rank is {rank!r} and the seconds {seconds!r}")
    return Inject(str(value["id"]), replica, rank, str(kind), seconds)
