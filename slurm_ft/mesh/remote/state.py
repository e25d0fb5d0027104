"""What is known of a running mesh: its processes and hosts. Data only; who changes it is beside it.

process   STARTING ──> UP ──lost──> REPAIRING ──> UP
                                        ├──> LEFT     handled by the owner: calls get a SupervisionError
                                        ├──> FAILED   propagated: calls raise its MeshFailure
                                        └──> OUT      the mesh shrank: calls go to the others
host      the same; its processes follow it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from slurm_ft.launch.base import StepHandle
from slurm_ft.mesh.errors import MeshFailure
from slurm_ft.mesh.extent import Extent
from slurm_ft.mesh.layout import Layout
from slurm_ft.mesh.remote.calls import Call
from slurm_ft.mesh.supervision import Repair
from slurm_ft.paths import RunPaths
from slurm_ft.spec import Policy

if TYPE_CHECKING:
    from slurm_ft.mesh.remote.framing import Header
    from slurm_ft.mesh.remote.wire import ClientEnd

Handler = Callable[[MeshFailure], object]


class State(StrEnum):
    """Of a process or a host; see the module's table."""

    STARTING = "starting"
    UP = "up"
    REPAIRING = "repairing"
    LEFT = "lost, handled"
    FAILED = "failed"
    OUT = "taken out"


GIVEN_UP = (State.LEFT, State.FAILED, State.OUT)


@dataclass
class Process:
    """One process. `sent` holds the calls that it has and has not answered, `queue` those it is to get."""

    index: int
    state: State = State.STARTING
    incarnation: int = 0
    pid: int = 0
    failure: MeshFailure | None = None
    sent: dict[int, Call] = field(default_factory=dict)
    queue: list[tuple[Call | None, Header, bytes]] = field(default_factory=list)
    asked_to_end: bool = False


@dataclass
class Slot:
    """One host of the mesh, whichever host it is just now. `epoch` changes when older news does not count."""

    number: int
    host: str
    state: State = State.STARTING
    incarnation: int = 0
    peer: bytes = b""
    step: StepHandle | None = None
    seen: float = 0.0


class Crew:
    """The processes and hosts of one mesh, and the client's end of the wire to them.

    `failed` holds the failures that were propagated, by place; other threads read it. `generation` counts
    repairs. `layout` has the hosts as they are now, and the spares.
    """

    def __init__(self, name: str, paths: RunPaths, layout: Layout, extent: Extent, policy: Policy) -> None:
        self.name, self.paths, self.layout, self.extent, self.policy = name, paths, layout, extent, policy
        self.per_host = layout.ranks_per_host
        hosts = [host for replica in layout.replicas for host in replica]
        self.slots = [Slot(number, host) for number, host in enumerate(hosts)]
        self.processes = [Process(index) for index in range(extent.size)]
        self.failed: dict[int, MeshFailure] = {}
        self.repairs: list[Repair] = []
        self.generation = 0
        self.stopping = False
        self.end: ClientEnd

    def processes_of(self, slot: Slot) -> list[Process]:
        return self.processes[slot.number * self.per_host : (slot.number + 1) * self.per_host]

    def at(self, slot: Slot, local: int) -> Process:
        """The process that a host knows by this number."""
        return self.processes[slot.number * self.per_host + local]
