"""slurm-ft keeps a distributed PyTorch training alive inside one Slurm allocation.

Importing this package imports neither torch nor Slurm: a login node needs only the base install. The names of the
Python API are imported when they are first used.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_API = {
    "Budget": "slurm_ft.spec",
    "Cluster": "slurm_ft.api",
    "Policy": "slurm_ft.spec",
    "ReplicaSpec": "slurm_ft.spec",
    "Run": "slurm_ft.api",
    "RunSpec": "slurm_ft.spec",
}


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module 'slurm_ft' has no attribute {name!r}")
    return getattr(importlib.import_module(_API[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_API])
