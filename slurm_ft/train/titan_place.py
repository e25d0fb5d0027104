"""Where a rank of `titan` stands in its run, and the word that a run leaves for those who come after its end."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_ft import env
from slurm_ft.errors import UsageError
from slurm_ft.train import ft

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where this rank stands in the run. Read from the environment in `of` and nowhere else."""

    fault_tolerant: bool = False
    replica: int = 0
    replicas: int = 1
    min_replicas: int = 1
    rank: int = 0
    ranks: int = 1
    run: Path | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Place:
        """Raises UsageError when a variable is not the number it should be."""

        def number(name: str, default: int) -> int:
            text = environ.get(name) or str(default)
            try:
                return int(text)
            except ValueError:
                hint = "slurm-ft sets it to a whole number; unset it or give one"
                raise UsageError(f"{name} is {text!r}, not a number", hint) from None

        group = environ.get(env.REPLICA_GROUP_ID, "")
        run = environ.get(env.RUN)
        return cls(
            fault_tolerant=bool(ft.lighthouse_url(environ) and group),
            replica=number(env.REPLICA_GROUP_ID, 0),
            replicas=number(env.NUM_REPLICA_GROUPS, 1),
            min_replicas=number(env.MIN_REPLICAS, 1),
            rank=number("RANK", 0),
            ranks=number("WORLD_SIZE", 1),
            run=Path(run) if run else None,
        )

    @property
    def folder(self) -> Path:
        """Where torchtitan may write; shared by the replicas."""
        return self.run / "titan" if self.run else Path("outputs")


def _end_file(place: Place) -> Path | None:
    return place.run / "titan" / "finished.json" if place.run else None


def _session(place: Place) -> str:
    """The session of the run that this is; '' where the run folder does not say it."""
    assert place.run is not None
    try:
        return str(json.loads((place.run / "session.json").read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def mark_end(place: Place, steps: int) -> None:
    """Leave word in the run folder that a replica has trained and committed all steps. Without it, on a full disk, the
    training is finished all the same, and a replica that comes later may train for nothing."""
    file = _end_file(place)
    if file is None or place.rank != 0:
        return
    fresh = file.with_name(f"finished.{place.replica}.tmp")
    word = {"steps": steps, "replica": place.replica, "session": _session(place)}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(word) + "\n", encoding="utf-8")
        fresh.replace(file)
    except OSError as error:
        logger.warning("that the run is over cannot be written to %s: %s", file, error.strerror or error)


def is_over(place: Place, steps: int) -> bool:
    """Whether a replica of this session has already trained at least `steps` steps to the end.

    The word of an earlier session does not count: that one did not end well, or there would be no other, and what
    it has trained may not be on disk.
    """
    file = _end_file(place)
    if file is None or not place.fault_tolerant:
        return False
    try:
        word = json.loads(file.read_text(encoding="utf-8"))
        return bool(word["steps"] >= steps and word["session"] == _session(place))
    except (OSError, ValueError, KeyError, TypeError):
        return False
