"""A training script as a user of torchft writes it: torchft's own classes, its own store and environment.

It knows nothing of slurm-ft. Started by torchrun it would run in the same way.
"""

import os
import sys
import time
from datetime import timedelta

import torch
from torch import nn
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import LocalSGD

SYNCS = int(sys.argv[1])
SYNC_EVERY = 5

torch.manual_seed(0)
torch.set_num_threads(1)
replica = int(os.environ["REPLICA_GROUP_ID"])
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def load_state_dict(state: dict) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
    min_replica_size=1,
    state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
    load_state_dict=load_state_dict,
    use_async_quorum=False,
    replica_id=f"user_{replica}",
    timeout=timedelta(seconds=30),
    hostname="localhost",
)
data = torch.Generator().manual_seed(replica)
with LocalSGD(manager, model, optimizer, sync_every=SYNC_EVERY):
    while manager.current_step() < SYNCS:
        x = torch.randn(16, 64, generator=data)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True) / 8)
        loss.backward()
        optimizer.step()
        time.sleep(0.05)  # a step of a larger model takes this long
print(f"replica {replica} ends at step {manager.current_step()} with loss {loss.item():.4f}")
manager.shutdown(wait=False)
