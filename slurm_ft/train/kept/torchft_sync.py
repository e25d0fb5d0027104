"""What torchft's DiLoCo and LocalSGD hold between two synchronisations, as parts of a kept state.

DiLoCo: the parameters of the last synchronisation, the outer optimizers' states, and how many inner steps have
been done since. LocalSGD: that number alone. Field names are those of torchft 0.2.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def fragments(sync: Any) -> list[Any]:
    return list(getattr(sync, "_fragments", ()))


def outer_optimizers(sync: Any) -> list[torch.optim.Optimizer]:
    return [fragment._outer_optimizer for fragment in fragments(sync)]


def sync_tensors(
    sync: Any, others: Callable[[], Mapping[str, torch.Tensor]] = dict
) -> Callable[[], dict[str, torch.Tensor]]:
    """A function that gives the parameters of the last synchronisation, by name, and the `others`."""

    def tensors() -> dict[str, torch.Tensor]:
        originals = {
            f"original.{fragment._fragment_id}.{name}": tensor
            for fragment in fragments(sync)
            for name, tensor in fragment.original_parameters.items()
        }
        return originals | dict(others())

    return tensors


def in_flight(sync: Any) -> bool:
    """Is a reduction under way? Its results would be lost with the process, so the state is not whole."""
    return any(fragment._allreduce_work for fragment in fragments(sync))


class SyncPart:
    """How far a DiLoCo or LocalSGD is within its interval."""

    def __init__(self, sync: Any) -> None:
        self._sync = sync

    def state_dict(self) -> dict[str, int]:
        return {"local_step": int(self._sync._local_step)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._sync._local_step = state["local_step"]
