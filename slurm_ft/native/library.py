"""The native libraries by ctypes: which there are, which one to use, and typed calls.

A library is a file `libslurm_ft_<platform>.so` that knows no Python and is not linked to any GPU software; it finds
CUDA or ROCm when it is opened. None of them has to be there: `load` then raises `Unavailable` and says what is missing.

`GPU_PLATFORM=rocm|cuda|host` (a list is fine) restricts the choice. Without it the first of rocm, cuda, host is taken
that can be opened and has a device. `SLURM_FT_NATIVE_LIB` names another folder for the files.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from enum import IntFlag
from pathlib import Path
from typing import Any, NamedTuple

from slurm_ft.native.errors import NativeError, Status, Unavailable, error_of

ABI = 1
PLATFORMS = ("rocm", "cuda", "host")
FOLDER = "SLURM_FT_NATIVE_LIB"
CHOICE = "GPU_PLATFORM"

_int, _u32, _u64, _void, _size = ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t
_text, _pint, _pu64 = ctypes.c_char_p, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_uint64)


class Feature(IntFlag):
    """What a library or a device can do."""

    MEMORY = 1
    DMABUF = 2
    COLLECTIVES = 4
    SPLIT = 8
    SHRINK = 16


class DeviceInfo(ctypes.Structure):
    """`sft_device_info`."""

    _fields_ = (
        ("name", ctypes.c_char * 128),
        ("bus_id", ctypes.c_char * 32),
        ("bytes", ctypes.c_uint64),
        ("granularity", ctypes.c_uint64),
        ("features", ctypes.c_uint32),
    )


class MemoryInfo(ctypes.Structure):
    """`sft_memory_info`."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64),
        ("device", ctypes.c_int32),
        ("imported", ctypes.c_int32),
    )


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "sft_open": (),
    "sft_features": (ctypes.POINTER(_u32),),
    "sft_versions": (_pint, _pint),
    "sft_describe": (_text, _size),
    "sft_device_count": (_pint,),
    "sft_device": (_int, ctypes.POINTER(DeviceInfo)),
    "sft_device_free": (_int, _pu64, _pu64),
    "sft_memory_create": (_int, _u64, _u32, _pu64),
    "sft_memory_import": (_int, _int, _u64, _pu64),
    "sft_memory_export": (_u64, _pint),
    "sft_memory_info_of": (_u64, ctypes.POINTER(MemoryInfo)),
    "sft_memory_write": (_u64, _u64, _void, _u64),
    "sft_memory_read": (_u64, _u64, _void, _u64),
    "sft_memory_flag": (_u64, _u64, _u32, _u64),
    "sft_memory_close": (_u64,),
    "sft_dmabuf": (_int, _u64, _u64, _pint, _pu64, _pu64),
    "sft_comm_id": (_void,),
    "sft_comm_create": (_int, _void, _int, _int, _pu64),
    "sft_comm_state": (_u64,),
    "sft_comm_wait": (_u64, _int),
    "sft_comm_all_reduce": (_u64, _void, _void, _u64, _int, _int, _u64),
    "sft_comm_broadcast": (_u64, _void, _u64, _int, _int, _u64),
    "sft_comm_split": (_u64, _int, _int, _pu64),
    "sft_comm_shrink": (_u64, _pint, _int, _pu64),
    "sft_comm_abort": (_u64, _int),
    "sft_comm_close": (_u64, _int),
}


class Versions(NamedTuple):
    """Of the driver and of NCCL or RCCL, as they number themselves; 0 where there is none."""

    driver: int
    collectives: int


class Library:
    """One native library. `call` turns a failed status into an exception."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._dll = ctypes.CDLL(str(path))
            abi = self._dll.sft_abi()
        except (OSError, AttributeError) as error:
            raise Unavailable(f"{path.name}: {error}", Status.ABSENT) from error
        if abi != ABI:
            raise Unavailable(
                f"{path.name} is of ABI {abi}, this slurm-ft wants {ABI}", Status.ABSENT, "build it again"
            )
        for name, arguments in SIGNATURES.items():
            function = getattr(self._dll, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        self._dll.sft_platform.restype = ctypes.c_char_p
        self._dll.sft_last_error.argtypes = (_text, _size)
        self.platform = str(self._dll.sft_platform().decode())

    def call(self, name: str, *arguments: Any) -> Status:
        """`OK` or `IN_PROGRESS`; anything else is raised."""
        status = getattr(self._dll, name)(*arguments)
        if status in (Status.OK, Status.IN_PROGRESS):
            return Status(status)
        text = ctypes.create_string_buffer(1024)
        self._dll.sft_last_error(text, len(text))
        raise error_of(status, f"{self.platform}: {text.value.decode(errors='replace')}")

    def open(self) -> None:
        """Find the vendor's libraries; may be tried again."""
        self.call("sft_open")

    @property
    def features(self) -> Feature:
        found = ctypes.c_uint32()
        self.call("sft_features", ctypes.byref(found))
        return Feature(found.value)

    @property
    def versions(self) -> Versions:
        driver, collectives = ctypes.c_int(), ctypes.c_int()
        self.call("sft_versions", ctypes.byref(driver), ctypes.byref(collectives))
        return Versions(driver.value, collectives.value)

    def describe(self) -> list[str]:
        """Which file each part came from, or why it is absent."""
        text = ctypes.create_string_buffer(4096)
        self.call("sft_describe", text, len(text))
        return text.value.decode(errors="replace").splitlines()

    def device_count(self) -> int:
        count = ctypes.c_int()
        self.call("sft_device_count", ctypes.byref(count))
        return count.value


def library_folder(environ: Mapping[str, str]) -> Path:
    return Path(environ.get(FOLDER) or Path(__file__).parent / "lib")


def built(environ: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """The libraries that are there, by platform."""
    paths = {name: library_folder(environ) / f"libslurm_ft_{name}.so" for name in PLATFORMS}
    return {name: path for name, path in paths.items() if path.is_file()}


def allowed(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The platforms that GPU_PLATFORM allows, in the order in which they are tried."""
    words = {word for word in re.split(r"[\s,]+", environ.get(CHOICE, "auto").lower()) if word}
    if unknown := words - set(PLATFORMS) - {"auto"}:
        raise NativeError(
            f"{CHOICE}: no platform {', '.join(sorted(unknown))}", Status.INVALID, "use rocm, cuda or host"
        )
    return PLATFORMS if not words or "auto" in words else tuple(name for name in PLATFORMS if name in words)


_loaded: dict[Path, Library] = {}


def load(platform: str | None = None, environ: Mapping[str, str] = os.environ) -> Library:
    """The library of `platform`, opened; without one, the first allowed platform that has a device."""
    if platform is not None:
        return _open(platform, built(environ))
    reasons, there = [], built(environ)
    for name in allowed(environ):
        try:
            library = _open(name, there)
            if library.device_count() > 0:
                return library
            reasons.append(f"{name}: no device")
        except NativeError as error:
            reasons.append(error.message)
    raise Unavailable("; ".join(reasons), Status.ABSENT, "`slurm_ft.native.report()` says what is there")


def _open(platform: str, there: Mapping[str, Path]) -> Library:
    path = there.get(platform)
    if path is None:
        hint = "scripts/build_native builds it; a wheel holds those that could be built"
        raise Unavailable(f"{platform}: its library was not built", Status.ABSENT, hint)
    if path not in _loaded:
        _loaded[path] = Library(path)
    _loaded[path].open()
    return _loaded[path]
