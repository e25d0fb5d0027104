"""torch.distributed over the processes of a mesh, started when somebody asks for it.

The first process opens a TCPStore on a port of its own and tells the others through the mesh when all are
there; so every start has a fresh store, nothing of an attempt before a repair is met again, and a process
that was lost before is not waited for.
"""

from __future__ import annotations

import json
import os
from typing import Any

from slurm_ft.mesh.actor import Context, MeshView


def device_mesh(mesh: MeshView, context: Context, backend: str, timeout: float) -> Any:
    """See `MeshView.torch_device_mesh`."""
    import datetime

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    assert context.meet is not None
    rank, within = mesh.point.rank, datetime.timedelta(seconds=timeout)
    gpus = torch.cuda.is_available()
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    leave()
    # One start is one key: the call, the processes, and how many starts of theirs the call has had before.
    places = json.dumps([mesh.region.sizes, mesh.region.strides, mesh.region.offset])
    key = f"{context.call}/{_starts(context.call, places)}/{places}"
    if rank == 0:
        store = dist.TCPStore(context.address, 0, is_master=True, wait_for_workers=False, timeout=within)
        context.meet(key, list(mesh.region), f"{context.address} {store.port}", timeout)
    else:
        address, port = context.meet(key, list(mesh.region), None, timeout).split()
        store = dist.TCPStore(address, int(port), is_master=False, timeout=within)
    chosen = backend or ("cpu:gloo,cuda:nccl" if gpus else "gloo")
    dist.init_process_group(chosen, store=store, rank=rank, world_size=mesh.size, timeout=within)
    return init_device_mesh("cuda" if gpus else "cpu", mesh.region.sizes, mesh_dim_names=mesh.region.labels)


_started: tuple[int, dict[str, int]] = (0, {})


def _starts(call: int, places: str) -> int:
    global _started
    if _started[0] != call:
        _started = (call, {})
    count = _started[1].get(places, 0)
    _started[1][places] = count + 1
    return count


def leave() -> None:
    """Leave the process group of an earlier start, without waiting for peers that may be dead."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort is not None:
        abort()
    if dist.is_initialized():
        dist.destroy_process_group()
