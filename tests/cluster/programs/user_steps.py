"""A training script as a user of torchft writes it: averages its gradients in each step, with torchft's own classes.

It knows nothing of slurm-ft and of the hosts it runs on. The second argument is the time-out of each replica's process
group in seconds: what it waits for a peer that is gone without a word. A replica that finds the file `hold-N` (N its
number) in the folder of the third argument puts `held` beside it, and keeps its peers waiting in their collective for
as long as the file is there.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo

STEPS, FOLDER = int(sys.argv[1]), Path(sys.argv[3])
PATIENCE = float(sys.argv[2].split(",")[int(os.environ["REPLICA_GROUP_ID"])])

torch.manual_seed(0)
torch.set_num_threads(1)
replica = int(os.environ["REPLICA_GROUP_ID"])
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
inner = torch.optim.SGD(model.parameters(), lr=0.01)


def load_state_dict(state: dict) -> None:
    model.load_state_dict(state["model"])
    inner.load_state_dict(state["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=PATIENCE)),
    min_replica_size=1,
    state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
    load_state_dict=load_state_dict,
    use_async_quorum=False,
    replica_id=f"user_{replica}",
    timeout=timedelta(seconds=2 * PATIENCE),
)
optimizer = Optimizer(manager, inner)
data = torch.Generator().manual_seed(replica)
while manager.current_step() < STEPS:
    optimizer.zero_grad()
    x = torch.randn(16, 64, generator=data)
    nn.functional.mse_loss(model(x), x.sum(1, keepdim=True) / 8).backward()
    if (FOLDER / f"hold-{replica}").exists():
        time.sleep(0.5)
        (FOLDER / "held").touch()
        while (FOLDER / f"hold-{replica}").exists():
            time.sleep(0.1)
    for parameter in model.parameters():
        manager.allreduce(parameter.grad).wait()
    optimizer.step()
    time.sleep(0.1)  # a step of a larger model takes this long
manager.shutdown(wait=False)
