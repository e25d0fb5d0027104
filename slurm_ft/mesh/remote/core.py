"""A running mesh: its wire, its calls and its repairs, put together.

All of it lives in the mesh's own thread (`slurm_ft.mesh.remote.loop`); what other threads may read is in
`crew`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from slurm_ft.launch.base import Launcher
from slurm_ft.mesh.errors import MeshFailure
from slurm_ft.mesh.extent import Region
from slurm_ft.mesh.remote.calls import Call
from slurm_ft.mesh.remote.framing import Header
from slurm_ft.mesh.remote.repairs import Repairs
from slurm_ft.mesh.remote.state import Crew, Slot
from slurm_ft.mesh.remote.switchboard import Switchboard
from slurm_ft.mesh.remote.wire import ClientEnd


class Core:
    """The client's side of one mesh."""

    def __init__(
        self,
        crew: Crew,
        mesh_id: str,
        launcher: Launcher,
        owner: object,
        fault_hook: Callable[[MeshFailure], object],
    ) -> None:
        self.crew = crew
        self.switchboard = Switchboard(crew)
        self.repairs = Repairs(crew, self.switchboard, mesh_id, launcher, owner, fault_hook)

    def start(self, address: str, started: Call) -> None:
        """Listen, and launch the hosts. Raises LaunchError when nobody can listen at `address`."""
        self.crew.end = ClientEnd(self.crew.paths, address, self._from_host)
        self.switchboard.wait_up(started)
        self.repairs.start()

    async def stop(self, grace: float) -> None:
        """End all processes: idle ones at once, busy ones after `grace` seconds."""
        if self.crew.stopping:
            return
        self.crew.stopping = True
        await self.repairs.stop(grace)
        self.switchboard.fail_all()
        self.crew.end.close()

    def restart(self, region: Region, call: Call) -> None:
        """End these processes and start them again; answer the call when they are up."""
        if not self.crew.stopping:
            self.repairs.restart(region)
        self.switchboard.wait_up(call)

    def _from_host(self, peer: bytes, header: Header, parts: list[bytes]) -> None:
        kind = header["k"]
        if kind == "hello":
            self.repairs.hello(peer, header)
            return
        slot = self._slot_of(peer)
        if slot is None:
            return
        slot.seen = time.monotonic()
        if kind == "rs":
            for result, payload in zip(header["rs"], parts, strict=True):
                self.switchboard.result(slot, result, payload)
        elif kind == "up":
            self.repairs.up(slot, header)
        elif kind == "died":
            self.repairs.died(slot, header)

    def _slot_of(self, peer: bytes) -> Slot | None:
        """The host that is meant, None when another has taken its place meanwhile."""
        slot = self.crew.slots[int(peer.partition(b".")[0])]
        return slot if slot.peer == peer else None
