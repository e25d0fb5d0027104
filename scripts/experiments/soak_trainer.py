"""A small training for the soak: local SGD between replicas with torchft, whose result does not depend on who was away.

    python soak_trainer.py SYNCS PAUSE

Each interval of five steps fits a fixed network's outputs; the batch is a function of (replica, step). PAUSE seconds a
step stand for the work of a larger model; the mathematics are the same without. At the end each replica prints the
loss on one fixed batch.
"""

import os
import sys
import time
from datetime import timedelta

import torch
from torch import nn
from torchft import ProcessGroupGloo
from torchft.local_sgd import LocalSGD

from slurm_ft.train.ft import Manager, own_address
from slurm_ft.train.progress import report

SYNCS, PAUSE = int(sys.argv[1]), float(sys.argv[2])
SYNC_EVERY = 5

torch.set_num_threads(1)
replica = int(os.environ["REPLICA_GROUP_ID"])


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))


teacher, model = network(1), network(2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return x, teacher(x)


def load_state_dict(state: dict) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
    min_replica_size=1,
    state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
    load_state_dict=load_state_dict,
    use_async_quorum=False,
    replica_id=f"soak_{replica}",
    timeout=timedelta(seconds=30),
    hostname=own_address(os.environ),
)
with LocalSGD(manager, model, optimizer, sync_every=SYNC_EVERY):
    while (sync := manager.current_step()) < SYNCS:
        for inner in range(SYNC_EVERY):
            step = sync * SYNC_EVERY + inner
            x, y = batch(1000 * step + replica)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            time.sleep(PAUSE)
            report(step + 1, loss.item())
            optimizer.step()
x, y = batch(10**9)
with torch.no_grad():
    print(f"final loss {nn.functional.mse_loss(model(x), y).item():.6f}", flush=True)
manager.shutdown(wait=False)
