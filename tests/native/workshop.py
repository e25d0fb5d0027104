"""What the tests of the native half build and where they put it: each thing once per session, at its first use.

Headers are looked for where a build would look, then in the triton package (it brings CUDA's and HIP's), so that most
machines that have torch can compile both GPU libraries.
"""

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "native"
LIMIT = 120


def load_file(path: Path, name: str) -> ModuleType:
    """A Python file as a module, whatever its name ends with."""
    loader = SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return module


build: Any = load_file(NATIVE / "build.py", "slurm_ft_native_build")


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="slurm-ft-native-", ignore_cleanup_errors=True)


def folder() -> Path:
    """The session's folder for what is built."""
    return Path(_folder().name)


def compiler() -> str:
    found = build.compiler(os.environ)
    if found is None:
        pytest.skip("no C++ compiler")
    return str(found)


def triton_include(backend: str) -> Path | None:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    include = Path(spec.origin).parent / "backends" / backend / "include"
    return include if include.is_dir() else None


@functools.cache
def headers(platform: str) -> Path | None:
    """The vendor's headers for `platform`."""
    if platform == "cuda":
        found = build.cuda_include(os.environ) or triton_include("nvidia")
        return found if found and (found / "cuda.h").is_file() else None
    found, _ = build.hip_include(os.environ)
    if found is None and (other := triton_include("amd")) and (build.hip_version(other) or (0, 0)) >= build.OLDEST_HIP:
        return other
    return found  # type: ignore[no-any-return]


def need_headers(platform: str) -> Path:
    found = headers(platform)
    if found is None:
        name = {"cuda": "CUDA", "rocm": "HIP 7"}[platform]
        pytest.skip(f"no {name} headers here: not installed, and no triton package")
    return found


def make(output: Path, options: list[str]) -> Path:
    """Compile, and show the compiler's own words when it fails."""
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        build.compile_library(compiler(), options, output)
    except build.BuildError as error:
        pytest.fail(str(error))
    return output


def options(platform: str) -> list[str]:
    """The compiler's arguments without sources."""
    include = None if platform == "host" else need_headers(platform)
    whole = build.arguments(platform, include)
    return [word for word in whole if not word.endswith(".cpp") and word not in build.LINK]


@functools.cache
def compiled(name: str) -> str:
    """One source of native/src as an object, compiled once for all that share it."""
    source = NATIVE / "src" / f"{name}.cpp"
    return str(make(folder() / f"{name}.o", [*options("host"), "-O1", "-Werror", "-c", str(source)]))


def common_objects() -> tuple[str, ...]:
    """What the GPU libraries share."""
    return compiled("abi"), compiled("vendor")


@functools.cache
def library(platform: str) -> Path:
    """The library of `platform`, warnings being errors; its folder is what SLURM_FT_NATIVE_LIB takes."""
    output = folder() / "lib" / build.file_name(platform)
    sources = [str(NATIVE / source) for source in build.SOURCES[platform]]
    if platform == "host":
        return make(output, [*options(platform), *sources, "-Werror", *build.LINK])
    return make(output, [*options(platform), sources[1], *common_objects(), "-Werror", *build.LINK])


FAKE_NAMES = {"cuda": ("libcuda.so.1", "libnccl.so.2"), "rocm": ("libamdhip64.so.7", "librccl.so.1")}


@functools.cache
def fake_collectives(old: bool) -> Path:
    """The same file serves as NCCL and as RCCL."""
    flags = [*build.FLAGS, "-O1", "-Werror", *(f"-I{NATIVE / part}" for part in ("include", "src", "fake"))]
    parts = [str(NATIVE / "fake/fake_nccl.cpp"), compiled("host"), compiled("shared_group")]
    return make(folder() / f"fake-collectives-{old}.so", [*flags, *(["-DFAKE_OLD"] if old else []), *parts, "-shared"])


@functools.cache
def fakes(platform: str, old: bool = False) -> Path:
    """A folder for LD_LIBRARY_PATH with a fake driver and fake collectives; `old` ones lack all that is optional."""
    include = need_headers(platform)
    place = folder() / f"fake-{platform}{'-old' if old else ''}"
    place.mkdir(parents=True, exist_ok=True)
    driver, collectives = FAKE_NAMES[platform]
    shutil.copy(fake_collectives(old), place / collectives)
    if old:
        shutil.copy(fakes(platform) / driver, place / driver)
        return place
    source = {"cuda": "fake/fake_driver.cpp", "rocm": "fake/hip/fake_driver_hip.cpp"}[platform]
    flags = [*build.FLAGS, "-O1", "-Werror", *(f"-I{NATIVE / part}" for part in ("include", "src", "fake"))]
    vendor = ["-isystem", str(include), *(build.ROCM_DEFINES if platform == "rocm" else ())]
    # As the vendors' own: the functions are visible.
    make(
        place / driver,
        [*flags, "-fvisibility=default", *vendor, str(NATIVE / source), "-shared", f"-Wl,-soname,{driver}"],
    )
    return place


def fake_environ(platform: str, **settings: object) -> dict[str, str]:
    """The surroundings in which `platform` has fake devices."""
    found = {"SLURM_FT_NATIVE_LIB": str(library(platform).parent), "LD_LIBRARY_PATH": str(fakes(platform))}
    return found | {name: str(value) for name, value in settings.items()}


def program(module: str, *arguments: object, environ: Mapping[str, str] | None = None, **more: Any) -> Any:
    """A module of the tests as a program in a process of its own, with a time limit."""
    return subprocess.run(
        [sys.executable, "-m", f"tests.native.{module}", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        **more,
    )


def said(done: Any) -> str:
    """What a program printed; the test fails when it did not end well."""
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return str(done.stdout).strip()
