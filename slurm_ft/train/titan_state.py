"""What goes from a donor to a replica that heals: this rank's own shards, with no collective, no hook and no copy."""

from __future__ import annotations

from typing import Any

import slurm_ft.train.titan_cpu  # noqa: F401 - before anything else of torchtitan

# ruff: isort: split
import torch
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpoint_utils import init_optim_state

from slurm_ft.train.kept.state import module_buffers

State = dict[str, Any]


def own_shard(value: Any) -> Any:
    """A tensor's own shard, sharing its memory; anything else as it is."""
    if isinstance(value, DTensor):
        return value.to_local().detach()
    return value.detach() if isinstance(value, torch.Tensor) else value


def _tensors(part: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and the buffers that are state, by name."""
    return dict(part.named_parameters()) | module_buffers(part)


def model_state(parts: list[torch.nn.Module]) -> list[State]:
    """This rank's shards of the model. No collective, no hook, no copy."""
    with torch.no_grad():
        return [{name: own_shard(tensor) for name, tensor in _tensors(part).items()} for part in parts]


def load_model_state(parts: list[torch.nn.Module], state: list[State]) -> None:
    """Raises ValueError when the donor's model is another one."""
    with torch.no_grad():
        for part, sent in zip(parts, state, strict=True):
            own = _tensors(part)
            if own.keys() != sent.keys():
                names = ", ".join(sorted(own.keys() ^ sent.keys())[:5])
                raise ValueError(f"the peer trains another model; the first differences: {names}")
            for name, tensor in own.items():
                own_shard(tensor).copy_(sent[name])


def optimizer_state(optimizer: torch.optim.Optimizer) -> State:
    """This rank's shards of an optimizer's state, and its groups' settings as they are now."""
    init_optim_state(optimizer)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    with torch.no_grad():
        tensors = [
            {key: own_shard(value) for key, value in optimizer.state[parameter].items()}
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
    return {"groups": groups, "tensors": tensors}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: State) -> None:
    init_optim_state(optimizer)
    for group, sent in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update(sent)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with torch.no_grad():
        for parameter, sent in zip(parameters, state["tensors"], strict=True):
            own = optimizer.state[parameter]
            for key, value in sent.items():
                if isinstance(own.get(key), torch.Tensor):
                    own_shard(own[key]).copy_(value)
                else:
                    own[key] = value
