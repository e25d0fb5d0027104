"""torch.distributed over the processes of a mesh: on demand, by dimension, and again after a repair."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from slurm_ft.errors import UsageError
from slurm_ft.mesh import ActorError, MeshView, current_mesh, current_rank
from tests.mesh.conftest import MakeMesh
from tests.waiting import wait_until

pytest.importorskip("torch", reason="needs torch (the extra `train`)")
SOON = 90.0


def sums(mesh: MeshView) -> dict[str, float]:
    """Of each dimension, the sum of the ranks along it."""
    import torch
    import torch.distributed as dist

    device_mesh = mesh.torch_device_mesh(timeout=SOON)
    found = {}
    for label in device_mesh.mesh_dim_names:
        value = torch.tensor(float(mesh.point.rank))
        dist.all_reduce(value, group=device_mesh.get_group(label))
        found[label] = value.item()
    return found


def group_of(gpu: int) -> float:
    import torch
    import torch.distributed as dist

    if current_rank()["gpu"] != gpu:
        return -1.0
    current_mesh().slice(gpu=gpu).torch_device_mesh(timeout=SOON)
    value = torch.tensor(1.0)
    dist.all_reduce(value)
    return value.item()


def lose_one(pid_of: Any) -> None:
    if current_rank()["host"] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    current_mesh().torch_device_mesh(timeout=SOON)


def test_a_device_mesh_has_the_meshs_dimensions_and_can_be_made_again_after_a_loss(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(2, 2, preload=("torch.distributed.device_mesh",)).slice(replica=0)
    first = mesh.call(sums, mesh).get(SOON).check()
    assert first.item(host=0, gpu=1) == {"host": 1 + 3, "gpu": 0 + 1}
    assert first.item(host=1, gpu=0) == {"host": 0 + 2, "gpu": 2 + 3}
    lost = mesh.call(lose_one, None).get(SOON)
    assert [point["host"] for point, _ in lost.failed() if point["host"] == 1] == [1, 1]
    assert lost.ok() == []  # those that waited to meet the lost ones were told
    assert any(isinstance(error, ActorError) and "killed by SIGKILL" in str(error) for _, error in lost.failed())
    wait_until(lambda: mesh.generation == 2)
    again = mesh.split(gpu=("dp", "tp"), tp=1)
    values = again.call(sums, again).get(SOON).check()
    assert values.item(host=0, dp=1, tp=0) == {"host": 4, "dp": 1, "tp": 1}
    assert list(mesh.call(group_of, 1).get(SOON).values()) == [-1, 2, -1, 2]


def test_the_client_is_told_where_a_device_mesh_belongs(make_mesh: MakeMesh) -> None:
    with pytest.raises(UsageError, match="for the processes of the mesh"):
        make_mesh(1, 1).torch_device_mesh()
