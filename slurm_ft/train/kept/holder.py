"""What the two ways of keeping have in common: a name at the keeper, and whether what is held there is ours."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor

from slurm_ft.keeper.client import Client
from slurm_ft.keeper.protocol import close_all
from slurm_ft.train.kept.memory import FORMAT
from slurm_ft.train.kept.state import Sources, local

CLAIM_WITHIN = 30.0
"""Seconds for which the process before is waited for. The agent starts a rank only when the one before is gone."""
ROOM = 64 * 1024
"""Bytes that a record may grow by."""


class Holder:
    """One name at the keeper. `why` collects reasons, in words, for which there is nothing to go on from."""

    def __init__(self, client: Client, name: str, sources: Sources, digest: str, why: list[str]) -> None:
        self.client, self.name, self.sources, self.why = client, name, sources, why
        self._digest = digest

    def claim(self) -> list[int]:
        """The descriptors of what is held for us; none when there is nothing of use, which is given back.

        Raises Refused when its owner lives on, OSError when the keeper is gone.
        """
        word = self.name.rpartition(".")[2]
        found = self.client.get(self.name, claim=True, wait=CLAIM_WITHIN)
        if found is None:
            self.why.append(f"no {word} state is held")
            return []
        wait_for_gpu_teardown(found.owner)
        if found.meta == self._meta:
            return found.descriptors
        close_all(found.descriptors)
        self.why.append(f"the {word} state that is held is of another model or another version of slurm-ft")
        self.drop()
        return []

    def put(self, descriptors: Iterable[int]) -> None:
        self.client.put(self.name, self._meta, list(descriptors))

    def drop(self) -> None:
        self.client.drop(self.name)

    @property
    def _meta(self) -> dict[str, object]:
        return {"format": FORMAT, "digest": self._digest}


def on_gpu(tensor: torch.Tensor) -> bool:
    return bool(local(tensor).device.type == "cuda")


def sharded(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    return {name for name, tensor in tensors.items() if isinstance(tensor, DTensor)}


def wait_for_gpu_teardown(pid: int, within: float = 10.0) -> None:
    """On ROCm: until the kernel has taken the queues of a process that ended from the GPU, which it does by itself
    some time after. Until then work of the dead process may still write. Unproven on hardware."""
    deadline = time.monotonic() + within
    while os.path.exists(f"/sys/class/kfd/kfd/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.01)
