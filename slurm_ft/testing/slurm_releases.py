"""Other releases of Slurm, from the packages of Debian and Ubuntu, as prefixes for `devcluster --slurm-root`.

A release is fetched with apt (which checks signatures) by lists and a state of its own, so nothing of this machine's
packages changes and no root is needed. The packages and all that they depend on, down to libc, are unpacked. Then
patchelf writes into each program which loader and libraries it is to use: those beside it. So a daemon of
another distribution runs on this machine as it is, and hands nothing of that on: what a job executes finds the
machine's own loader and libraries, because no LD_LIBRARY_PATH is set and no root is changed.

    <cache>/<release>/bin, sbin      Slurm's programs, patched; nothing else, so the folder can stand first in PATH
    <cache>/<release>/lib/slurm      a link to the plugins
    <cache>/<release>/root           what was unpacked (libraries)
    <cache>/<release>/release.json   the exact version; it is written last, so a release that has it is whole

The folder cannot be moved, since the programs name their libraries by full path.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_ft.errors import LaunchError, UsageError

SECONDS = 300.0
"""For one call of apt: a release is about 30 MB."""

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurmdbd")
HEADERS = ("libslurm-dev",)
CLIENTS = (
    "srun",
    "sbatch",
    "salloc",
    "scancel",
    "scontrol",
    "sinfo",
    "squeue",
    "sacct",
    "sacctmgr",
    "sattach",
    "sdiag",
)
DAEMONS = ("slurmctld", "slurmd", "slurmstepd", "slurmdbd")
RECORD = "release.json"


@dataclass(frozen=True)
class Release:
    """Where a release of Slurm is: the distribution (apt's Origin), its suite and its components."""

    name: str
    origin: str
    suite: str
    components: str = "main"


RELEASES = (
    Release("22.05", "Debian", "bookworm"),
    Release("23.11", "Ubuntu", "noble", "main universe"),
    Release("24.11", "Debian", "trixie"),
    Release("25.11", "Ubuntu", "resolute", "main universe"),
    Release("26.05", "Debian", "sid"),
)

KEYRINGS = {
    "Debian": "usr/share/keyrings/debian-archive-keyring.gpg",
    "Ubuntu": "usr/share/keyrings/ubuntu-archive-keyring.gpg",
}


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "slurm-ft" / "slurm"


def own_mirrors() -> dict[str, str]:
    """The mirrors that this machine's apt uses, by origin."""
    argv = ["apt-get", "indextargets", "--format", "$(LABEL)|$(REPO_URI)", "Identifier: Packages"]
    try:
        lines = _run(argv, {}).splitlines()
    except LaunchError:
        return {}
    found = dict(line.split("|", 1) for line in reversed(lines) if "|" in line)
    return {origin: found[origin] for origin in KEYRINGS if origin in found}


def prefix(release: Release, cache: Path, mirrors: Mapping[str, str], headers: bool = False) -> Path:
    """The folder of a release, fetched if it is not there.

    Raises LaunchError with apt's own words where it cannot be had, UsageError where no mirror is known.
    """
    place = cache / release.name
    record = _read(place / RECORD)
    if record.get("place") == str(place) and (record.get("headers") or not headers):
        return place
    if release.origin not in mirrors:
        raise UsageError(
            f"Slurm {release.name} comes from {release.origin}, and no mirror of it is known here",
            f"name one with --mirror {release.origin}=URI",
        )
    shutil.rmtree(place, ignore_errors=True)
    (place / "root").mkdir(parents=True)
    packages = (*PACKAGES, *(HEADERS if headers else ()))
    _fetch(release, place, mirrors, packages)
    _build(place, patchelf(cache))
    version = _run([str(place / "sbin" / "slurmctld"), "-V"], {}).split()[-1]
    record = {"place": str(place), "version": version, "package": _package(place), "headers": headers}
    (place / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    shutil.rmtree(place / "apt")
    return place


def version_of(place: Path) -> str:
    """The exact version of the packages, such as 24.11.5-4+deb13u1."""
    return str(_read(place / RECORD).get("package", ""))


def _fetch(release: Release, place: Path, mirrors: Mapping[str, str], packages: Sequence[str]) -> None:
    apt = Apt(place / "apt", mirrors[release.origin], release, keyring(release.origin, place, mirrors))
    apt.download(packages)
    for package in sorted(apt.archives.glob("*.deb")):
        _run(["dpkg", "-x", str(package), str(place / "root")], {})
    # Packages older than Debian 13 still have a /lib beside /usr/lib.
    for name in ("lib", "lib64"):
        if (old := place / "root" / name).is_dir():
            shutil.copytree(old, place / "root" / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(old)
    # Only libraries and headers are used, and the programs below.
    for name in ("usr/share", "etc", "var", "usr/lib/systemd", "usr/lib/python3"):
        shutil.rmtree(place / "root" / name, ignore_errors=True)


class Apt:
    """apt with lists and a state of its own: it sees one suite of one mirror and believes that nothing is installed."""

    def __init__(self, folder: Path, mirror: str, release: Release, keys: Path) -> None:
        self.archives = folder / "cache" / "archives"
        for name in ("state/lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True)
        (folder / "state" / "status").touch()
        sources = f"deb [signed-by={keys}] {mirror} {release.suite} {release.components}\n"
        (folder / "sources.list").write_text(sources)
        settings = {
            "Dir::State": folder / "state",
            "Dir::State::status": folder / "state" / "status",
            "Dir::Cache": folder / "cache",
            "Dir::Etc::sourcelist": folder / "sources.list",
            "Dir::Etc::sourceparts": "-",
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": "root",
            "Debug::NoLocking": "true",
        }
        (folder / "apt.conf").write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()))
        self._environment = {"APT_CONFIG": str(folder / "apt.conf")}

    def download(self, packages: Sequence[str]) -> None:
        """Fetch these packages and all that they depend on. Raises LaunchError with apt's words."""
        _run(["apt-get", "update", "-qq"], self._environment)
        _run(["apt-get", "install", "-qq", "--yes", "--download-only", *packages], self._environment)


def keyring(origin: str, place: Path, mirrors: Mapping[str, str]) -> Path:
    """The keys that sign a distribution: this machine's own, else those that Debian packs for the other."""
    own = Path("/") / KEYRINGS[origin]
    if own.exists() or origin == "Debian":
        return own
    if "Debian" not in mirrors:
        raise LaunchError(
            f"the keys of {origin} are not on this machine", f"install the package {origin.lower()}-keyring"
        )
    trixie = next(release for release in RELEASES if release.suite == "trixie")
    apt = Apt(place / "keys", mirrors["Debian"], trixie, keyring("Debian", place, mirrors))
    apt.download((f"{origin.lower()}-keyring",))
    for package in apt.archives.glob(f"{origin.lower()}-keyring*.deb"):
        _run(["dpkg", "-x", str(package), str(place / "keys")], {})
    return place / "keys" / KEYRINGS[origin]


def patchelf(cache: Path) -> str:
    """The program patchelf: this machine's own, else its package, unpacked into the cache."""
    if own := shutil.which("patchelf"):
        return own
    place = cache / "patchelf"
    if not (place / "usr/bin/patchelf").exists():
        place.mkdir(parents=True, exist_ok=True)
        _run(["apt-get", "download", "-qq", "patchelf"], {}, cwd=place)
        _run(["dpkg", "-x", str(next(place.glob("*.deb"))), str(place)], {})
    return str(place / "usr/bin/patchelf")


def _build(place: Path, patcher: str) -> None:
    root = place / "root" / "usr"
    plugins = next(root.glob("lib/*/slurm-wlm"))
    (place / "lib").mkdir()
    (place / "lib" / "slurm").symlink_to(plugins)
    for folder, names in (("bin", CLIENTS), ("sbin", DAEMONS)):
        (place / folder).mkdir()
        for name in names:
            source = next(root / folder / name_ for name_ in (f"{name}-wlm", name) if (root / folder / name_).exists())
            patch(source, place / folder / name, plugins, patcher)
    shutil.rmtree(root / "bin")
    shutil.rmtree(root / "sbin")


def patch(source: Path, target: Path, plugins: Path, patcher: str) -> None:
    """A copy of a program that uses the loader and the libraries of the release that these plugins belong to."""
    libraries = plugins.parent
    loader = next(libraries.glob("ld-linux*.so.*"))
    shutil.copy2(source, target)
    # RPATH and not RUNPATH: it holds also for what a plugin needs.
    options = ["--set-interpreter", str(loader), "--force-rpath", "--set-rpath", f"{plugins}:{libraries}"]
    _run([patcher, *options, str(target)], {})


def _package(place: Path) -> str:
    package = next((place / "apt" / "cache" / "archives").glob("slurmctld_*.deb"))
    return package.name.split("_")[1].replace("%3a", ":")


def _read(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _run(argv: Sequence[str], environment: Mapping[str, str], cwd: Path | None = None) -> str:
    quiet = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C", "SLURM_CONF": os.devnull}
    try:
        done = subprocess.run(
            argv, env={**os.environ, **quiet, **environment}, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise LaunchError(f"`{' '.join(argv[:2])}` did not end in {SECONDS:.0f} s", "is the mirror slow?") from None
    except OSError as error:
        raise LaunchError(f"`{argv[0]}` cannot be run: {error.strerror}", "this needs Debian or Ubuntu") from None
    if done.returncode:
        words = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise LaunchError(f"`{' '.join(argv[:2])}` failed: {words[-1] if words else done.returncode}")
    return done.stdout
