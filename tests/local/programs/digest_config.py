"""torchtitan's debug model, made small, whose trainer leaves a digest of its whole state at the end of the run.

For `titan --config digest_config:small`. KILLS, a JSON list of [replica, attempt, step, where], has ranks kill
themselves with SIGKILL: in the `forward` pass, within the `optimizer` step, before they ask for the `quorum`, or
between the vote on a `commit` and the outer step.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

from slurm_ft.train import config_registry, ft, titan_ft, titan_state

KILLS = json.loads(os.environ.get("KILLS", "[]"))
_trainer: list[Any] = []


def _maybe_die(where: str) -> None:
    step = _trainer[0].step if _trainer else 0
    if [int(os.environ["SLURM_FT_REPLICA"]), int(os.environ["SLURM_FT_ATTEMPT"]), step, where] in KILLS:
        os.kill(os.getpid(), signal.SIGKILL)


def small() -> Any:
    config = config_registry.llama3_debugmodel()
    config.training.seq_len, config.training.local_batch_size = 16, 1
    return config


def _digest(trainer: Any) -> str:
    total = hashlib.sha256()
    states = [*titan_state.model_state(trainer.model_parts)]
    for optimizer in trainer.optimizers:
        states += titan_state.optimizer_state(optimizer)["tensors"]
    for fragment in getattr(trainer._sync, "_fragments", ()):
        states.append(fragment.original_parameters)
        states += titan_state.optimizer_state(fragment._outer_optimizer)["tensors"]
    for state in states:
        for name, tensor in state.items():
            total.update(name.encode())
            total.update(tensor.detach().contiguous().numpy().tobytes() if hasattr(tensor, "numpy") else b"")
    total.update(f"{trainer.step} {trainer.manager.state_dict()}".encode())
    return total.hexdigest()


def _leave_digest(trainer: Any) -> None:
    place = trainer.place
    Path(os.environ["SLURM_FT_RUN"], f"digest.{place.replica}.{place.rank}").write_text(
        f"{trainer.step} {_digest(trainer)}\n"
    )


_meet_ranks = titan_ft.Trainer._meet_ranks


def _meet_and_tell(trainer: Any) -> None:
    _leave_digest(trainer)
    _meet_ranks(trainer)


titan_ft.Trainer._meet_ranks = _meet_and_tell  # type: ignore[method-assign]


_loop, _forward = titan_ft.Trainer._loop, titan_ft.Trainer.forward_backward_step
_start_quorum, _should_commit = ft.Manager.start_quorum, ft.Manager.should_commit


def _loop_with_kills(trainer: Any, *arguments: Any) -> None:
    _trainer.append(trainer)
    for optimizer in trainer.optimizers:
        optimizer.register_step_post_hook(lambda *_: _maybe_die("optimizer"))
    _loop(trainer, *arguments)


def _forward_or_die(trainer: Any, **named: Any) -> Any:
    _maybe_die("forward")
    return _forward(trainer, **named)


def _start_quorum_or_die(manager: Any, *arguments: Any, **named: Any) -> None:
    _maybe_die("quorum")
    _start_quorum(manager, *arguments, **named)


def _should_commit_or_die(manager: Any, *arguments: Any, **named: Any) -> bool:
    committed = _should_commit(manager, *arguments, **named)
    _maybe_die("commit")
    return committed


titan_ft.Trainer._loop = _loop_with_kills  # type: ignore[method-assign]
titan_ft.Trainer.forward_backward_step = _forward_or_die
ft.Manager.start_quorum = _start_quorum_or_die  # type: ignore[method-assign]
ft.Manager.should_commit = _should_commit_or_die  # type: ignore[method-assign]
