"""The secret that the ranks of a run share, for the transport of states.

Within a run of slurm-ft it is derived from the agents' key in the run's 0700 folder `secret/`. Elsewhere
SLURM_FT_TRANSPORT_KEY names a file with at least 32 bytes that only its owner can read, the same for all
replicas: `(umask 077; head -c 32 /dev/urandom > key)`. There is no transport without a secret.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from slurm_ft import env
from slurm_ft.errors import UsageError
from slurm_ft.paths import RunPaths

SHORTEST = 32
PURPOSE = b"slurm-ft checkpoint transport, version 1"


def transport_key(environ: Mapping[str, str] = os.environ) -> bytes:
    """The run's key for this purpose, 32 bytes. Raises UsageError when there is no secret to derive it from."""
    given = environ.get(env.TRANSPORT_KEY)
    if given:
        secret = _read_own(Path(given))
    elif environ.get(env.RUN):
        secret = _read_own(RunPaths(environ[env.RUN]).transport_secret)
    else:
        raise UsageError(
            "the checkpoint transport has no secret: this rank is in no run of slurm-ft",
            f"set {env.TRANSPORT_KEY} to a file of mode 0600 with 32 random bytes, the same for all replicas",
        )
    return hmac.new(secret, PURPOSE, hashlib.sha256).digest()


def _read_own(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(1 << 16)
    except OSError as error:
        hint = "the folder `secret` of the run, readable for its owner only, holds it"
        raise UsageError(f"the transport's secret `{path}` cannot be read: {error.strerror}", hint) from None
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"others can read the transport's secret `{path}`", "chmod 600 it, and make a new one")
    if len(secret) < SHORTEST:
        raise UsageError(f"the transport's secret `{path}` has fewer than {SHORTEST} bytes", "make a longer one")
    return secret
