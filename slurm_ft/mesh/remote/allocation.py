"""The hosts that a program may use, and how a process is started on them."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_ft import env
from slurm_ft.channel import make_keys
from slurm_ft.errors import SpecError, UsageError
from slurm_ft.launch.base import Launcher
from slurm_ft.launch.local import LocalLauncher
from slurm_ft.launch.local import hosts as local_hosts
from slurm_ft.launch.srun import SrunLauncher, allocation_from
from slurm_ft.mesh.errors import MeshFailure
from slurm_ft.mesh.extent import Extent
from slurm_ft.mesh.layout import assign
from slurm_ft.mesh.remote.calling import Shared, next_number
from slurm_ft.mesh.remote.calls import Call
from slurm_ft.mesh.remote.core import Core
from slurm_ft.mesh.remote.loop import shared
from slurm_ft.mesh.remote.process_mesh import ProcessMesh, default_fault_hook
from slurm_ft.mesh.remote.state import Crew
from slurm_ft.mesh.remote.step import mesh_file
from slurm_ft.paths import RunPaths, write_json
from slurm_ft.spec import Policy

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Allocation:
    """Hosts, and the kind of launcher that starts steps on them: "local" or "slurm".

    `address` is the one of this host that the others reach. `surroundings` is the environment that
    describes the Slurm job.
    """

    hosts: tuple[str, ...]
    kind: str
    address: str
    job_id: str = ""
    surroundings: Mapping[str, str] | None = None

    @staticmethod
    def local(hosts: int = 1) -> Allocation:
        """This machine, as `hosts` hosts. Raises UsageError for less than one."""
        if hosts < 1:
            raise UsageError(f"an allocation of {hosts} hosts", "give 1 or more")
        return Allocation(tuple(local_hosts(hosts)), "local", LOOPBACK)

    @staticmethod
    def here(surroundings: Mapping[str, str] | None = None) -> Allocation:
        """The Slurm job around this process. Raises UsageError where there is none."""
        from slurm_ft.submit.place import allocation_place

        around = dict(os.environ if surroundings is None else surroundings)
        try:
            place = allocation_place(around)
        except UsageError as error:
            raise UsageError(
                error.message, "run this program in an sbatch script or under salloc, or use Allocation.local()"
            ) from None
        return Allocation(place.hosts, "slurm", place.address, place.job_id, around)

    def launcher(self) -> Launcher:
        """What starts steps on these hosts."""
        if self.kind == "local":
            return LocalLauncher()
        return SrunLauncher(allocation_from(self.surroundings or os.environ))

    def processes(
        self,
        per_host: Mapping[str, int] | None = None,
        *,
        replicas: int = 1,
        spares: int = 0,
        name: str = "mesh",
        preload: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        policy: Policy | None = None,
        owner: object = None,
        folder: str | Path | None = None,
        fault_hook: Callable[[MeshFailure], object] = default_fault_hook,
    ) -> ProcessMesh:
        """Start processes on the hosts: a mesh with the dimensions replica, host and those of `per_host`.

        Returns at once; calls wait for the processes to come up. `replicas` cuts the hosts into equal parts,
        after `spares` of them have been set aside for repairs; hosts that do not fill a replica are spares
        too. `preload` names modules that every process has imported from its start (`("torch",)`).
        `environment` is set in every process. `policy` has the budgets of repairs. `owner` may have a method
        `__supervise__(failure)`, and `fault_hook` hears of failures that nobody repairs. Keys and logs
        are in a new `mesh-...` in `folder`, which must be on a file system that all hosts share; by default
        that is `runs` in a Slurm job, and for local processes a temporary one that is removed.
        Raises SpecError that lists all that is wrong, LaunchError when nothing can be started.
        """
        per_host = dict(per_host or {"gpu": 1})
        each = _processes_per_host(per_host)
        _check(per_host, replicas, spares)
        layout = assign(self.hosts, replicas, max(1, (len(self.hosts) - spares) // replicas), spares, each)
        extent = Extent(("replica", "host", *per_host), (replicas, len(layout.replicas[0]), *per_host.values()))
        mesh_id = secrets.token_hex(4)
        temporary = folder is None and self.kind == "local"
        paths = RunPaths(self._folder(mesh_id) if folder is None else Path(folder) / f"mesh-{mesh_id}")
        paths.create()
        make_keys(paths)
        write_json(
            mesh_file(paths),
            {
                "name": name,
                "labels": extent.labels,
                "sizes": extent.sizes,
                "size": extent.size,
                "per_host": each,
                "preload": list(preload),
                "environment": dict(environment or {}),
                "sys_path": [path or os.getcwd() for path in sys.path],
                "temporary": temporary,
                "client": os.getpid(),
            },
            0o600,
        )
        loop = shared()
        crew = Crew(name, paths, layout, extent, policy or Policy())
        core = Core(crew, mesh_id, self.launcher(), owner, fault_hook)
        started = Call(next_number(), extent.region, "the start")
        loop.run(core.start, self.address, started)
        return ProcessMesh(Shared(core, loop, paths.root, temporary), extent.region, started)

    def _folder(self, mesh_id: str) -> Path:
        if self.kind == "local":
            return Path(tempfile.mkdtemp(prefix="slurm-ft-mesh-"))
        around = self.surroundings or os.environ
        return Path(around.get(env.RUNS) or "runs") / f"mesh-{self.job_id}-{mesh_id}"


def _processes_per_host(per_host: Mapping[str, int]) -> int:
    each = 1
    for size in per_host.values():
        each *= size
    return each


def _check(per_host: Mapping[str, int], replicas: int, spares: int) -> None:
    problems = [
        (f"per_host has {size} along {label}", "give 1 or more") for label, size in per_host.items() if size < 1
    ]
    problems += [
        (f"per_host has the dimension {label}", "that name is taken: replica and host come before those of per_host")
        for label in per_host
        if label in ("replica", "host")
    ]
    if replicas < 1:
        problems.append((f"{replicas} replicas", "give 1 or more"))
    if spares < 0:
        problems.append((f"{spares} spares", "give 0 or more"))
    if problems:
        raise SpecError(problems)
