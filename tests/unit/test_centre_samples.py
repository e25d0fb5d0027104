"""The sample for NHC, as NHC would call it."""

from __future__ import annotations

import subprocess
from pathlib import Path

SAMPLE = Path(__file__).resolve().parents[2] / "scripts" / "centre" / "slurm-ft.nhc"


def called(folder: Path, program: str) -> list[str]:
    """What NHC hears: the arguments of `die`, then the check's own code."""
    path = folder / "slurm-ft"
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(0o755)
    script = (
        f'die() {{ echo "die $*"; }}\nSLURM_FT="{path}"\n. "{SAMPLE}"\ncheck_slurm_ft --node --gpus 8; echo "code $?"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_nhc_hears_nothing_of_a_good_host(tmp_path: Path) -> None:
    assert called(tmp_path, 'test "$*" = "check --node --gpus 8"') == ["code 0"]


def test_the_first_fault_becomes_the_nodes_note(tmp_path: Path) -> None:
    heard = called(tmp_path, "echo 'ERROR: 7 of 8 GPUs are there'; echo 'ERROR: more'; exit 1")
    assert heard == ["die 1 check_slurm_ft: 7 of 8 GPUs are there", "code 1"]
