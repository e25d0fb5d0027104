"""slurm-ft keeps a distributed PyTorch training alive inside one Slurm allocation.

Importing this package imports neither torch nor Slurm: a login node needs only the base install. The names
of the Python API are imported when they are first used.
"""

from typing import Any

__version__ = "0.1.0"

_MESH = ("Actor", "Allocation", "ProcessMesh", "current_rank", "endpoint")


def __getattr__(name: str) -> Any:
    if name in _MESH:
        import slurm_ft.mesh

        return getattr(slurm_ft.mesh, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MESH])
