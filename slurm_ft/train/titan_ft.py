"""torchtitan 0.3.0's fault-tolerant trainer, mended by subclasses that a config chooses.

A torchtitan config names the classes of its components; `fault_tolerant(config, place)` puts these in (the first three
are in titan_parts.py, the loader in titan_text.py, what peers send each other in titan_state.py):

FTManager     builds our Manager (it leaves a broken group at once) with time-outs from the config, and asks for
              the quorum in the main thread. torchtitan's per-step mode does so in another thread, which reads
              the weights for a peer while the forward pass gathers them: the healthy donor crashes.
Optimizers    never serves a cached state. torchtitan's cache holds the learning rate of the run's start, and a
              replica healed with it has other weights than its peers for good.
Checkpointer  gives peers the state straight from memory, with nothing written to disk. Each rank sends its own
              shards and takes part in no collective for it, so ranks of one replica may heal from different
              donors. Full checkpoints, when wanted, are written by one replica and at synchronisations only.
TextLoader    a batch is a function of (seed, step, rank). A healed replica takes its peers' step and with it its
              place in the data; no loader state is kept anywhere.
Trainer       synchronises again, with whoever is left, when a synchronisation failed (local_sgd.py); when that
              fails too, the interval is trained again. So the steps of a run that ends well
              are all committed, and a run without enough replicas waits instead of counting idle steps. A
              replica that starts late asks for the quorum at once, not after an interval whose work is thrown
              away. One that starts after the run's end stops.

Words: an *interval* is what lies between two synchronisations: `sync_steps / num_fragments` steps for DiLoCo,
`sync_steps` for local SGD, one step in per-step mode.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import slurm_ft.train.titan_cpu as titan_cpu  # before anything else of torchtitan

# ruff: isort: split
import torch.distributed as dist
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.distributed import utils as dist_utils
from torchtitan.experiments.torchft.config.job_config import FaultTolerantModelSpec
from torchtitan.experiments.torchft.diloco import fragment_llm
from torchtitan.experiments.torchft.manager import maybe_semi_sync_training
from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer
from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer

from slurm_ft.errors import UsageError
from slurm_ft.train import ft, save, titan_keep, titan_save
from slurm_ft.train.kept.torchft_sync import fragments
from slurm_ft.train.local_sgd import synchronise_again
from slurm_ft.train.progress import report, report_again, report_phase
from slurm_ft.train.titan_parts import Checkpointer, FTManager, Optimizers
from slurm_ft.train.titan_place import Place, is_over, mark_end
from slurm_ft.train.titan_state import model_state
from slurm_ft.train.titan_text import TextLoader

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
SYNC_PAUSE = 1.0
"""Seconds between two rounds of tries to synchronise where there is nothing else to do."""


class Trainer(FaultTolerantTrainer):  # type: ignore[misc]
    """torchtitan's fault-tolerant trainer with an own loop; see the head of this file."""

    @dataclass(kw_only=True, slots=True)
    class Config(FaultTolerantTrainer.Config):  # type: ignore[misc]
        fault_tolerance: FTManager.Config = field(default_factory=FTManager.Config)

    step: int

    def __init__(self, config: Config) -> None:
        self.place = Place.of(os.environ)
        self._heals_seen = 0
        self._syncs_seen = 0
        self._logged: float | None = None
        super().__init__(config)
        self._committed_step = 0
        self._first_step = 0
        self._heals_before_sync = 0
        self._peers_were_at = 0
        self._found_nobody = False
        self._quorum_told = -1
        self._sync: Any = None
        self._keeping: titan_keep.Keeping
        self._saver = save.saver()
        self._show = self.metrics_processor.log
        self.metrics_processor.log = self._log_and_remember

    def init_distributed(self) -> Any:
        dimensions = super().init_distributed()
        dist_utils.set_spmd_backend(self.config.parallelism.spmd_backend)
        report_phase("joined")
        return dimensions

    def _log_and_remember(self, step: int, global_avg_loss: float, *rest: Any, **named: Any) -> None:
        if self._heals() > self._heals_seen:
            logger.info("healed from a peer at step %d", step)
            return  # the step that ended in healing had the loss of weights that are gone
        self._logged = float(global_avg_loss)
        self._show(step, global_avg_loss, *rest, **named)

    def _heals(self) -> int:
        return self.manager.heals if self.manager else 0

    @property
    def loader_follows_step(self) -> bool:
        """Does the loader need no state of its own?"""
        return isinstance(self.dataloader, TextLoader)

    @property
    def manager(self) -> ft.Manager | None:
        return self.ft_manager.manager if self.ft_manager.enabled else None

    # -- start

    def _start(self) -> str:
        """How this replica starts: `together` with others, `late` into a running training, or when the run
        is `over`. Rank 0 of the replica finds out; the others follow it."""
        if self.manager is None:
            return "together"
        start, _, step = self.of_rank_0("start", self._look_around).partition(" ")
        self._peers_were_at = int(step or 0)
        return start

    def of_rank_0(self, key: str, find_out: Callable[[], Any]) -> str:
        """What rank 0 of the replica finds out, in each of its ranks; without torchft each finds out by itself."""
        manager = self.manager
        if manager is None or self.place.ranks == 1:
            return str(find_out())
        if self.place.rank == 0:
            manager._store.set(f"slurm_ft/{key}", str(find_out()))
        return str(manager._store.get(f"slurm_ft/{key}").decode())

    def _look_around(self) -> str:
        began = time.monotonic()
        while True:
            if is_over(self.place, self.config.training.steps):
                return "over"
            looked = time.monotonic() - began
            view = ft.view_lighthouse(ft.lighthouse_url())
            if view is None:
                return "together"
            # One that trained a moment ago may have died with this replica's former self.
            heard = view.heard(min(looked, ft.FRESH_SECONDS))
            if heard:
                return f"late {max(view.members[name] for name in heard)}"
            waited = looked > self.config.fault_tolerance.gather_s
            if not view.training and (len(view.replicas) >= self.place.replicas or waited):
                return "together"
            time.sleep(POLL_SECONDS)

    def _passed(self) -> bool:
        """Whether peers have synchronised without this replica since the state that it goes on from: then its own
        work since is lost, and the sooner it asks for theirs the better."""
        manager = self.manager
        if manager is None:
            return False

        def behind() -> bool:
            view = ft.view_lighthouse(ft.lighthouse_url())
            return view is not None and any(view.members[name] > manager.current_step() for name in view.training)

        return self.of_rank_0("passed", behind) == "True"

    def _semi_sync(self) -> Any:
        """torchft's context for DiLoCo or local SGD; None in per-step mode or without torchft."""
        spec = self.config.model_spec
        sync = maybe_semi_sync_training(
            self.config.fault_tolerance,
            ft_manager=self.ft_manager,
            model=self.model_parts[0],
            n_layers=len(getattr(self.model_config, "layers", ())),
            optimizer=self.optimizers,
            fragment_fn=getattr(spec, "fragment_fn", None),
        )
        if hasattr(sync, "_step_post_hook"):
            synchronise_again(sync)
        return sync

    @property
    def interval(self) -> int:
        """Steps from one synchronisation to the next."""
        return int(getattr(self._sync, "_sync_every", 1))

    @property
    def _boundary(self) -> int:
        """The step at which the interval that is going on has begun, or would have."""
        return self.step - self.step % self.interval

    @property
    def _boundary_before(self) -> int:
        """The step at which the interval has begun whose synchronisation is under way, or was just now."""
        return (self.step - 1) // self.interval * self.interval

    def _enter_interval(self) -> None:
        """Have the synchronisation go on from this step. It is a boundary, but for a late joiner that found nobody; one
        that is where its reduction should have begun already (a long `fragment_sync_delay`) does the interval's steps
        again, or it would have reduced nothing at the boundary."""
        if self._sync is None:
            return
        delay = int(getattr(self._sync, "_fragment_sync_delay", 0))
        if self.step % self.interval >= self.interval - delay:
            self.step = self._boundary
            self._set_schedules(self.step)
        self._sync._local_step = self.step % self.interval

    def _join_at_next_sync(self) -> None:
        """After one step rather than an interval whose work would be thrown away."""
        if self._sync is not None:
            delay = int(getattr(self._sync, "_fragment_sync_delay", 0))
            self._sync._local_step = max(self.interval - delay - 1, 0)

    # -- loop

    def train(self) -> None:
        """Train to the last step. Returns when it is committed, or when the run turns out to be over."""
        start = self._start()
        if start == "over":
            logger.info("another replica has finished the run; nothing is left to do")
            return
        with contextlib.ExitStack() as stack:
            self._sync = stack.enter_context(self._semi_sync())
            self._keeping = titan_keep.Keeping(self)
            if self._keeping.restore() and start == "late" and not self._passed():
                start = "together"  # it takes up its own work where it was
            logger.info("training starts at step %d, %s", self.step + 1, start)
            leaf = f"replica_{self.place.replica}" if self.place.fault_tolerant else ""
            profiler = stack.enter_context(
                self.config.profiler.build(global_step=self.step, base_folder=self.config.dump_folder, leaf_folder=leaf)
            )
            if start == "late":
                self._join_at_next_sync()
            else:
                self._resume()
            self._loop(start, profiler)
        if self.step >= self.config.training.steps:
            mark_end(self.place, self.config.training.steps)
            self._keeping.close()
        self._meet_ranks()

    def _resume(self) -> bool:
        """Go on from the run's last complete save, if it is newer than what there is. Is it?"""
        manager = self.manager
        if manager is None:
            return False
        folder = self.of_rank_0(f"resume{manager.syncs}", self._newer_save)
        if not folder:
            return False
        state = titan_save.read(Path(folder), self.place.rank, self.place.ranks)
        self._keeping.kept.begin()
        self._keeping.pending = False
        for key, load in manager._load_state_dict_fns.items():
            load(state["user"][key])
        manager.load_state_dict(state["torchft"])
        logger.info("resumed from the save of step %d", self.step)
        self._enter_interval()
        self._set_schedules(self.step)
        self._committed_step = self.step
        self._first_step = self._boundary - manager.current_step() * self.interval
        return True

    def _newer_save(self) -> str:
        """The folder of the newest complete save, if that is of a later step than ours."""
        last = save.last_save(self.place.run)
        return last.path if last is not None and last.path and last.step > self.step else ""

    def _save_if_asked(self) -> None:
        """After a committed synchronisation: save, if the run was asked to. The replicas are equal, so one writes."""
        manager, saver = self.manager, self._saver
        if manager is None or saver is None:
            return
        id = saver.waiting
        if self.place.ranks > 1:
            id = self.of_rank_0(f"save{manager.syncs}", lambda: saver.waiting)
        if not id:
            return
        saver.take(id)
        if manager.participating_rank() != 0:
            saver.answer(self.step, "", False, "")
            return
        folder = titan_save.folder_of(self.place.folder, self.step).absolute()
        user = {key: state() for key, state in manager._user_state_dicts.items()}
        try:
            titan_save.write(folder, self.place.rank, self.place.ranks, {"user": user, "torchft": manager.state_dict()})
        except OSError as failure:
            saver.answer(self.step, "", False, str(failure))
            return
        saver.answer(self.step, str(folder), True, "")
        if self.place.rank == 0 and self.place.run is not None:
            titan_save.remove_old(self.place.folder, self.place.run / "saved.json", self.step)

    def _loop(self, start: str, profiler: Any) -> None:
        batches = self.batch_generator(self.dataloader)
        late = start == "late"
        while self.should_continue_training():
            self.step += 1
            self.gc_handler.run(self.step)
            try:
                if self._keeping.pending:
                    self._keeping.finish_pending()
                else:
                    self.train_step(batches)
            except DataloaderExhaustedError:
                logger.warning("the data ended before step %d", self.step)
                return
            if self._settle(late):
                if self._left_behind():
                    logger.info("another replica has finished the run; this one stops at step %d", self.step)
                    return
                if self.manager is not None and self.manager.committed:
                    late = False  # before that nobody knows whether there is somebody to heal from
            self._keeping.settled()
            self.step -= self._keeping.pending  # the loop counts it again
            profiler.step()

    def _not_committed(self) -> None:
        """Go back over what was not committed, or where nothing can be gone back over ask again."""
        if self._sync is None or fragments(self._sync):
            if self._heals() > self._heals_before_sync:
                self._committed_step = self._boundary_before  # what was healed is now where its donor goes back to
            logger.warning("step %d was not committed; back to step %d", self.step, self._committed_step)
            self.step = self._committed_step
            self._enter_interval()
            return
        # Local SGD goes back to nothing. The same synchronisation is tried again, and nothing trained on top of it.
        logger.warning("step %d was not committed; it is tried again", self.step)
        self._sync._local_step = self.interval - 1
        self._keeping.pending = True
        report_again()
        time.sleep(SYNC_PAUSE)

    def _left_behind(self) -> bool:
        """Whether the others have finished the run: asked when a synchronisation could not be committed, and
        when a late joiner found nobody to heal from."""
        manager = self.manager
        assert manager is not None
        if manager.committed and not self._found_nobody:
            return False
        steps = self.config.training.steps
        return self.of_rank_0(f"over{manager.syncs}", lambda: str(is_over(self.place, steps))) == "True"

    def train_step(self, data_iterator: Any) -> None:
        """One step, its synchronisation included; reports it."""
        if self.loader_follows_step:
            self.dataloader.seek((self.step - 1) * self.gradient_accumulation_steps)
        self._logged = None
        report(self.step)  # a commit that comes in this step is of this step
        super().train_step(data_iterator)
        heals = self._heals()
        healed, self._heals_seen = heals > self._heals_seen, heals
        # After healing the step is the donor's, and the loss was still that of our own weights.
        report(self.step, None if healed else self._logged, self._tokens(), "train")

    def _tokens(self) -> int:
        """Tokens trained by this replica, all its data-parallel ranks together."""
        dimensions = self.parallel_dims
        ranks = dimensions.get_mesh("batch").size() if dimensions.dp_enabled else 1
        return int(self.ntokens_seen * ranks)

    def _settle(self, late: bool) -> bool:
        """After a step: keep what was committed, go back over what was not. True after a synchronisation. `late`:
        a replica that came into a running training has committed nothing yet."""
        manager = self.manager
        if manager is None:
            self._keep()
            return False
        if manager.syncs == self._syncs_seen:
            return False
        self._syncs_seen = manager.syncs
        if manager.committed:
            nobody = late and self.of_rank_0(f"unhealed{manager.syncs}", lambda: not self._heals()) == "True"
            self._found_nobody = nobody
            if not (nobody and self._resume()):
                # Peers that were ahead and had nothing to give have begun again too, and trained as little. Those of
                # which no second quorum was seen may have been in their first interval, and count as if they were.
                self._align(nobody and self._peers_were_at >= manager.current_step())
                self._enter_interval()
            self._heals_before_sync = self._heals()
            self._committed_step = self.step
        else:
            self._not_committed()
        # A donor hands over its schedule before or after it has stepped it; the step itself is the truth.
        self._set_schedules(self.step)
        if manager.committed:
            self._tell_checksum()
            self._keep()
            self._save_if_asked()
        return True

    def _align(self, begun_again: bool) -> None:
        """Count steps as the peers of this commit do: a late joiner of the very first synchronisation has trained
        fewer, was not healed, and would end later than the others. Where all have begun again at once nobody has
        trained an interval."""
        assert self.manager is not None
        synchronised = self.manager.current_step()
        trained = synchronised * self.interval
        alone = self.manager.num_participants() == 1
        healed = self._heals() > self._heals_before_sync
        if healed and synchronised > 1:
            # One that tried again may have got the state of a donor at the begin of its reduction, before the boundary.
            self.step = self._boundary_before + self.interval
        if self._sync is None or alone or begun_again or healed:
            self._first_step = self._boundary - trained
        else:
            self.step = self._first_step + trained

    def _tell_checksum(self) -> None:
        """At the first commit after a quorum change: one line by which replicas can be compared."""
        assert self.manager is not None
        if self.manager._quorum_id == self._quorum_told:
            return
        self._quorum_told = self.manager._quorum_id
        states = model_state(self.model_parts)
        total = sum(float(tensor.double().sum()) for state in states for tensor in state.values())
        rate = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        text = "quorum %d: step %d committed, learning rate %.6g, sum of weights %.9f"
        logger.info(text, self._quorum_told, self.step, rate, total)

    def _keep(self) -> None:
        last = self.step == self.config.training.steps
        self.checkpointer.save(self.step, last_step=last)
        if self.config.validator.enable and self.validator.should_validate(self.step):
            report_phase("eval")
            self.validator.validate(self.model_parts, self.step)
            report_phase("train")

    def _set_schedules(self, step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, about get_lr() outside of step()
            self.lr_schedulers.load_state_dict({"last_epoch": step})
        for schedule in self.lr_schedulers:
            for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
                group["lr"] = rate

    # -- end

    def _meet_ranks(self) -> None:
        """Rank 0 serves the replica's store and votes: it must not leave before the others are done."""
        if self.place.ranks > 1:
            dist.barrier()

    def close(self) -> None:
        super().close()
        if self.manager is not None:
            self.manager.shutdown(wait=False)


# ---------------------------------------------------------------------------------------------------------
# Configs


def _as(kind: Any, config: Any, **changes: Any) -> Any:
    """A config of class `kind` with the values of `config` that it knows."""
    known = {item.name for item in dataclasses.fields(kind) if item.init}
    values = {item.name: getattr(config, item.name) for item in dataclasses.fields(config) if item.name in known}
    return kind(**{**values, **changes})


def _sum_reductions(spec: Any) -> Any:
    """FSDP over gloo cannot scale within a reduction; tell each FSDP module to sum and scale after."""
    inner = spec.parallelize_fn

    def parallelize(model: Any, **named: Any) -> Any:
        from torch.distributed.fsdp import FSDPModule

        model = inner(model, **named)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return dataclasses.replace(spec, parallelize_fn=parallelize)


def fault_tolerant(config: Any, place: Place) -> Trainer.Config:
    """The same training with the mended components, as one replica of the run that `place` speaks of.

    `config` is what a function of a torchtitan config registry returns. Raises UsageError when it has an
    optimizer of its own, which this adapter would have to replace.
    """
    optimizer = config.optimizer
    if type(optimizer) not in (OptimizersContainer.Config, TorchFTOptimizersContainer.Config, Optimizers.Config):
        kind = type(optimizer).__qualname__
        raise UsageError(f"the config has its own optimizer class, {kind}", "use torchtitan's OptimizersContainer")
    spec = config.model_spec
    if not isinstance(spec, FaultTolerantModelSpec):
        spec = _as(FaultTolerantModelSpec, spec, fragment_fn=fragment_llm)
    accelerator = titan_cpu.has_accelerator()
    if not accelerator:
        spec = _sum_reductions(spec)
    loss = config.loss.loss_fn if isinstance(config.loss, ChunkedLossWrapper.Config) else config.loss
    given = getattr(config, "fault_tolerance", None) or FTManager.Config()
    new: Trainer.Config = _as(
        Trainer.Config,
        config,
        model_spec=spec,
        loss=loss,
        optimizer=_as(Optimizers.Config, optimizer),
        checkpoint=_as(Checkpointer.Config, config.checkpoint, enable_ft_dataloader_checkpoints=False),
        fault_tolerance=_as(
            FTManager.Config,
            given,
            enable=place.fault_tolerant,
            process_group="nccl" if accelerator else "gloo",
            replica_id=place.replica,
            group_size=place.replicas,
            min_replica_size=place.min_replicas,
        ),
    )
    new.dump_folder = str(place.folder)
    new.comm.save_traces_folder = f"comm_traces/replica_{place.replica}"
    new.debug.enable_structured_logging = False  # its files would be those of all replicas at once
    if place.ranks > 1 and new.parallelism.spmd_backend == "spmd_types":
        new.parallelism.spmd_backend = "partial_dtensor"  # the other one wants a newer torch than 2.13
    return new


def close_process_groups() -> None:
    """End torch.distributed in this process, if it was begun."""
    if dist.is_initialized():
        dist.destroy_process_group()
