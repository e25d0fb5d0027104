"""Named dimensions over the hosts of an allocation, and processes along them that Python code can call.

Pure arithmetic and decisions are here; what starts processes and talks to them is in `remote`, and is
imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "Action": "supervision",
    "Actor": "actor",
    "ActorError": "errors",
    "ActorMesh": "remote.process_mesh",
    "Allocation": "remote.allocation",
    "CallTimeout": "errors",
    "Context": "actor",
    "Extent": "extent",
    "Future": "futures",
    "MeshError": "errors",
    "MeshFailure": "errors",
    "MeshView": "actor",
    "NotPicklable": "errors",
    "PayloadTooLarge": "errors",
    "Point": "extent",
    "ProcessMesh": "remote.process_mesh",
    "Region": "extent",
    "ResultError": "errors",
    "SupervisionError": "errors",
    "ValueMesh": "values",
    "context": "actor",
    "current_mesh": "actor",
    "current_rank": "actor",
    "endpoint": "actor",
}
__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
