"""Monarch on a slurm-ft allocation: `pip install "slurm-ft[monarch]"`.

    from slurm_ft.monarch import SlurmFTJob

    job = SlurmFTJob({"trainers": 4}, spares=1)        # inside a Slurm job, or on this machine
    hosts = job.state().trainers                       # a Monarch HostMesh
    procs = hosts.spawn_procs(per_host={"gpus": 8})

Each host of a mesh is a *slot*: a Monarch worker loop in a step of its own, under mutual TLS with a certificate
authority of the job. slurm-ft watches the steps and the loops' signs of life. A loop that is lost is started again
within the allocation, on its host if that still answers, else on a spare. Import this before monarch: it sets TLS up.

What Monarch itself cannot do is done around it (seen on 0.7.0; docs/monarch.md has the whole):

  - a mesh cannot be repaired, so each slot is a HostMesh of its own (`job.slots`), and `job.state()` gives new meshes
    over what is there now;
  - a worker loop cannot come back under its old address, so every incarnation has a new port and a new id;
  - a lost host is not reported to `__supervise__`, and calls to it end only after a minute: `slot.race(future)` gives
    the answer or raises SlotLost, whichever comes first.

    worker      the process in a step: Monarch's worker loop, and our connection
    slots       which worker loops there are, and their replacement
    tls         certificates
    client      this process's own
    job         Monarch's job interface
"""

import importlib
from typing import Any

_NAMES = {"Slot": "slots", "SlotLost": "slots", "SlurmFTJob": "job"}

__all__ = ["Slot", "SlotLost", "SlurmFTJob"]


def __getattr__(name: str) -> Any:
    """Names are imported when they are first used: a worker imports this package before it has its certificate."""
    if name not in _NAMES:
        raise AttributeError(f"module 'slurm_ft.monarch' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"slurm_ft.monarch.{_NAMES[name]}"), name)
    except ImportError as error:
        from slurm_ft.errors import UsageError

        raise UsageError(f"Monarch cannot be imported: {error}", 'pip install "/path/to/slurm-ft[monarch]"') from None
