"""Both GPU libraries end to end on fake devices, for the meanings of HIP 7.0 and 7.2, with each call failing once.

Known faults of ROCm releases are put into the fake, and the workarounds are taken out of copies of the source: each
copy must then fail, so the tests are known to notice.
"""

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_ft.native import Unavailable, load
from tests.native import workshop

HIP_7_0, HIP_7_2 = 70053211, 70253211
KINDS = [("cuda", 13000), ("rocm", HIP_7_0), ("rocm", HIP_7_2)]
FAULTS = "export_once,access_needs_fd"
kinds = pytest.mark.parametrize(("platform", "version"), KINDS)
platforms = pytest.mark.parametrize("platform", ["cuda", "rocm"])


@kinds
def test_the_whole_life_of_memory(platform: str, version: int) -> None:
    environ = workshop.fake_environ(platform, FAKE_VERSION=version)
    assert workshop.said(workshop.program("gpu_programs", platform, "whole_life", environ=environ)) == "fine"


@kinds
def test_it_works_around_the_known_faults(platform: str, version: int) -> None:
    environ = workshop.fake_environ(platform, FAKE_VERSION=version, FAKE_BUGS=FAULTS)
    assert workshop.said(workshop.program("gpu_programs", platform, "whole_life", environ=environ)) == "fine"


@kinds
def test_memory_outlives_a_process_that_is_killed(platform: str, version: int) -> None:
    """The test plays the keeper: it holds a descriptor and loads no GPU library."""
    environ = workshop.fake_environ(platform, FAKE_VERSION=version, FAKE_BUGS=FAULTS)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        number = theirs.fileno()
        done = workshop.program("gpu_programs", platform, "make_and_die", number, environ=environ, pass_fds=[number])
        assert done.returncode == -signal.SIGKILL, done.stderr
        ours.settimeout(10)
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    done = workshop.program("gpu_programs", platform, "find_again", fds[0], environ=environ, pass_fds=fds)
    os.close(fds[0])
    assert workshop.said(done) == "fine"


def driver_calls() -> set[str]:
    """The names in the tables of gpu.cpp."""
    text = (workshop.NATIVE / "src" / "gpu.cpp").read_text(encoding="utf-8")
    return set(re.findall(r"_\((\w+), (?:cu|hip)[A-Z]\w+\)", text))


NEVER_FAILS = {"clearError", "errorString", "driverVersion", "init", "runtimeVersion"}
ONLY_STREAMS = {"streamCreate", "streamQuery", "streamDestroy"}
ONLY_CUDA = {"contextRetain", "contextCurrent", "contextUse"}
ONLY_ROCM = {"currentDevice", "useDevice", "runtimeVersion", "clearError"}


@platforms
def test_each_call_may_fail_and_nothing_is_lost(platform: str) -> None:
    names = driver_calls() - NEVER_FAILS - ONLY_STREAMS
    assert len(names) > 20
    # Outside of a `with` block an error comes through; releasing is quiet.
    quiet = {"memUnmap", "memUnreserve", "memRelease"}
    expected = names - quiet - (ONLY_ROCM if platform == "cuda" else ONLY_CUDA)
    if platform == "rocm":
        expected.remove("useDevice")  # device 0 is the thread's own already
    environ = workshop.fake_environ(platform)
    failed = workshop.said(
        workshop.program("gpu_programs", platform, "each_call_fails", *sorted(names), environ=environ)
    )
    assert set(failed.split()) == expected


# What is taken out, and the setting under which that must be noticed.
MUTANTS = {
    "errors stick": ("rocm", "(void)driver.clearError();", "", {}),
    "the import of 7.0 takes a pointer": (
        "rocm",
        "if (version < IMPORT_BY_VALUE) descriptor = &number;",
        "(void)IMPORT_BY_VALUE;",
        {"FAKE_VERSION": HIP_7_0},
    ),
    "a second export is dead": (
        "rocm",
        "return duplicate(fd_.get(), SFT_SYSTEM);",
        "int fd = -1; SFT_CALL(memExport, &fd, handle_, allocation(0).requestedHandleTypes, 0); return Fd(fd);",
        {"FAKE_BUGS": "export_once"},
    ),
    "access needs the descriptor": (
        "rocm",
        "SFT_CALL(memAccess,",
        "if (imported_) fd_ = Fd(); SFT_CALL(memAccess,",
        {"FAKE_BUGS": "access_needs_fd"},
    ),
    "a range without a result faults": ("rocm", "(memRange, &base, &size,", "(memRange, &base, nullptr,", {}),
    "a dma-buf has no offset": ("cuda", "offset = address - start;", "offset = 0;", {}),
    "a flag counts words": ("rocm", "hipMemsetD32Async", "hipMemsetAsync", {}),
    "a context is needed": ("cuda", "SFT_CALL(contextUse, context);", "", {}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_workaround_is_noticed(name: str, tmp_path: Path) -> None:
    platform, old, new, settings = MUTANTS[name]
    source = workshop.NATIVE / workshop.build.SOURCES[platform][1]
    text = source.read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "mutant.cpp").write_text(text.replace(old, new), encoding="utf-8")
    options = [*workshop.options(platform), "-O0", "-w", str(tmp_path / "mutant.cpp"), *workshop.common_objects()]
    workshop.make(tmp_path / workshop.build.file_name(platform), [*options, "-shared", "-ldl"])
    environ = workshop.fake_environ(platform, **settings) | {"SLURM_FT_NATIVE_LIB": str(tmp_path)}
    done = workshop.program("gpu_programs", platform, "whole_life", environ=environ)
    assert done.returncode != 0


def probe(platform: str, environ: dict[str, str], before: str = "", load_what: str = "") -> str:
    """What loading the library says, in a process of its own."""
    text = f"""
import ctypes
from slurm_ft.native import NativeError, load
{before}
try:
    library = load({load_what!r} or None)
    print(library.platform, library.device_count(), *library.versions, "; ".join(library.describe()))
except NativeError as error:
    print(type(error).__name__, error.message)
"""
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "PYTHONPATH": str(workshop.ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=workshop.LIMIT,
    )
    return workshop.said(done)


@platforms
def test_what_is_opened_and_in_which_version(platform: str) -> None:
    said = probe(platform, workshop.fake_environ(platform), load_what=platform)
    version = {"cuda": 13000, "rocm": HIP_7_2}[platform]
    driver, collectives = (str(workshop.fakes(platform) / name) for name in workshop.FAKE_NAMES[platform])
    assert said == f"{platform} 2 {version} 22707 driver: {driver}; collectives: {collectives}"


@platforms
def test_the_copy_that_the_process_has_is_taken_whatever_its_name(platform: str, tmp_path: Path) -> None:
    """ROCm builds of torch bring the library without a version in its name."""
    stem = {"cuda": "libcuda.so", "rocm": "libamdhip64.so"}[platform]
    loaded = tmp_path / stem
    shutil.copy(workshop.fakes(platform) / workshop.FAKE_NAMES[platform][0], loaded)
    environ = workshop.fake_environ(platform)
    said = probe(platform, environ, f"ctypes.CDLL({str(loaded)!r})", platform)
    assert f"driver: {loaded}, as the process had loaded it" in said


def test_a_library_with_a_longer_name_is_not_taken_for_it(tmp_path: Path) -> None:
    """libcudart.so is not libcuda.so."""
    workshop.need_headers("cuda")
    (tmp_path / "empty.cpp").write_text("")
    runtime = workshop.make(tmp_path / "libcudart.so", ["-shared", str(tmp_path / "empty.cpp")])
    said = probe("cuda", workshop.fake_environ("cuda"), f"ctypes.CDLL({str(runtime)!r})", "cuda")
    assert f"driver: {workshop.fakes('cuda') / 'libcuda.so.1'}" in said


@pytest.mark.parametrize(("platform", "version"), [("cuda", 11060), ("rocm", 60443484)])
def test_a_version_that_is_too_old_is_refused(platform: str, version: int) -> None:
    said = probe(platform, workshop.fake_environ(platform, FAKE_VERSION=version), load_what=platform)
    assert said.startswith("Unsupported")
    assert f"is of version {version}" in said


@platforms
def test_no_device_is_no_crash_and_host_is_taken(platform: str) -> None:
    environ = workshop.fake_environ(platform, FAKE_GPUS=0)
    workshop.library("host")
    assert probe(platform, environ, load_what=platform).startswith("Unavailable")
    assert probe(platform, environ | {"GPU_PLATFORM": f"{platform},host"}).startswith("host 1")
    assert probe(platform, environ | {"GPU_PLATFORM": platform}).startswith("Unavailable")


@platforms
def test_a_driver_without_a_needed_call_is_named(platform: str, tmp_path: Path) -> None:
    environ = workshop.fake_environ(platform)
    empty = tmp_path / "empty.cpp"
    empty.write_text("")
    workshop.make(tmp_path / workshop.FAKE_NAMES[platform][0], ["-shared", str(empty)])
    said = probe(platform, environ | {"LD_LIBRARY_PATH": str(tmp_path)}, load_what=platform)
    assert re.match(r"Unavailable .* lacks (cu|hip)Init ", said)


@platforms
def test_a_failure_to_open_is_not_remembered(platform: str) -> None:
    """A driver that is found later, as when torch loads it, is used."""
    environ = workshop.fake_environ(platform, FAKE_GPUS=0)
    before = f"""
import os
try:
    load({platform!r})
    raise SystemExit("no error")
except NativeError:
    os.environ["FAKE_GPUS"] = "1"
"""
    assert probe(platform, environ, before, platform).startswith(f"{platform} 1")


@platforms
def test_devices_without_virtual_memory_are_told(platform: str) -> None:
    before = f"""
from slurm_ft.native import Memory
try:
    Memory.create(load({platform!r}), 4096)
except NativeError as error:
    print(error.message, end=": ")
"""
    said = probe(platform, workshop.fake_environ(platform, FAKE_VMM=0), before, platform)
    assert "device 0 has no virtual memory management" in said


@platforms
def test_nothing_of_the_vendor_is_linked(platform: str) -> None:
    """So the library loads where nothing is installed: no other symbol is asked for than those of the C library."""
    done = subprocess.run(["readelf", "-d", workshop.library(platform)], capture_output=True, text=True, check=True)
    needed = set(re.findall(r"\(NEEDED\).*\[(.*?)\]", done.stdout))
    assert needed <= {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"}, needed


def test_without_gpu_software_the_reason_is_given(tmp_path: Path) -> None:
    workshop.need_headers("rocm")
    environ = {**os.environ, "SLURM_FT_NATIVE_LIB": str(workshop.library("rocm").parent), "GPU_PLATFORM": "rocm"}
    try:
        ctypes.CDLL("libamdhip64.so.7")
    except OSError:
        with pytest.raises(Unavailable, match=r"libamdhip64\.so\.7"):
            load(environ=environ)
    else:
        pytest.skip("there is a HIP library on this machine")
