"""Faults that were asked for: done by the controller itself (hurt.py), or handed to the agent, who then answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from slurm_ft import faults
from slurm_ft.controller import hurt
from slurm_ft.controller.latelog import SETTLE_WITHIN, LateLog
from slurm_ft.controller.peers import Peers
from slurm_ft.controller.requests import Inject
from slurm_ft.controller.state import Replica, RunState
from slurm_ft.events import Kind
from slurm_ft.paths import RunPaths
from slurm_ft.spec import RunSpec


class Injector:
    """`state` gives the run's state; `take` records an event."""

    def __init__(
        self,
        paths: RunPaths,
        spec: RunSpec,
        events: LateLog,
        peers: Peers,
        state: Callable[[], RunState],
        take: Callable[..., object],
    ) -> None:
        self._paths, self._spec, self._log, self._peers = paths, spec, events, peers
        self._state, self._take = state, take

    def inject(self, request: Inject) -> None:
        """Carry a request out, or hand it to the agent, who then answers."""
        order: dict[str, Any] = {
            "id": request.id,
            "rank": request.rank,
            "kind": request.kind,
            "seconds": request.seconds,
        }
        answer = partial(self._take, Kind.INJECTED, request.replica, **order)
        replica, replicas = request.replica, self._state().replicas
        if replica is None:
            if request.kind == "controller":
                answer(error="")  # afterwards nobody would
                self._log.settle(SETTLE_WITHIN)
            answer(error=self._hurt_run(request))
        elif not 0 <= replica < len(replicas):
            answer(error=f"there is no replica {replica}")
        elif request.kind == "srun":
            answer(error=self._hurt_client(replicas[replica]))
        elif not self._peers.tell_host(
            replica, request.rank // self._spec.replica.ranks_per_host, {"type": "inject", **order}
        ):
            answer(error=f"rank {request.rank} of replica {replica} is not running")

    def _hurt_run(self, request: Inject) -> str:
        if request.kind == "controller":
            return hurt.kill(os.getpid())
        if request.kind == "lighthouse":
            return hurt.kill_lighthouse(self._paths.root)
        if request.kind in ("disk-full", "slow-fs"):
            lasts = faults.FAULTS[request.kind].lasts or 0.0
            self._log.hinder(hurt.obstacle(request.kind, lasts if request.seconds is None else request.seconds))
            return ""
        return f"the kind `{request.kind}` is unknown"

    def _hurt_client(self, replica: Replica) -> str:
        if self._spec.cluster == "local":
            return "a local run has no srun; use `agent`"
        return "its step is not running" if replica.pid is None else hurt.kill(replica.pid)
