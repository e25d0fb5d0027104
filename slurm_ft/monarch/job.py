"""Monarch's job interface over a slurm-ft allocation: `state()` gives HostMeshes over what is there now."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from slurm_ft.monarch.client import CLIENT_FOLDER  # before anything of Monarch

# ruff: isort: split
from monarch.actor import attach_to_workers, enable_transport
from monarch.config import configure
from monarch.job import JobState, JobTrait

from slurm_ft.errors import UsageError
from slurm_ft.launch import Launcher, local
from slurm_ft.launch.local import LocalLauncher
from slurm_ft.launch.srun import SrunLauncher, allocation_from
from slurm_ft.monarch import tls
from slurm_ft.monarch.slots import Slot, Slots
from slurm_ft.paths import RunPaths
from slurm_ft.submit.place import LOOPBACK, allocation_place

log = logging.getLogger(__name__)


class SlurmFTJob(JobTrait):  # type: ignore[misc]  # Monarch's types are not read here
    """`meshes` maps the name of each mesh to its number of hosts; they are laid out in this order, spares last.

    Inside a Slurm allocation each host is one of its nodes; elsewhere, or with `cluster="local"`, all are on this
    machine. `folder` is for logs and keys, on a file system that all hosts share.

    It must be made before Monarch is used in this process: the transport, mutual TLS, is chosen once.
    Raises UsageError when the allocation has too few hosts.
    """

    def __init__(
        self, meshes: Mapping[str, int], spares: int = 0, cluster: str = "auto", folder: str | Path | None = None
    ) -> None:
        super().__init__()
        self._meshes = dict(meshes)
        self._count = sum(self._meshes.values())
        slurm = "SLURM_JOB_ID" in os.environ if cluster == "auto" else cluster == "slurm"
        if slurm:
            place = allocation_place(os.environ)
            self._hosts, self._address = list(place.hosts), place.address
            self._launcher: Callable[[], Launcher] = partial(SrunLauncher, allocation_from(os.environ))
            folder = folder or Path("runs", f"monarch-{place.job_id}")
        else:
            self._hosts, self._address = local.hosts(self._count + spares), LOOPBACK
            self._launcher = LocalLauncher
            folder = folder or tempfile.mkdtemp(prefix="slurm-ft-monarch-")
        if len(self._hosts) < self._count + spares:
            raise UsageError(
                f"{self._count} hosts and {spares} spares were asked for and the allocation has {len(self._hosts)}",
                "ask Slurm for more nodes, or lower the meshes' sizes",
            )
        self._hosts = self._hosts[: self._count + spares]
        self._paths = RunPaths(folder)
        self._slots: Slots | None = None

    # --- Monarch's interface ---------------------------------------------------------------------------------

    def state(self, cached_path: str | None = None) -> JobState:
        """HostMeshes over the worker loops of now, by their names. Nothing is pickled into the working directory,
        as Monarch's jobs do by default: no other process can take these loops over."""
        return super().state(cached_path=None)

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise UsageError("a SlurmFTJob runs in the allocation it is made in", "run the client there, without one")
        self._paths.create()
        tls.hand_over(CLIENT_FOLDER, self._paths.secret)
        where = f"[{self._address}]" if ":" in self._address else self._address
        enable_transport(f"tls://{where}:0")
        # The second line of defence; the first is `Slot.race`.
        configure(get_proc_state_max_idle="5s", get_actor_state_max_idle="5s")
        self._slots = Slots(self._paths, self._launcher, self._hosts, self._count, self._address, tell=log.info)

    def _state(self) -> JobState:
        """New meshes over the worker loops of now. Raises LaunchError when one does not come (back) up."""
        slots, meshes, first = self.slots, {}, 0
        for name, size in self._meshes.items():
            addresses = [slot.address for slot in slots[first : first + size]]
            first += size
            generation = "-".join(str(slot.incarnation) for slot in slots)
            meshes[name] = attach_to_workers(ca="trust_all_connections", workers=addresses, name=f"{name}-{generation}")
        return JobState(meshes)

    def can_run(self, spec: JobTrait) -> bool:
        """Never: the worker loops of another process are not ours."""
        return False

    def _kill(self) -> None:
        self.close()

    # --- ours ------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> list[Slot]:
        """All slots, up: those of the first mesh first. One that is being replaced is waited for."""
        if self._slots is None:
            self.apply()
        assert self._slots is not None
        return self._slots.current()

    def replacement(self, slot: Slot) -> Slot:
        """What stands in the place of a lost slot, as soon as it is up."""
        assert self._slots is not None
        return self._slots.replacement(slot)

    def close(self) -> None:
        """End all worker loops and their steps."""
        if self._slots is not None:
            self._slots.close()
            self._slots = None

    def __enter__(self) -> SlurmFTJob:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
