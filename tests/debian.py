"""Debian packages for a test, unpacked into a private cache and never installed.

Two packages that conflict can so be had side by side, and nothing of the machine changes. A test asks with
`unpacked(...)` and is skipped, with the reason, where they cannot be had.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

DOWNLOAD_SECONDS = 60


def unpacked(*packages: str) -> Path:
    """The root folder that holds these packages' files; skips the test where they cannot be had."""
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        pytest.skip(f"no apt-get here to get {packages[0]} with")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slurm-ft-tests"
    root = cache / "-".join(packages)
    if not root.is_dir():
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        _fetch(packages, root)
    return root


def _fetch(packages: tuple[str, ...], root: Path) -> None:
    """Download and unpack beside the place, then rename: a root that is there is whole."""
    with tempfile.TemporaryDirectory(dir=root.parent) as name:
        folder = Path(name)
        argv = ["apt-get", "download", "-qq", *packages]
        try:
            done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
        except subprocess.TimeoutExpired:
            pytest.skip(f"{packages[0]} could not be downloaded in {DOWNLOAD_SECONDS} s")
        if done.returncode:
            pytest.skip(f"{packages[0]} cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
        for package in folder.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, folder / "root"], check=True)
        (folder / "root").rename(root)
