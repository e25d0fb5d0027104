"""Monarch on a slurm-ft allocation of this machine: the same program, and a worker loop that is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_until

PROGRAM = Path(__file__).parents[1] / "cluster" / "programs" / "monarch_program.py"

pytestmark = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import monarch.actor, trustme"], capture_output=True).returncode != 0,
    reason="Monarch is not installed here (slurm-ft[monarch])",
)


def run(folder: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment["TMPDIR"] = str(folder)
    argv = [sys.executable, str(PROGRAM), *arguments]
    out = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr[-3000:]
    return out.stdout


def test_a_monarch_program_runs_unchanged_and_a_lost_worker_loop_is_replaced(tmp_path: Path) -> None:
    assert run(tmp_path).startswith("[(0, ")
    out = run(tmp_path, "2", "1")
    assert "lost slot 1 on local1 is lost: the step exited" in out
    assert "replaced on local1" in out
    assert out.count("all placed [") == 2
    wait_until(lambda: not _left(str(tmp_path)), 20, "no worker loop is left")


def _left(word: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if word.encode() in words and "pytest" not in words.decode(errors="replace").split("\0")[0]:
            found.append(words[:200].decode(errors="replace"))
    return [line for line in found if "slurm_ft.monarch.worker" in line]


def test_monarch_that_was_imported_first_is_refused_with_a_hint(tmp_path: Path) -> None:
    script = "import monarch.actor\nfrom slurm_ft.monarch import SlurmFTJob"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "monarch was imported before slurm_ft.monarch" in out.stderr
