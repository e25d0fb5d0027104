"""torchtitan's components for torchft, mended by subclasses: what each is for is at the head of titan_ft.py."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import slurm_ft.train.titan_cpu  # noqa: F401 - before anything else of torchtitan

# ruff: isort: split
import torch
import torch.distributed as dist
import torchft
import torchft.process_group
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager
from torchtitan.experiments.torchft.config.job_config import FaultTolerance
from torchtitan.experiments.torchft.manager import TorchFTManager
from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer

from slurm_ft.errors import UsageError
from slurm_ft.train import ft, survivors
from slurm_ft.train.progress import report_phase
from slurm_ft.train.titan_state import (
    State,
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
)


class FTManager(TorchFTManager):  # type: ignore[misc]
    """torchtitan's holder of a torchft Manager, with ours in it."""

    @dataclass(kw_only=True, slots=True)
    class Config(FaultTolerance):  # type: ignore[misc]
        quorum_timeout_s: float = field(default_factory=lambda: survivors.defaults().get("quorum_timeout", 120.0))
        """The run's, or 120. Must be longer than one interval: a replica that joins waits that long for its peers."""
        timeout_s: float = 60.0
        """For a peer's checkpoint and for the vote on a commit. Longer than process_group_timeout_ms."""
        heartbeat_interval_ms: int = 100
        gather_s: float = 20.0
        """How long a start of the whole run waits for all replicas, so that none trains its first interval
        alone. A start into a running training waits for nobody."""
        sync_quorum: bool = True
        """False is torchtitan's own per-step mode, in which a donor can crash. For tests."""
        init_sync: bool = False
        """Whether all replicas but one take that one's weights at step 0. Not needed when they share a seed."""

    _GROUPS: ClassVar[dict[str, Any]] = {"gloo": torchft.ProcessGroupGloo, "nccl": torchft.ProcessGroupNCCL}

    def __init__(self, config: Config) -> None:
        self._manager: ft.Manager | None = None
        self.group_size, self.replica_id = config.group_size, config.replica_id
        per_step = config.semi_sync_method is None
        self.use_async_quorum = per_step  # torchtitan's word for "per-step mode"
        if not config.enable:
            return
        if config.process_group not in self._GROUPS:
            known = " or ".join(self._GROUPS)
            raise UsageError(f"fault_tolerance.process_group {config.process_group!r} is not known", f"use {known}")
        limit = timedelta(seconds=config.timeout_s)
        group_limit = timedelta(milliseconds=config.process_group_timeout_ms)
        connect = min(survivors.defaults().get("connect_timeout", 10.0), 0.8 * group_limit.total_seconds())
        address = ft.own_address(os.environ)
        self._manager = ft.Manager(
            pg=self._GROUPS[config.process_group](timeout=group_limit),
            min_replica_size=config.min_replica_size,
            load_state_dict=None,
            state_dict=None,
            use_async_quorum=per_step and not config.sync_quorum,
            init_sync=config.init_sync,
            timeout=limit,
            quorum_timeout=timedelta(seconds=config.quorum_timeout_s),
            connect_timeout=timedelta(seconds=connect),
            heartbeat_interval=timedelta(milliseconds=config.heartbeat_interval_ms),
            hostname=address,
            checkpoint_transport=ft.PeerTransport(limit, host=address),
            replica_id=f"replica_{config.replica_id}",
        )
        self._manager.receive_in_place()
        if per_step:
            self.replicate_pg = torchft.process_group.ManagedProcessGroup(self._manager)
            self.replicate_pg.register("dp_replicate")

    @property
    def loss_sync_pg(self) -> None:
        """None: a replica reports its own loss. torchtitan would add up the losses of all replicas, in a
        collective outside the step that the Manager guards."""
        return None


class Optimizers(TorchFTOptimizersContainer):  # type: ignore[misc]
    """torchtitan's optimizers for torchft, never with a stale state, and of use without torchft too."""

    @dataclass(kw_only=True, slots=True)
    class Config(TorchFTOptimizersContainer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, *, model_parts: list[torch.nn.Module], ft_manager: FTManager) -> None:
        if ft_manager.enabled:
            super().__init__(config, model_parts=model_parts, ft_manager=ft_manager)
            return
        OptimizersContainer.__init__(self, config, model_parts=model_parts)
        self.cache_state_dict: State = {}
        self._use_ft_optimizer = False

    def state_dict(self) -> State:
        self.init_cache_state_dict()
        return self.cache_state_dict


class Checkpointer(TorchFTCheckpointManager):  # type: ignore[misc]
    """Peers heal from memory, whether or not checkpoints go to disk.

    With `enable`, the first participating replica writes the full checkpoint; the trainer calls it right
    after a committed synchronisation only, when the replicas are equal.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TorchFTCheckpointManager.Config):  # type: ignore[misc]
        # torchtitan writes the loader's place to a new folder at every step and removes none. TextLoader
        # needs no such file; with another loader, turn it on and keep an eye on the folder.
        enable_ft_dataloader_checkpoints: bool = False

    pg: Any

    def __init__(
        self,
        config: Config,
        *,
        model_parts: list[torch.nn.Module],
        optimizers: OptimizersContainer,
        lr_schedulers: Any,
        states: State,
        ft_manager: FTManager | None = None,
        **rest: Any,
    ) -> None:
        parts = {"model_parts": model_parts, "optimizers": optimizers, "lr_schedulers": lr_schedulers}
        # The parent is kept from registering its own state with the Manager; it is given the Manager after.
        super().__init__(config, states=states, ft_manager=None, **parts, **rest)
        self.ft_manager = ft_manager.manager if ft_manager and ft_manager.enabled else None
        self._model_parts, self._optimizers, self._schedules = model_parts, optimizers, lr_schedulers
        self._train_state = states["train_state"]
        if self.ft_manager is not None:
            self.ft_manager.register_state_dict_fn("titan", self.load_peer_state, self.peer_state)
            if self.enable and config.enable_ft_dataloader_checkpoints:
                self._keep_loader_states(ft_manager, rest["dataloader"])

    def _keep_loader_states(self, ft_manager: Any, dataloader: BaseDataLoader) -> None:
        self.enable_ft_dataloader_checkpoints = True
        self.enable_staging = True
        self.ft_replica_id = ft_manager.replica_id
        self.ft_states = {"dataloader": dataloader}
        if self.pg is None:
            self.pg = dist.new_group(backend="gloo")

    def peer_state(self) -> State:
        """What a healing peer needs: weights, optimizers, schedule, step. Tensors are live, not copies."""
        return {
            "model": model_state(self._model_parts),
            "optimizers": [optimizer_state(optimizer) for optimizer in self._optimizers],
            "schedules": self._schedules.state_dict(),
            "train": self._train_state.state_dict(),
        }

    def load_peer_state(self, state: State) -> None:
        load_model_state(self._model_parts, state["model"])
        for optimizer, sent in zip(self._optimizers, state["optimizers"], strict=True):
            load_optimizer_state(optimizer, sent)
        self._schedules.load_state_dict(state["schedules"])
        self._train_state.load_state_dict(state["train"])

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self.enable_ft_dataloader_checkpoints:
            self._ft_save(curr_step)
        if self.ft_manager is not None and self.ft_manager.participating_rank() != 0:
            return False
        if not self._should_save(curr_step, last_step):
            return False
        report_phase("checkpoint")
        saved = bool(CheckpointManager._save(self, curr_step, last_step))
        report_phase("train")
        return saved
