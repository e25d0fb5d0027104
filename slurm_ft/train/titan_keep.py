"""Kept state for the titan adapter: what of a trainer is kept, and when it is whole.

Between two synchronisations a step is whole when it has ended (`settled`). A step that ends in a synchronisation
is whole at one more point: its inner step is done and the quorum has not been asked yet. There a replica waits for
its peers, so a kill is likely there; a replica that comes back at that point goes on with the synchronisation
(`finish_pending`). From where weights are written (the reduction is there, or a state from a peer) until the step has
settled nothing is whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slurm_ft.train.kept import keep
from slurm_ft.train.kept.keep import after
from slurm_ft.train.kept.torchft_sync import fragments, in_flight
from slurm_ft.train.progress import report_phase

if TYPE_CHECKING:
    from slurm_ft.train.titan_ft import Trainer


class Keeping:
    """The kept state of one trainer. Made after its synchronisation context and before its first step."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.pending = False
        """Is the next thing to do the synchronisation of an inner step that was done before the restart?"""
        self.kept = keep(
            trainer.model_parts,
            list(trainer.optimizers),
            extra={"trainer": _TrainerPart(trainer)},
            manager=trainer.manager,
            sync=trainer._sync,
        )

    def restore(self) -> bool:
        """Go on from kept state if it is newer than what is on disk; else load what is there. True for the first."""
        trainer = self._trainer
        disk = int(trainer.of_rank_0("disk", lambda: newest_on_disk(trainer)))
        found = self.kept.restore(newer_than=disk)
        if found.source == "none":
            self._load_from_disk(disk)
        else:
            trainer._set_schedules(trainer.step)
            self.pending = found.pending
            trainer.step -= found.pending  # the loop counts it again
        if self.kept.active:
            self._watch()
        return found.source != "none"

    def _load_from_disk(self, step: int) -> None:
        """The checkpoint of this step, or with -1 what a training without one begins with."""
        trainer = self._trainer
        if trainer.checkpointer.load(step=step):  # of step 0 too: weights to begin with
            for fragment in fragments(trainer._sync):
                fragment.save_parameters()
        if trainer.step:
            report_phase("healed", source="disk", step=trainer.step)
        trainer._enter_interval()
        trainer._committed_step, trainer._first_step = trainer.step, trainer._boundary

    # --- when it is whole ------------------------------------------------------------------------------------

    def _watch(self) -> None:
        trainer, kept = self._trainer, self.kept
        optimizers = trainer.optimizers
        optimizers.register_step_pre_hook(lambda *_: kept.begin())
        before_sync = optimizers.register_step_post_hook(lambda *_: self._stepped())
        optimizers._optimizer_step_post_hooks.move_to_end(before_sync.id, last=False)
        # The first thing that a synchronisation writes; before that it waits for the peers.
        writers = [(fragment, "restore_parameters") for fragment in fragments(trainer._sync)]
        if trainer._sync is not None and not writers:
            writers = [(trainer._sync, "_perform_sync")]
        for owner, name in writers:
            setattr(owner, name, after(kept.begin, getattr(owner, name)))

    def _stepped(self) -> None:
        """The inner step is done. If a synchronisation is next, this is a point to come back to."""
        sync = self._trainer._sync
        if sync is None or int(getattr(sync, "_fragment_sync_delay", 0)) > 0:
            return
        if sync._local_step + 1 >= self._trainer.interval:
            self.kept.commit(self._trainer.step, pending=True)

    def settled(self) -> None:
        """The step, and its synchronisation if it had one, is done.

        A snapshot is taken after each synchronisation of DiLoCo or local SGD: from there the inner steps of the
        interval can be done again, bit for bit, as long as the peers have not synchronised without this replica.
        """
        trainer = self._trainer
        if not in_flight(trainer._sync):
            begins = trainer.interval > 1 and trainer.step == trainer._committed_step
            self.kept.commit(trainer.step, pending=self.pending, snapshot=begins)

    def finish_pending(self) -> None:
        """In place of a step: the synchronisation of the one before the restart."""
        self.pending = False
        trainer = self._trainer
        trainer._sync._step_post_hook(trainer.optimizers, (), {})
        trainer._set_schedules(trainer.step)
        trainer._heals_seen = trainer._heals()

    def close(self) -> None:
        """The training has ended well."""
        self.kept.close()


def newest_on_disk(trainer: Trainer) -> int:
    """The step of the checkpoint that would be loaded; -1 when there is none."""
    checkpointer, step = trainer.checkpointer, int(trainer.config.checkpoint.load_step)
    if not checkpointer.enable:
        return -1
    return step if step >= 0 else int(checkpointer._find_load_step())


class _TrainerPart:
    """How far a trainer is, apart from its tensors."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "step": trainer.step,
            "tokens": trainer.ntokens_seen,
            "committed": trainer._committed_step,
            "first": trainer._first_step,
            "loader": None if trainer.loader_follows_step else trainer.dataloader.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer.step, trainer.ntokens_seen = state["step"], state["tokens"]
        trainer._committed_step, trainer._first_step = state["committed"], state["first"]
        if state["loader"] is not None:
            trainer.dataloader.load_state_dict(state["loader"])
