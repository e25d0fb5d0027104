"""Meshes of real processes on this machine. Whatever a test did to one, nothing of it is left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import pytest

from slurm_ft.launch.local import members
from slurm_ft.mesh import Allocation, ProcessMesh


class MakeMesh(Protocol):
    def __call__(self, hosts: int, gpus: int, **options: Any) -> ProcessMesh: ...


@pytest.fixture
def make_mesh() -> Iterator[MakeMesh]:
    made: list[ProcessMesh] = []

    def make(hosts: int, gpus: int, **options: Any) -> ProcessMesh:
        mesh = Allocation.local(hosts=hosts).processes(per_host={"gpu": gpus}, **options)
        made.append(mesh)
        return mesh

    yield make
    for mesh in made:
        mesh.stop()
        assert members(f"{mesh.folder}#") == []
        assert not mesh.folder.exists()


@pytest.fixture(scope="module")
def mesh() -> Iterator[ProcessMesh]:
    """Two hosts with two processes each, for tests that break nothing."""
    with Allocation.local(hosts=2).processes(per_host={"gpu": 2}) as shared:
        yield shared
    assert members(f"{shared.folder}#") == []
