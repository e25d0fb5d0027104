"""The C face under AddressSanitizer and UndefinedBehaviorSanitizer: random calls, on the host and on fake devices."""

import functools
import os
import subprocess
from pathlib import Path

import pytest

from tests.native import workshop

ROUNDS = {"host": 3000, "cuda": 1500, "rocm": 1500}
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g1", "-O0"]


@functools.cache
def fuzzer(platform: str) -> Path:
    sources = [*workshop.build.SOURCES[platform], "tests/fuzz.cpp"]
    paths = [str(workshop.NATIVE / source) for source in sources]
    return workshop.make(
        workshop.folder() / f"fuzz-{platform}", [*workshop.options(platform), *SANITIZE, *paths, "-Werror", "-ldl"]
    )


def can_sanitize() -> bool:
    """The compiler may come without the sanitizers' libraries."""
    source = workshop.folder() / "sanitize.cpp"
    source.write_text("int main() { return 0; }\n")
    options = [*SANITIZE, str(source), "-o", str(source.with_suffix(""))]
    return subprocess.run([workshop.compiler(), *options], capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize("platform", ["host", "cuda", "rocm"])
def test_random_calls_neither_crash_nor_leak(platform: str) -> None:
    if not can_sanitize():
        pytest.skip("the compiler has no sanitizers")
    environ = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0" if platform != "host" else "detect_leaks=1"}
    if platform != "host":
        environ["LD_LIBRARY_PATH"] = str(workshop.fakes(platform))
    program = fuzzer(platform)
    for seed in (1, 2):
        done = subprocess.run(
            [program, str(seed), str(ROUNDS[platform])],
            env=environ,
            capture_output=True,
            text=True,
            timeout=workshop.LIMIT,
        )
        assert done.stdout == "fine\n", f"seed {seed}: {done.returncode}\n{done.stderr[-4000:]}"
