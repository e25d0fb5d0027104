"""Compiled against the vendors' real headers, where they can be had: from the system, from triton, from Debian.

The Debian packages are fetched into a folder of the test's own and unpacked there; nothing is added to the system.
"""

import functools
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.native import workshop

FETCH = """
set -e
mkdir -p lists/partial cache/archives/partial debs root
uri=$(sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/debian.sources | head -n 1)
key=$(sed -n 's/^Signed-By: *//p' /etc/apt/sources.list.d/debian.sources | head -n 1)
echo "deb [signed-by=$key] $uri experimental main" > sources.list
set -- -o Dir::Etc::sourcelist="$PWD/sources.list" -o Dir::Etc::sourceparts=- -o Dir::State::Lists="$PWD/lists" \
    -o Dir::Cache="$PWD/cache" -o Acquire::Retries=0 -o Acquire::http::Timeout=10 -o APT::Sandbox::User=root
apt-get -q "$@" update
cd debs
apt-get -q "$@" download libamdhip64-dev/experimental librccl-dev/experimental
for deb in *.deb; do dpkg-deb -x "$deb" ../root; done
"""


@functools.cache
def debian_rocm() -> Path | str:
    """The folder with the HIP and RCCL headers of Debian's experimental suite; or why there is none."""
    place = workshop.folder() / "debian-rocm"
    place.mkdir()
    try:
        done = subprocess.run(["sh", "-c", FETCH], cwd=place, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "the package archive did not answer within 60 s"
    include = place / "root" / "usr" / "include"
    version = workshop.build.hip_version(include)
    if done.returncode != 0 or version is None:
        return f"the ROCm headers cannot be fetched: {done.stderr.strip()[-200:] or done.stdout.strip()[-200:]}"
    if version < workshop.build.OLDEST_HIP:
        return f"the archive has ROCm {version[0]}.{version[1]}"
    return include


def need_debian_rocm() -> Path:
    found = debian_rocm()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_the_library_compiles_without_a_warning(platform: str) -> None:
    """The library's own test builds have -Wall -Wextra -Werror."""
    assert workshop.library(platform).is_file()


@pytest.mark.parametrize("source", ["hip/gpu_hip.cpp", "fake/hip/fake_driver_hip.cpp"])
def test_the_twins_compile_against_debians_rocm(source: str) -> None:
    include = need_debian_rocm()
    folders = [f"-I{workshop.NATIVE / part}" for part in ("include", "src", "fake")]
    options = [
        *workshop.build.FLAGS,
        "-O0",
        "-Werror",
        *workshop.build.ROCM_DEFINES,
        *folders,
        "-isystem",
        str(include),
    ]
    workshop.make(workshop.folder() / "debian.o", [*options, "-c", str(workshop.NATIVE / source)])


# HIP's own runtime, and what it needs that is newer than a stable release: run through a loader of its own.
RUNTIME = """
set -e
mkdir -p runtime/debs runtime/root
set -- -o Dir::Etc::sourcelist="$PWD/sources.list" -o Dir::Etc::sourceparts=- -o Dir::State::Lists="$PWD/lists" \
    -o Dir::Cache="$PWD/cache" -o Acquire::Retries=0 -o Acquire::http::Timeout=10 -o APT::Sandbox::User=root
sed 's/ experimental main/ sid main/' sources.list > both.list
cat both.list >> sources.list
apt-get -q "$@" update
cd runtime/debs
apt-get -q "$@" download libamdhip64-7/experimental libamd-comgr3/experimental libhsa-runtime64-1/experimental
llvm=$(dpkg-deb -f libamd-comgr3_*.deb Depends | grep -o 'libllvm[0-9]*')
apt-get -q "$@" download "$llvm" libdrm-amdgpu1 libdrm2 libelf1t64 libnuma1 libzstd1 zlib1g libc6 libstdc++6 libgcc-s1 \
    libffi8 libedit2 libtinfo6 libxml2-16 libz3-4 libbsd0 libmd0
for deb in *.deb; do dpkg-deb -x "$deb" ../root; done
"""


def test_the_library_meets_amds_own_runtime() -> None:
    """All that is needed is there, the version is good, and without a device the right error comes back."""
    include = need_debian_rocm()
    place = include.parents[2]
    try:
        done = subprocess.run(["sh", "-c", RUNTIME], cwd=place, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        pytest.skip("the package archive did not answer within 60 s")
    loaders = sorted((place / "runtime" / "root").rglob("ld-linux-x86-64.so.2"))
    if done.returncode != 0 or not loaders:
        pytest.skip(f"HIP's runtime cannot be fetched: {done.stderr.strip()[-200:]}")
    program = workshop.folder() / "meets-hip"
    sources = [str(workshop.NATIVE / part) for part in ("hip/gpu_hip.cpp", "tests/fuzz.cpp")]
    workshop.make(program, [*workshop.options("rocm"), *sources, *workshop.common_objects(), *workshop.build.LINK[1:]])
    folders = place / "runtime" / "root" / "usr" / "lib" / "x86_64-linux-gnu"
    command = [str(loaders[0]), "--library-path", str(folders), str(program), "1", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    shutil.rmtree(place / "runtime")
    without_device = (1, "", "hipInit: no ROCm-capable device is detected (100)\n")
    assert (done.returncode, done.stdout, done.stderr) in [without_device, (0, "fine\n", "")]


def check_nccl(*options: str) -> None:
    flags = [
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Werror",
        *(f"-I{workshop.NATIVE / part}" for part in ("include", "src")),
        *options,
    ]
    source = str(workshop.NATIVE / "tests" / "nccl_check.cpp")
    done = subprocess.run(
        [workshop.compiler(), *flags, "-fsyntax-only", source], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_our_words_for_rccl_are_those_of_its_header() -> None:
    check_nccl(*workshop.build.ROCM_DEFINES, "-isystem", str(need_debian_rocm()))


def test_our_words_for_nccl_are_those_of_its_header() -> None:
    cuda = workshop.need_headers("cuda")
    places = [cuda, Path("/usr/include"), Path("/usr/local/include")]
    found = next((place for place in places if (place / "nccl.h").is_file()), None)
    if found is None:
        pytest.skip("no nccl.h here: it comes only with NCCL itself")
    check_nccl("-DNCCL", "-isystem", str(cuda), "-isystem", str(found))
