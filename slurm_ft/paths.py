"""The run folder: every file name of a run has its owner here.

run.json                    the spec; written once, for its owner only: it may hold secrets of --env
events.jsonl                what happened; append only; the controller is its only writer
state.json                  a snapshot for readers; replaced at most once a second
lease/                      who looks after the run: one file for each term of office (slurm_ft/lease.py)
session.json                what a head needs that takes over on another host (controller/session.py)
controller.log, head.log, keeper.log    words of our own processes
secret/                     0700: the run's CURVE keys and the address of the controller
control/                    requests of `inject` and `stop`: one small file each
stop                        touch it and the run saves and stops in order
save                        touch it and the ranks are asked to save
chain.json                  the jobs of the run's chain; `submit --chain` writes it
again.json                  how the run goes on after this job; the head writes it
saved.json                  the newest complete saves; the controller writes it, `last_save()` reads it
errors/<r>-<attempt>-<rank>.json           a rank's traceback (torch elastic's protocol)
replicas/<r>/attempt_<n>/<rank>.log        a rank's output
replicas/<r>/step_<n>.log                  the words of the step itself (srun, agent)
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_ft.errors import RunFolderError


class RunPaths:
    """The file names of one run. Makes nothing by itself except in `create`."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(os.path.abspath(root))
        self.spec = self.root / "run.json"
        self.events = self.root / "events.jsonl"
        self.state = self.root / "state.json"
        self.lease = self.root / "lease"
        self.session = self.root / "session.json"
        self.stop = self.root / "stop"
        self.save = self.root / "save"
        self.chain = self.root / "chain.json"
        self.again = self.root / "again.json"
        self.saved = self.root / "saved.json"
        self.controller_log = self.root / "controller.log"
        self.head_log = self.root / "head.log"
        self.secret = self.root / "secret"
        self.endpoint = self.secret / "endpoint"
        self.lighthouse = self.secret / "lighthouse"
        self.transport_secret = self.secret / "agent.key_secret"
        self.control = self.root / "control"
        self.errors = self.root / "errors"
        self.hosts = self.root / "hosts"

    def rank_log(self, replica: int, attempt: int, rank: int) -> Path:
        return self.root / "replicas" / str(replica) / f"attempt_{attempt}" / f"{rank}.log"

    def step_log(self, replica: int, step: int) -> Path:
        return self.root / "replicas" / str(replica) / f"step_{step}.log"

    def error(self, replica: int, attempt: int, rank: int) -> Path:
        return self.errors / f"{replica}-{attempt}-{rank}.json"

    def create(self) -> None:
        """Make the folders. Raises RunFolderError when the place cannot be written."""
        try:
            for folder in (self.root, self.control, self.errors, self.root / "replicas"):
                folder.mkdir(parents=True, exist_ok=True)
            self.secret.mkdir(mode=0o700, exist_ok=True)
            self.secret.chmod(0o700)
        except OSError as error:
            raise RunFolderError(
                f"the run folder `{self.root}` cannot be written: {error.strerror}",
                "choose another with --run-dir; it must be on a file system that every host shares",
            ) from None

    def remove_empty(self) -> None:
        """Take away what `create` has made, as far as nothing is in it."""
        for folder in (self.control, self.errors, self.root / "replicas", self.secret, self.root):
            with contextlib.suppress(OSError):
                folder.rmdir()


def write_atomic(path: Path, text: str, mode: int = 0o644) -> None:
    """Write `text` beside `path` and rename it there, so that no reader ever sees half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def write_json(path: Path, value: Mapping[str, Any], mode: int = 0o644) -> None:
    write_atomic(path, json.dumps(value, indent=1, sort_keys=False) + "\n", mode)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises RunFolderError, with the reason, when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunFolderError(f"there is no `{path}`", "is this the folder of a run? see `slurm-ft list`") from None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"`{path}` cannot be read: {error}", "the file is damaged") from None
    if not isinstance(value, dict):
        raise RunFolderError(f"`{path}` holds no object", "the file is damaged")
    return value
