"""What a launcher starts for a mesh: one host process on one host, so that each host can be replaced alone."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from slurm_ft.paths import RunPaths


@dataclass(frozen=True)
class MeshStep:
    """The step of the mesh's host number `slot`; `incarnation` tells it from earlier ones of that number."""

    paths: RunPaths
    mesh_id: str
    slot: int
    incarnation: int
    host: str

    @property
    def hosts(self) -> tuple[str, ...]:
        return (self.host,)

    @property
    def name(self) -> str:
        """The step's name in Slurm; no other step of the job has it."""
        return f"sft-m{self.mesh_id}-h{self.slot}-i{self.incarnation}"

    @property
    def log(self) -> Path:
        return self.paths.root / "hosts" / f"{self.slot}-{self.incarnation}.log"

    def agent_argv(self) -> list[str]:
        return [
            sys.executable,
            "-m",
            "slurm_ft.mesh.remote.host",
            f"--folder={self.paths.root}",
            f"--slot={self.slot}",
            f"--incarnation={self.incarnation}",
        ]


def mesh_file(paths: RunPaths) -> Path:
    """What the host processes must know. Not `run.json`: this is no folder of a run."""
    return paths.root / "mesh.json"


def worker_log(root: Path, index: int, incarnation: int) -> Path:
    """The log of one worker: what it printed."""
    return root / "logs" / f"{index}-{incarnation}.log"
