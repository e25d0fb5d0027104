"""What people ask of a running run, as files in its folder: an inject request, a save, or a stop.

Files work from any host that shares the folder, with no address to find and no key to hold; whoever may
write there may ask. The answer to a request is an event that bears its id.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm_ft.errors import RunFolderError
from slurm_ft.paths import RunPaths, read_json

STOP_WORDS = "a stop was asked for"
"""Why a run stops, when somebody has made the stop file."""
KINDS = re.compile(r"kill|term|segv|stop|exit:\d{1,3}")


@dataclass(frozen=True)
class Inject:
    """Hurt a rank on purpose. `kind` is kill, term, segv, stop or exit:N."""

    id: str
    replica: int
    rank: int
    kind: str


def stop_is_asked_for(paths: RunPaths) -> bool:
    """Is there a stop file? It is taken away, so that the run can be started again."""
    return _taken_away(paths.stop)


def save_is_asked_for(paths: RunPaths) -> bool:
    """Is there a save file? It is taken away: one file, one save."""
    return _taken_away(paths.save)


def _taken_away(path: Path) -> bool:
    with contextlib.suppress(OSError):
        path.unlink()
        return True
    return False


def taken(paths: RunPaths, complain: Callable[[str], None]) -> Iterator[Inject]:
    """The requests that wait, each taken once. `complain` is told of one that cannot be understood."""
    with contextlib.suppress(OSError):
        for path in sorted(paths.control.glob("*.json")):
            try:
                value = read_json(path)
                request = Inject(str(value["id"]), int(value["replica"]), int(value.get("rank", 0)), str(value["kind"]))
                if not KINDS.fullmatch(request.kind):
                    raise ValueError(f"the kind `{request.kind}` is unknown")
            except (RunFolderError, KeyError, TypeError, ValueError) as error:
                complain(f"the request {path.name} was not understood: {error}")
                path.unlink(missing_ok=True)
                continue
            path.unlink(missing_ok=True)
            yield request
