"""scripts/gpu_check as far as fakes go: the first person with a GPU must not meet a mistake of the script itself."""

import os
import subprocess
import sys

import pytest

from tests.native import workshop

SCRIPT = workshop.ROOT / "scripts" / "gpu_check"
SKIPPED_ON_FAKES = {
    "memory is given back": "the driver does not count it",
    "memory has a holder in the probes": "the probes see no process",
    "stream ordered flag": "torch",
}


def gpu_check(environ: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(SCRIPT), "--mib", "1", *arguments]
    return subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=workshop.LIMIT
    )


def rows(text: str) -> dict[str, tuple[str, str]]:
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {cell[0]: (cell[1], cell[2]) for cell in cells if len(cell) == 3 and cell[0] not in ("check", "---")}


@pytest.mark.parametrize(("platform", "only", "count"), [("rocm", "", 9), ("cuda", "memory", 4)])
def test_every_check_runs(platform: str, only: str, count: int) -> None:
    done = gpu_check(workshop.fake_environ(platform, GPU_PLATFORM=platform), "--only", only)
    table = rows(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(table) == count
    for name, (result, words) in table.items():
        if name in SKIPPED_ON_FAKES:
            assert result == "skip" and SKIPPED_ON_FAKES[name] in words, (name, words)
        else:
            assert result == "pass", (name, words)
    assert only or "shrink works" in table["a peer is killed"][1]
    assert f"{platform} device 0 at 0000:c0:00.0: Fake GPU 0" in done.stdout


def test_what_fails_is_a_line_and_the_exit_code() -> None:
    environ = workshop.fake_environ("rocm", GPU_PLATFORM="rocm", FAKE_FAIL="memImport:1")
    done = gpu_check(environ, "--only", "kill 9")
    assert done.returncode == 1
    result, words = rows(done.stdout)["memory outlives kill 9"]
    assert result == "FAIL" and "hipMemImportFromShareableHandle: made to fail" in words


def test_a_library_that_hangs_is_a_line_too() -> None:
    environ = workshop.fake_environ("rocm", GPU_PLATFORM="rocm", FAKE_NCCL_FAIL="InitRankConfig")
    done = gpu_check(environ, "--only", "split")
    assert done.returncode == 1 and rows(done.stdout)["split"][0] == "FAIL"


def test_without_a_gpu_it_says_what_is_there() -> None:
    done = gpu_check({"SLURM_FT_NATIVE_LIB": str(workshop.library("host").parent), "GPU_PLATFORM": "host"})
    assert done.returncode == 2
    assert "native platform: host" in done.stderr and "error: no GPU" in done.stderr
