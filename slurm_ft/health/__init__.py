"""Is a host fit to train? What is looked at, how a look is bounded, and the same on all hosts of a job."""

from __future__ import annotations

from slurm_ft.health.bounded import bounded
from slurm_ft.health.node import Wanted, checks

__all__ = ["Wanted", "bounded", "checks"]
