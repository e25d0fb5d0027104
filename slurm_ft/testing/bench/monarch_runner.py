"""Monarch for the recovery benchmark: a mesh of one process for each replica, spawned anew when it dies.

    python monarch_runner.py FOLDER      (FOLDER/task.json: how many replicas, and the trainer's arguments)

The trainer runs in an actor's endpoint; the call fails when the process dies, and a new mesh takes its
place. Written for torchmonarch 0.7.0, in which a mesh cannot be repaired but another one can be spawned.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import monarch.actor
import monarch.config
from monarch.actor import Actor, endpoint, this_host


class Trainer(Actor):  # type: ignore[misc]
    """Trains one replica in its process."""

    @endpoint  # type: ignore[untyped-decorator]
    def train(self, replica: int, replicas: int, start: int, lighthouse: str, arguments: list[str]) -> None:
        from slurm_ft.testing.bench import trainer

        os.environ.update(
            {
                "REPLICA_GROUP_ID": str(replica),
                "NUM_REPLICA_GROUPS": str(replicas),
                "TORCHFT_LIGHTHOUSE": lighthouse,
                trainer.START: str(start),
            }
        )
        trainer.main(arguments)


async def keep(replica: int, task: dict[str, Any], over: asyncio.Event) -> None:
    """One replica until it has trained all steps."""
    start = 0
    while not over.is_set():
        start += 1
        mesh = this_host().spawn_procs(per_host={"gpus": 1}, name=f"r{replica}s{start}")
        actor = mesh.spawn(f"trainer{replica}s{start}", Trainer)
        try:
            await actor.train.call_one(
                replica, task["replicas"], start, os.environ["TORCHFT_LIGHTHOUSE"], task["trainer"]
            )
            over.set()
        except Exception as error:
            print(f"detected replica {replica}: {str(error)[:100]!r}", flush=True)


async def supervise(task: dict[str, Any]) -> None:
    over = asyncio.Event()
    replicas = [asyncio.create_task(keep(replica, task, over)) for replica in range(task["replicas"])]
    await asyncio.wait(replicas)


def main() -> None:
    monarch.actor.unhandled_fault_hook = lambda failure: None  # the failed call says it
    # By default a death that falls into a poll is noticed 30 s later.
    monarch.config.configure(get_proc_state_max_idle="1s", get_actor_state_max_idle="1s")
    task = json.loads((Path(sys.argv[1]) / "task.json").read_text())
    asyncio.run(supervise(task))
    os._exit(0)


if __name__ == "__main__":
    main()
