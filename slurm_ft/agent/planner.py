"""What the ranks of an attempt are started with on this host: command, environment, CPUs, log; and their zygote."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_ft import config, env, timeouts
from slurm_ft.agent.affinity import gpu_numbers, rank_cpus
from slurm_ft.agent.command import rank_argv
from slurm_ft.agent.environ import Place, rank_environment
from slurm_ft.agent.preload import host_has_gpu, modules_for
from slurm_ft.agent.ranks import Plan, Preload
from slurm_ft.agent.visibility import rank_surroundings, step_mask, visibility
from slurm_ft.hostspec import parse_cpus
from slurm_ft.keeper.place import socket_path
from slurm_ft.paths import RunPaths
from slurm_ft.spec import RunSpec


@dataclass(frozen=True)
class Planner:
    """The host with this `index` among the `hosts` of a replica.

    `socket` is where its ranks report, `lighthouse` the address that they are told, `platform` that of its GPUs
    (rocm, cuda, or '' without any), and `gpus` how many were found.
    """

    paths: RunPaths
    spec: RunSpec
    replica: int
    hosts: Sequence[str]
    index: int
    socket: str
    lighthouse: str
    platform: str
    gpus: int

    def preload(self) -> Preload | None:
        """The zygote for this run's command, if it is to have one."""
        command = self.spec.replica.command
        modules = modules_for(command, host_has_gpu()) if self.spec.replica.zygote else ()
        if not modules:
            return None
        # Whatever asks for a GPU while it is imported must ask in a way that leaves the fork usable.
        environment = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **self._environment(0, 0, "", 0)}
        del environment[env.SOCKET]  # the zygote is no rank and has nothing to report
        return Preload(command, modules, environment)

    def plans(self, attempt: int, first_host: str, port: int) -> list[Plan]:
        """One for each rank of this host. The ranks of all hosts meet at `port` of `first_host`."""
        replica = self.spec.replica
        devices = [visibility(os.environ, local, replica.ranks_per_host, self.platform).device
                   for local in range(replica.ranks_per_host)]  # fmt: skip
        gpu_cpus = parse_cpus(self.spec.host.gpu_cpus)
        numbers = gpu_numbers(step_mask(os.environ, self.platform), self.gpus, len(gpu_cpus))
        cpus = rank_cpus(sorted(os.sched_getaffinity(0)), devices, gpu_cpus, numbers)
        argv = rank_argv(replica.command, sys.executable)
        plans = []
        for local in range(replica.ranks_per_host):
            rank = self.index * replica.ranks_per_host + local
            log = self.paths.rank_log(self.replica, attempt, rank)
            plans.append(Plan(rank, local, argv, self._environment(attempt, local, first_host, port), log, cpus[local]))
        return plans

    def _environment(self, attempt: int, local: int, first_host: str, port: int) -> dict[str, str]:
        """The environment of one rank of an attempt; that of attempt 0 is the zygote's."""
        replica = self.spec.replica
        host = self.hosts[self.index]
        rank = self.index * replica.ranks_per_host + local
        place = Place(
            run=str(self.paths.root),
            replica=self.replica,
            replicas=self.spec.replicas,
            min_replicas=self.spec.policy.min_replicas,
            attempt=attempt,
            rank=rank,
            local_rank=local,
            ranks=replica.ranks,
            ranks_per_host=replica.ranks_per_host,
            first_host=first_host,
            port=port,
            socket=self.socket,
            lighthouse=self.lighthouse,
            error_file=str(self.paths.error(self.replica, attempt, rank)),
            host=host,
            timeouts=timeouts.encode(timeouts.torchft_defaults(self.spec.policy)),
            quorum_retries=timeouts.QUORUM_RETRIES,
            scratch=config.expanded(self.spec.host.scratch, os.environ),
            keeper=str(socket_path(self.paths.root, host)) if replica.keeper != "off" else "",
            keeper_mode=replica.keeper,
        )
        seen = visibility(os.environ, local, replica.ranks_per_host, self.platform)
        return rank_environment(
            rank_surroundings(os.environ, seen), place, replica.environment, [*self.hosts, first_host]
        )
