"""Where the keeper of a run on a host listens: a socket in a folder that only its user can enter.

    /tmp/slurm-ft-UID/RUN-AND-HOST/keeper

`/tmp` by its name, not TMPDIR: it is on the host itself, keeper and ranks must find the same place whatever
their environments say, and a socket's path may have 107 bytes. Where a site gives each job a /tmp of its own,
all steps of the job share it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path

BASE = Path("/tmp")


def socket_path(run: str | Path, host: str, uid: int | None = None, base: Path = BASE) -> Path:
    """The socket of the keeper on `host` for the run folder `run`. Pure, but for our own uid."""
    key = hashlib.sha256(f"{os.path.abspath(run)}\0{host}".encode()).hexdigest()[:16]
    return base / f"slurm-ft-{os.getuid() if uid is None else uid}" / key / "keeper"


def private_folder(folder: Path) -> None:
    """Make `folder` and its parent, closed to everybody else.

    Raises PermissionError when somebody else has made one of them: who owns a folder can put another socket there.
    """
    for place in (folder.parent, folder):
        with contextlib.suppress(FileExistsError):
            place.mkdir(mode=0o700)
        is_ours(place)


def is_ours(folder: Path) -> None:
    """Raises PermissionError unless this is a folder (no link) of our own that nobody else can enter."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"`{folder}` is not a folder of this user's alone")
