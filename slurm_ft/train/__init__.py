"""What runs inside a rank. Imports nothing of the controller's side, and no torch by itself.

import slurm_ft.train
kept = slurm_ft.train.keep(model=model, optimizer=optimizer)     see slurm_ft.train.kept.keep
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slurm_ft.train.progress import report, report_phase
from slurm_ft.train.save import LastSave, last_save, on_save, save_requested, saved

if TYPE_CHECKING:
    from slurm_ft.train.kept import Kept

__all__ = ["LastSave", "keep", "last_save", "on_save", "report", "report_phase", "save_requested", "saved"]


def keep(*args: Any, **named: Any) -> Kept:
    """A training state that outlives its process; see `slurm_ft.train.kept.keep`. Imports torch."""
    from slurm_ft.train.kept import keep as make

    return make(*args, **named)
