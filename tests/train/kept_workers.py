"""A small training that uses everything random, for the tests of kept state. It runs in a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

STEPS = 400


def state_digest(module: Any, optimizer: Any) -> str:
    total = hashlib.sha256()
    tensors = [*module.state_dict().values()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    for tensor in tensors:
        total.update(tensor.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


def build(width: int = 48) -> tuple[Any, Any, Any]:
    import torch
    from torch import nn

    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(16, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(width, width),
        nn.Linear(width, 4),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.7)


def train(folder: str, environment: dict[str, str], mode: str, options: dict[str, Any]) -> None:
    """Train STEPS steps; each start and the end leave a line in `told`."""
    import random

    import numpy
    import torch

    from slurm_ft.train import keep

    torch.set_num_threads(1)
    os.environ.update(environment)
    random.seed(1), numpy.random.seed(2)
    model, optimizer, schedule = build(options.get("width", 48))
    kept = keep(model, optimizer, extra={"schedule": schedule}, mode=mode, every=options.get("every"))
    found = kept.restore()
    tell(folder, source=found.source, step=found.step, why=found.why)
    for _ in range(found.step, options.get("steps", STEPS)):
        inputs = torch.randn(32, 16) + torch.from_numpy(numpy.random.rand(32, 16)).float() * random.random()
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        with kept.step():
            optimizer.step()
            schedule.step()
    tell(
        folder, end=state_digest(model, optimizer), random=[random.random(), numpy.random.rand(), float(torch.rand(()))]
    )
    kept.close(drop=options.get("drop", True))


def tell(folder: str, **line: Any) -> None:
    handle = os.open(os.path.join(folder, "told"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, json.dumps(line).encode() + b"\n")
    os.close(handle)
