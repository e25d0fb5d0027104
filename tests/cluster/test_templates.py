"""Each template, submitted on a real Slurm as a user would, made small by options that win over its lines."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_ft import events
from slurm_ft.cli.templates import names, text
from slurm_ft.events import Event, Kind
from slurm_ft.testing.devcluster import DevCluster
from tests.cluster.conftest import wait_until

SLURM_FT = str(Path(sys.executable).with_name("slurm-ft"))
SMALL = ("--replicas", "2", "--min-replicas", "1", "--time", "5", "--local-run-dir")
GPU = ("--gpus-per-node", "1")
OPTIONS = {
    "any_script": GPU,
    "chain": (*GPU, "--sbatch-arg=--array=1-2%1"),
    "debug_one_node": (),
    "infiniband_mi300x": GPU,
    "nvidia_h100": GPU,
    "slingshot_mi250x": (*GPU, "--cpus-per-node", "1"),
    "torchtitan_diloco": (*GPU, "--spares", "0"),
    "torchtitan_hsdp": GPU,
}


def test_every_template_is_submitted_here() -> None:
    assert sorted(OPTIONS) == names()


class Folder:
    """A user's folder with a template and a training script that does nothing for a moment."""

    def __init__(self, cluster: DevCluster, place: Path) -> None:
        self.place = place
        shutil.copy(Path(__file__).with_name("programs") / "steps.py", place / "train.py")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environ = {**cluster.environ, "PATH": path, "OMP_NUM_THREADS": "1"}

    def call(self, *argv: str, code: int = 0) -> str:
        done = subprocess.run(
            argv, env=self.environ, cwd=self.place, capture_output=True, text=True, errors="replace", timeout=100
        )
        left = "\n".join(path.read_text(errors="replace") for path in self.place.glob("slurm-*.out"))
        assert done.returncode == code, done.stdout + done.stderr + left
        return done.stdout + done.stderr


@pytest.fixture
def folder(devcluster: DevCluster, tmp_path: Path) -> Folder:
    return Folder(devcluster, tmp_path)


@pytest.mark.parametrize("name", names())
def test_a_copied_template_is_submitted_and_its_run_ends_well(folder: Folder, name: str) -> None:
    folder.call(SLURM_FT, "templates", "copy", name)
    steps = ("--steps", "12", "--sync-steps", "6") if name == "torchtitan_diloco" else ("--steps", "4")
    arguments = steps if "titan" in name else ("3",)
    out = folder.call(SLURM_FT, "submit", *SMALL, *OPTIONS[name], "--", f"{name}.sbatch", *arguments)
    assert "2 of 2 replicas finished" in out
    if name == "chain":
        done = [folder.place / f"slurm-{job}_2.out" for job in _array_jobs(folder)]
        wait_until(lambda: any("the run is done" in path.read_text() for path in done if path.exists()), 30)


def _array_jobs(folder: Folder) -> set[str]:
    wait_until(lambda: list(folder.place.glob("slurm-*_1.out")), 20)
    return {path.name[len("slurm-") :].partition("_")[0] for path in folder.place.glob("slurm-*_1.out")}


def test_the_next_link_of_a_chain_goes_on_in_the_same_run_folder_when_time_is_up(folder: Folder) -> None:
    folder.call(SLURM_FT, "templates", "copy", "chain")
    folder.call(SLURM_FT, "submit", *SMALL, *OPTIONS["chain"], "--no-wait", "--", "chain.sbatch", "400")
    log = folder.place / "runs" / "chain" / "events.jsonl"

    def seen(kind: Kind) -> list[Event]:
        return [event for event in events.read(log) if event.kind is kind] if log.exists() else []

    wait_until(lambda: seen(Kind.PROGRESSED), 30, "the first link trains")
    folder.call("scancel", "--signal=USR2", "--batch", seen(Kind.RUN_STARTED)[0].data["job_id"])
    wait_until(lambda: len(seen(Kind.RUN_ENDED)) == 2, 90, "the second link ends")
    assert [event.data["code"] for event in seen(Kind.RUN_ENDED)] == [75, 0]
    assert len({event.data["job_id"] for event in seen(Kind.RUN_STARTED)}) == 2


def test_the_lines_count_too_when_the_script_is_submitted_with_plain_sbatch(folder: Folder) -> None:
    script = text("debug_one_node").replace("# SLURM_FT ", "# SLURM_FT --run-dir=plain --name=lines ")
    (folder.place / "job.sbatch").write_text(script)
    folder.call("sbatch", "--wait", "job.sbatch", "3")
    out = folder.call(SLURM_FT, "status", "plain", "--follow")
    assert "2 of 2 replicas finished" in out
    assert '"name": "lines"' in (folder.place / "plain" / "run.json").read_text()


def test_the_scripts_own_options_win_over_its_lines_and_the_command_line_over_both(folder: Folder) -> None:
    script = text("debug_one_node").replace("slurm-ft run --", "slurm-ft run --restarts-by-step 7 --name own --")
    script = script.replace("# SLURM_FT ", "#SLURM_FT --restarts-by-step=5 --name=lines ")
    (folder.place / "job.sbatch").write_text(script)
    folder.call(SLURM_FT, "submit", "--name", "typed", "--local-run-dir", "--run-dir", "r", "--", "job.sbatch", "3")
    spec = (folder.place / "r" / "run.json").read_text()
    assert '"name": "typed"' in spec
    assert '"restarts": 7' in spec


def test_what_slurm_refuses_is_said_with_its_reason(folder: Folder) -> None:
    folder.call(SLURM_FT, "templates", "copy", "any_script")
    out = folder.call(SLURM_FT, "submit", "-p", "nowhere", "--local-run-dir", "any_script.sbatch", code=2)
    assert "Slurm cannot give what was asked" in out and "partition" in out
