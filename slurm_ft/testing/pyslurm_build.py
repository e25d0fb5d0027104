"""pyslurm for a release that slurm_releases has unpacked, and a Python that can load it.

pyslurm is a set of extension modules over that release's libslurmfull, which needs that release's libc. The
machine's own libc may be older, so the Python that imports it is a copy of the machine's, patched like Slurm's own
programs to use the release's loader and libraries: a newer libc runs older programs.

pyslurm is GPL-2.0. It is built here from its source, for tests, in a cache; nothing of it is shipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from slurm_ft.errors import LaunchError
from slurm_ft.testing import slurm_releases as releases

SECONDS = 900.0
"""For one command: Cython and the C compiler take two minutes on one core."""


def python(place: Path, release: releases.Release, cache: Path) -> tuple[Path, dict[str, str]]:
    """A Python that can import pyslurm for this release, and the environment it needs.

    Raises LaunchError with the words of pip or of the compiler where it cannot be had.
    """
    folder = place / "pyslurm"
    if not (folder / "built").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        _build(folder, place, release)
        _python(folder, place, cache)
        (folder / "built").touch()
    paths = [str(next(folder.glob("pyslurm-*/")))]
    paths += [path for path in sys.path if path and Path(path).is_dir()]
    return folder / "python", {"PYTHONHOME": sys.base_prefix, "PYTHONPATH": os.pathsep.join(paths)}


def _build(folder: Path, place: Path, release: releases.Release) -> None:
    tools = folder / "tools"
    _run([sys.executable, "-m", "venv", str(tools)], folder)
    _run([str(tools / "bin/pip"), "install", "-q", "Cython", "setuptools", "wheel", "packaging"], folder)
    major = release.name.removeprefix("0").replace(".0", ".")
    get = ["download", "-q", "--no-deps", "--no-binary=pyslurm", "--no-build-isolation", f"pyslurm=={major}.*"]
    _run([str(tools / "bin/pip"), *get], folder)
    shutil.unpack_archive(next(folder.glob("pyslurm-*.tar.gz")), folder, filter="data")
    libraries = (place / "lib" / "slurm").resolve().parent
    settings = {
        "SLURM_INCLUDE_DIR": str(place / "root/usr/include"),
        "SLURM_LIB_DIR": str(libraries),
        "CFLAGS": "-O0 -w",
        # What libslurmfull needs of a newer libc is there when it is loaded, and not now.
        "LDFLAGS": "-Wl,--allow-shlib-undefined",
    }
    source = next(folder.glob("pyslurm-*/"))
    _run([str(tools / "bin/python"), "setup.py", "build_ext", "--inplace"], source, settings)
    _run([str(tools / "bin/python"), "setup.py", "egg_info"], source, settings)


def _python(folder: Path, place: Path, cache: Path) -> None:
    own = Path(sys.executable).resolve()
    releases.patch(own, folder / "python", (place / "lib/slurm").resolve(), releases.patchelf(cache))
    shared = sysconfig.get_config_var("LDLIBRARY")
    library = Path(sysconfig.get_config_var("LIBDIR") or "") / str(shared)
    if str(shared).endswith(".so") and library.exists():
        # A Python whose interpreter is in a library of its own needs that one, too.
        for file in library.parent.glob(f"{library.name}*"):
            shutil.copy2(file, (place / "lib/slurm").resolve().parent / file.name)


def _run(argv: list[str], cwd: Path, extra: dict[str, str] | None = None) -> None:
    try:
        done = subprocess.run(
            argv, cwd=cwd, env={**os.environ, **(extra or {})}, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise LaunchError(f"`{argv[0]} {argv[1]}` did not end in {SECONDS:.0f} s") from None
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if "rror" in line] or ["no words"]
        raise LaunchError(f"pyslurm cannot be built: {lines[-1].strip()}")
