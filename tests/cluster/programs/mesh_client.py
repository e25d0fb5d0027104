"""A researcher's program in a Slurm job: a mesh with a spare. Writes down what it sees; goes on when told.

    mesh_client.py FOLDER

Each `tell(name, value)` is a file in FOLDER; `wait(name)` waits for one.
"""

import json
import os
import sys
import time
from pathlib import Path

from slurm_ft import Actor, Allocation, endpoint
from slurm_ft.mesh import context
from slurm_ft.spec import Policy

folder = Path(sys.argv[1])


def tell(name, value):
    (folder / f".{name}").write_text(json.dumps(value))
    (folder / f".{name}").rename(folder / name)


def wait(name):
    while not (folder / name).exists():
        time.sleep(0.02)


class Worker(Actor):
    def __init__(self, word):
        self.word = word

    @endpoint
    def where(self):
        here = context()
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        return [here.host, os.environ["SLURMD_NODENAME"], self.word, os.getpid(), os.environ["LOCAL_RANK"], gpus]

    @endpoint
    def hold(self, file):
        while not os.path.exists(file):
            time.sleep(0.02)
        return context().rank.index


def everywhere(workers):
    return [value for _, value in workers.where.call().get(60).check().ok()]


allocation = Allocation.here()
with allocation.processes(per_host={"gpu": 2}, spares=1, policy=Policy(agent_timeout=4.0)) as mesh:
    tell("folder", [str(mesh.folder), str(mesh.folder.stat().st_mode), list(allocation.hosts)])
    workers = mesh.spawn("workers", Worker, "hello")
    tell("first", everywhere(workers))

    held = workers.hold.call(str(folder / "step-killed"))
    tell("held", True)
    values = held.get(60)
    failed = [point.rank for point, _ in values.failed()]
    tell("step", [[value for _, value in values.ok()], failed, str(values.failed()[0][1]), everywhere(workers)])

    held = workers.hold.call(str(folder / "host-killed"))
    tell("held-again", True)
    values = held.get(60)
    failed = [point.rank for point, _ in values.failed()]
    tell("host", [[value for _, value in values.ok()], failed, str(values.failed()[0][1]), everywhere(workers)])
    wait("end")
    if (folder / "end").read_text() == "hang":
        mesh.broadcast(time.sleep, 600)
        time.sleep(600)
