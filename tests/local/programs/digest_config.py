"""torchtitan's debug model, made small, whose trainer leaves a digest of its whole state at the end of the run.

For `titan --config digest_config:small`.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from slurm_ft.train import config_registry, titan_ft


def small() -> Any:
    config = config_registry.llama3_debugmodel()
    config.training.seq_len, config.training.local_batch_size = 16, 1
    return config


def _digest(trainer: Any) -> str:
    total = hashlib.sha256()
    states = [*titan_ft.model_state(trainer.model_parts)]
    for optimizer in trainer.optimizers:
        states += titan_ft.optimizer_state(optimizer)["tensors"]
    for fragment in getattr(trainer._sync, "_fragments", ()):
        states.append(fragment.original_parameters)
        states += titan_ft.optimizer_state(fragment._outer_optimizer)["tensors"]
    for state in states:
        for name, tensor in state.items():
            total.update(name.encode())
            total.update(tensor.detach().contiguous().numpy().tobytes() if hasattr(tensor, "numpy") else b"")
    total.update(f"{trainer.step} {trainer.manager.state_dict()}".encode())
    return total.hexdigest()


def _leave_digest(trainer: Any) -> None:
    place = trainer.place
    Path(os.environ["SLURM_FT_RUN"], f"digest.{place.replica}").write_text(f"{trainer.step} {_digest(trainer)}\n")


_meet_ranks = titan_ft.Trainer._meet_ranks


def _meet_and_tell(trainer: Any) -> None:
    _leave_digest(trainer)
    _meet_ranks(trainer)


titan_ft.Trainer._meet_ranks = _meet_and_tell  # type: ignore[method-assign]
