"""Builds the native libraries with g++ alone: which ones can be built here, and how. Standard library only.

`setup.py`, `scripts/build_native` and the tests load this file by its path. `libraries()` is the plan: what was found
and what follows; `build()` carries it out. A library is built when its headers exist: `host` always, `cuda` when there
is a `cuda.h`, `rocm` when there are HIP headers of version 7 or newer. Nothing of CUDA or ROCm is linked.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

NATIVE = Path(__file__).resolve().parent
PLATFORMS = ("host", "cuda", "rocm")
OLDEST_HIP = (7, 0)
TIMEOUT = 300

# Our own C++ runtime inside: torch and conda bring others, older or newer.
FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread")
# Only the host library computes; the others pass calls on.
OPTIMISE = {"host": "-O3", "cuda": "-O1", "rocm": "-O1"}
LINK = ("-shared", "-static-libstdc++", "-static-libgcc", "-ldl")
ROCM_DEFINES = ("-D__HIP_PLATFORM_AMD__", "-DUSE_ROCM")
SOURCES = {
    "host": ("src/abi.cpp", "src/host.cpp", "src/shared_group.cpp"),
    "cuda": ("src/abi.cpp", "src/gpu.cpp", "src/vendor.cpp"),
    "rocm": ("src/abi.cpp", "hip/gpu_hip.cpp", "src/vendor.cpp"),
}


class BuildError(Exception):
    """A library that was required could not be built."""


@dataclass(frozen=True)
class Library:
    """One library: its platform, and the compiler's arguments; or why it cannot be built here."""

    platform: str
    arguments: tuple[str, ...] = ()
    missing: str = ""


def file_name(platform: str) -> str:
    return f"libslurm_ft_{platform}.so"


def compiler(environ: Mapping[str, str]) -> str | None:
    return shutil.which(environ.get("CXX") or "g++")


def chosen_platforms(environ: Mapping[str, str]) -> tuple[str, ...]:
    """GPU_PLATFORM=rocm|cuda|host (a list is fine) restricts what is built; host is always there."""
    words = {word for word in re.split(r"[\s,]+", environ.get("GPU_PLATFORM", "auto").lower()) if word}
    unknown = words - set(PLATFORMS) - {"auto"}
    if unknown:
        raise BuildError(f"GPU_PLATFORM={environ['GPU_PLATFORM']}: use auto, or some of {', '.join(PLATFORMS)}")
    return PLATFORMS if not words or "auto" in words else tuple(p for p in PLATFORMS if p == "host" or p in words)


def cuda_include(environ: Mapping[str, str]) -> Path | None:
    places = [environ.get("CUDA_HOME"), environ.get("CUDA_PATH"), "/usr/local/cuda", "/usr"]
    return next((p for place in places if place and ((p := Path(place, "include")) / "cuda.h").is_file()), None)


def hip_version(include: Path) -> tuple[int, int] | None:
    """From hip/hip_version.h: a distribution's packages have no other file that says it."""
    try:
        text = (include / "hip" / "hip_version.h").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = [re.search(rf"#define HIP_VERSION_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    return (int(found[0][1]), int(found[1][1])) if found[0] and found[1] else None


def hip_include(environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """The folder with new enough HIP headers, or None and why."""
    why = "no HIP headers (ROCM_PATH, /opt/rocm, /usr/include)"
    for place in (environ.get("ROCM_PATH"), environ.get("HIP_PATH"), "/opt/rocm", "/usr"):
        if not place or (version := hip_version(Path(place, "include"))) is None:
            continue
        if version >= OLDEST_HIP:
            return Path(place, "include"), ""
        why = f"the HIP headers in {place} are of {version[0]}.{version[1]}, 7.0 is the oldest that works"
    return None, why


def arguments(platform: str, include: Path | None = None, native: Path = NATIVE) -> tuple[str, ...]:
    """All arguments but the output, for sources below `native`."""
    vendor = () if include is None or include == Path("/usr/include") else ("-isystem", str(include))
    defines = ROCM_DEFINES if platform == "rocm" else ()
    folders = (f"-I{native / 'include'}", f"-I{native / 'src'}")
    sources = tuple(str(native / source) for source in SOURCES[platform])
    return (*FLAGS, OPTIMISE[platform], *defines, *folders, *vendor, *sources, *LINK)


def libraries(environ: Mapping[str, str]) -> list[Library]:
    """The plan: each chosen platform, with how to build it or why it cannot be."""
    plan = []
    for platform in chosen_platforms(environ):
        include, missing = None, ""
        if platform == "cuda" and (include := cuda_include(environ)) is None:
            missing = "no cuda.h (CUDA_HOME, /usr/local/cuda, /usr/include)"
        elif platform == "rocm":
            include, missing = hip_include(environ)
        plan.append(Library(platform, missing=missing) if missing else Library(platform, arguments(platform, include)))
    return plan


def compile_library(cxx: str, options: Iterable[str], output: Path) -> None:
    """Compiles to a temporary name and renames: a running process keeps the library that it has."""
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        done = subprocess.run([cxx, *options, "-o", str(temporary)], capture_output=True, text=True, timeout=TIMEOUT)
        if done.returncode != 0:
            raise BuildError(f"{output.name}: {cxx} ended with {done.returncode}:\n{done.stderr.strip()[-2000:]}")
        os.replace(temporary, output)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{output.name}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def build(folder: Path, environ: Mapping[str, str], say: Callable[[str], None] = print) -> list[Path]:
    """Builds into `folder` as SLURM_FT_NATIVE=auto|required|off says; gives the libraries that are there now.

    What an earlier build left there is removed first: a stale library must not get into a wheel whose compiler failed.
    `auto` never fails. `required` fails when a platform that GPU_PLATFORM names cannot be built, or none of them.
    """
    mode = environ.get("SLURM_FT_NATIVE", "auto").lower() or "auto"
    if mode not in ("auto", "required", "off"):
        raise BuildError(f"SLURM_FT_NATIVE={mode}: use auto, required or off")
    for platform in PLATFORMS:
        (folder / file_name(platform)).unlink(missing_ok=True)
    if mode == "off":
        say("native libraries: off")
        return []
    try:
        return _build(folder, environ, say, mode == "required")
    except BuildError as error:
        if mode == "required":
            raise
        say(f"native libraries: {error}")
        return []


def _build(folder: Path, environ: Mapping[str, str], say: Callable[[str], None], required: bool) -> list[Path]:
    plan = libraries(environ)
    cxx = compiler(environ)
    if cxx is None:
        raise BuildError("no C++ compiler (CXX, g++)")
    named = environ.get("GPU_PLATFORM", "auto").lower()

    def attempt(library: Library) -> BuildError | None:
        try:
            if library.missing:
                raise BuildError(library.missing)
            compile_library(cxx, library.arguments, folder / file_name(library.platform))
        except BuildError as error:
            return error
        return None

    with ThreadPoolExecutor(len(plan)) as pool:
        errors = list(pool.map(attempt, plan))
    made = []
    for library, error in zip(plan, errors, strict=True):
        if error is None:
            say(f"native library {library.platform}: built")
            made.append(folder / file_name(library.platform))
        elif required and (library.platform == "host" or library.platform in named):
            raise error
        else:
            say(f"native library {library.platform}: not built: {error}")
    return made
