"""How a step is started: by `srun` in an allocation, or as processes of this machine. One interface."""

from __future__ import annotations

from slurm_ft.launch.base import Ended, Launcher, Request, StepHandle, StepRequest

__all__ = ["Ended", "Launcher", "Request", "StepHandle", "StepRequest"]
