"""What runs inside a rank. Imports nothing of the controller's side, and no torch by itself."""

from slurm_ft.train.progress import report, report_phase
from slurm_ft.train.save import LastSave, last_save, on_save, save_requested, saved

__all__ = ["LastSave", "last_save", "on_save", "report", "report_phase", "save_requested", "saved"]
