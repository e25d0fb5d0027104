"""What a person does who has only the docs: a centre's installation, a module, a template, a real job that loses a
host, and reading what happened. The job is submitted under Environment Modules and read under Lmod."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from slurm_ft import events
from slurm_ft.events import Event, Kind
from slurm_ft.testing.devcluster import DevCluster
from tests.centre.conftest import ROOT, ModuleSystem, environment_modules, lmod
from tests.cluster.conftest import devcluster, slurm_programs, slurm_root, wait_until

__all__ = ["devcluster", "slurm_programs", "slurm_root"]


@pytest.fixture(scope="module")
def module_systems() -> tuple[ModuleSystem, ModuleSystem]:
    return environment_modules(), lmod()


def test_install_load_copy_submit_lose_a_host_and_read_what_happened(
    centre: Path, module_systems: tuple[ModuleSystem, ModuleSystem], devcluster: DevCluster, tmp_path: Path
) -> None:
    shutil.copy(ROOT / "tests" / "cluster" / "programs" / "steps.py", tmp_path / "train.py")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.base_exec_prefix + "/bin/python3")
    settings = {**devcluster.settings, "PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    first, second = module_systems

    def shell(system: ModuleSystem, lines: str) -> str:
        return system.shell(f"module load slurm-ft\n{lines}", centre / "share" / "modulefiles", tmp_path, **settings)

    options = "--replicas 2 --spares 1 --min-replicas 1 --gpus-per-node 1 --time 5 --local-run-dir --parsable"
    job = shell(
        first, f"slurm-ft templates copy any_script\nslurm-ft submit {options} any_script.sbatch -- 200"
    ).strip()
    run = tmp_path / "runs" / f"any_script-{job}"

    def found(kind: Kind, replica: int) -> list[Event]:
        return [e for e in events.read(run / "events.jsonl") if (e.kind, e.replica) == (kind, replica)]

    wait_until(lambda: found(Kind.PROGRESSED, 0) and found(Kind.PROGRESSED, 1), 60, "both replicas train")
    dead = found(Kind.AGENT_JOINED, 1)[-1].data["host"]
    devcluster.kill_host(dead)
    try:
        out = shell(second, "slurm-ft status --follow >followed; echo code $?; slurm-ft report; slurm-ft explain 1")
    finally:
        devcluster.revive_host(dead)
    spare = found(Kind.HOST_REPLACED, 1)[-1].data["spare"]
    assert "code 0\n" in out
    assert "(spare)" in out
    assert f"the spare {spare} takes the place of {dead}" in (tmp_path / "followed").read_text()
    # Slurm's word or the silence of the agent, whichever came first.
    assert f"first failure of replica 1: the agent on {dead}" in out or f"Node failure on {dead}" in out
