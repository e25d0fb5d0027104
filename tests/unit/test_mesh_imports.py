"""The Python API costs nobody who does not use it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import slurm_ft
import slurm_ft.mesh


def imported_by(statement: str) -> set[str]:
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_importing_slurm_ft_imports_neither_torch_nor_zmq_nor_asyncio() -> None:
    found = imported_by("import slurm_ft, slurm_ft.mesh")
    assert not found & {"torch", "zmq", "asyncio", "cloudpickle", "submitit"}


def test_defining_an_actor_needs_no_network_library() -> None:
    found = imported_by("from slurm_ft import Actor, endpoint\nfrom slurm_ft.mesh import ValueMesh, Action")
    assert not found & {"torch", "zmq", "cloudpickle"}


def test_a_worker_loads_no_network_library() -> None:
    assert not imported_by("import slurm_ft.mesh.remote.worker") & {"torch", "zmq"}


def test_a_mesh_needs_no_torch() -> None:
    found = imported_by("from slurm_ft import Allocation, ProcessMesh")
    assert "zmq" in found and "torch" not in found


@pytest.mark.parametrize("module", [slurm_ft, slurm_ft.mesh])
def test_every_name_that_is_offered_is_there_and_no_other(module: object) -> None:
    for name in dir(module):
        assert getattr(module, name, None) is not None or name.startswith("__")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = module.nothing  # type: ignore[attr-defined]
