"""What a training's state is made of: its tensors by name, and the small rest.

`Sources` knows where to find them: modules, optimizers, further tensors, objects with `state_dict`. It gives the
tensors as they are (the own shard of a DTensor), and can put other memory under a tensor without anybody who
holds that tensor noticing: parameter, optimizer and model go on with the same objects.
"""

from __future__ import annotations

import array
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from slurm_ft.train.kept.layout import Entry

State = dict[str, Any]
BUFFER = "buffer."
"""How the names of buffers begin. A forward pass may write them (BatchNorm does), at any time: they are never kept
as live views but copied, and copied at once."""
Part = Any
"""An object with `state_dict()` and `load_state_dict(state)`."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose memory it is: a DTensor's own shard, the very object."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def module_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that are state, by name."""
    found: dict[str, torch.Tensor] = {}
    for prefix, inner in module.named_modules():
        for name, buffer in inner.named_buffers(recurse=False):
            if name not in inner._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def counts_on_host(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Does the optimizer count this parameter's steps on the host? torch does unless it is capturable or fused."""
    groups = [group for group in optimizer.param_groups if any(parameter is other for other in group["params"])]
    return not any(group.get("capturable") or group.get("fused") for group in groups)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Sources:
    """Where the parts of a state are. `tensors` is asked again each time: a dict, or a function that gives one."""

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        tensors: Callable[[], Mapping[str, torch.Tensor]] = dict,
        extra: Mapping[str, Part] | None = None,
    ) -> None:
        self.modules, self.optimizers = list(modules), list(optimizers)
        self.extra_tensors, self.extra = tensors, dict(extra or {})

    # --- tensors ---------------------------------------------------------------------------------------------

    def given(self) -> dict[str, torch.Tensor]:
        """The tensors that are there from the start, and by which one model is told from another."""
        found = {f"tensor.{name}": tensor for name, tensor in self.extra_tensors().items()}
        for index, module in enumerate(self.modules):
            found |= {f"model.{index}.{name}": tensor for name, tensor in module.named_parameters()}
            found |= {f"{BUFFER}{index}.{name}": tensor for name, tensor in module_buffers(module).items()}
        return found

    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """Those that optimizers make in their first step, as far as they are there."""
        found = {}
        for index, optimizer in enumerate(self.optimizers):
            for number, parameter in enumerate(parameters_of(optimizer)):
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        found[f"optimizer.{index}.{number}.{key}"] = value
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.given() | self.optimizer_tensors()

    def forms(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Names, types and (local) shapes of the given tensors, and how many parameters each optimizer has."""
        forms = [
            (name, str(tensor.dtype).removeprefix("torch."), tuple(local(tensor).shape))
            for name, tensor in self.given().items()
        ]
        for index, optimizer in enumerate(self.optimizers):
            kind = type(optimizer).__qualname__
            forms.append((f"optimizer.{index}", kind, tuple(len(g["params"]) for g in optimizer.param_groups)))
        return forms

    def make(self, entry: Entry, view: torch.Tensor, to_device: bool = False) -> None:
        """Give an optimizer the state tensor that it had in another process; with `to_device` where it would have
        made it: a count of steps stays on the host unless the optimizer counts on the GPU."""
        kind, index, number, key = entry.name.split(".", 3)
        assert kind == "optimizer"
        optimizer = self.optimizers[int(index)]
        parameter = parameters_of(optimizer)[int(number)]
        value = view
        if to_device and not (key == "step" and counts_on_host(optimizer, parameter)):
            value = view.to(local(parameter).device)
        if entry.sharded and isinstance(parameter, DTensor):
            value = DTensor.from_local(
                value, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
            )
        optimizer.state[parameter][key] = value

    def moved(self) -> None:
        """Other memory was put under parameters: tell FSDP, which remembers where its shards are."""
        for module in self.modules:
            for inner in module.modules():
                if hasattr(inner, "_get_fsdp_state"):
                    for group in inner._get_fsdp_state()._fsdp_param_groups:
                        for parameter in group.fsdp_params:
                            parameter.reset_sharded_param()

    # --- the small rest --------------------------------------------------------------------------------------

    def record(self) -> State:
        return {
            "rng": random_states(),
            "groups": [
                [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
                for optimizer in self.optimizers
            ],
            "plain": [self._plain(optimizer) for optimizer in self.optimizers],
            "extra": {name: part.state_dict() for name, part in self.extra.items()},
        }

    def load_record(self, record: State) -> None:
        """Raises ValueError when the record is of other optimizers or other extra parts."""
        if set(record["extra"]) != set(self.extra):
            names = sorted(set(record["extra"]) ^ set(self.extra))
            raise ValueError(f"the kept state has other extra parts: {', '.join(names)}")
        for optimizer, groups, plain in zip(self.optimizers, record["groups"], record["plain"], strict=True):
            for group, kept in zip(optimizer.param_groups, groups, strict=True):
                group.update(kept)
            parameters = parameters_of(optimizer)
            for number, key, value in plain:
                optimizer.state[parameters[number]][key] = value
        for name, part in self.extra.items():
            part.load_state_dict(record["extra"][name])
        load_random_states(record["rng"])

    @staticmethod
    def _plain(optimizer: torch.optim.Optimizer) -> list[list[Any]]:
        return [
            [number, key, value]
            for number, parameter in enumerate(parameters_of(optimizer))
            for key, value in optimizer.state.get(parameter, {}).items()
            if not isinstance(value, torch.Tensor)
        ]


def put_under(tensor: torch.Tensor, view: torch.Tensor, copy: bool) -> None:
    """From now on `tensor` is this memory; with `copy` its values go there first."""
    own = local(tensor)
    with torch.no_grad():
        if copy:
            view.copy_(own)
        own.data = view


def is_under(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    return local(tensor).data_ptr() == view.data_ptr() or not view.numel()


def random_states() -> State:
    """Of Python, of numpy where it is imported, of torch on the CPU and on this rank's GPU."""
    version, words, gauss = random.getstate()
    states: State = {
        "python": [version, array.array("I", words).tobytes(), gauss],
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = [kind, keys.tobytes(), *rest]
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return states


def load_random_states(states: State) -> None:
    version, words, gauss = states["python"]
    random.setstate((version, tuple(array.array("I", words)), gauss))
    torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))
    if "numpy" in states:
        import numpy

        kind, keys, *rest = states["numpy"]
        numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(states["cuda"]), dtype=torch.uint8))
