"""Replicas of a training as processes of this machine, with a real Lighthouse, for tests.

A replica is forked from one process that has imported everything (multiprocessing's forkserver), so a start
costs milliseconds. It runs a function of `train_workers.py`. What it reports, by `progress.report` and by
torchft's own loggers, arrives over the same kind of socket that an agent listens on, so a test waits for
events and never sleeps.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from slurm_ft.agent.address import free_port
from slurm_ft.channel import make_keys
from slurm_ft.paths import RunPaths

DEADLINE = 60.0
Event = dict[str, Any]

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["slurm_ft.train.titan_cpu", "slurm_ft.train.config_registry", "torchft.local_sgd", "torch._dynamo"]
)


class Agent:
    """Hears what ranks report. `events` are packets, with `replica` and `attempt` put in."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()
        self._servers: list[socket.socket] = []
        self._connections: dict[int, socket.socket] = {}

    def listen(self, **who: int) -> str:
        """A new address for one rank; returns what SLURM_FT_SOCKET should hold."""
        name = f"slurm-ft-test-{uuid.uuid4().hex}"
        server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server.bind("\0" + name)
        server.listen(4)
        self._servers.append(server)
        threading.Thread(target=self._serve, args=(server, who), daemon=True).start()
        return "@" + name

    def _serve(self, server: socket.socket, who: dict[str, int]) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                self._connections[who["replica"]] = connection
                threading.Thread(target=self._hear, args=(connection, who), daemon=True).start()

    def _hear(self, connection: socket.socket, who: dict[str, int]) -> None:
        with contextlib.suppress(OSError), connection:
            while packet := connection.recv(65536):
                with self._changed:
                    self.events.append({**json.loads(packet), **who})
                    self._changed.notify_all()

    def tell(self, replica: int, **order: object) -> None:
        """Send an order to the newest rank of a replica."""
        self._connections[replica].send(json.dumps(order).encode())

    def wait(self, wanted: Callable[[Event], bool], seconds: float = DEADLINE, count: int = 1) -> list[Event]:
        """Wait until `count` events are as wanted; returns them all. Fails the test at the deadline."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while len(found := [event for event in self.events if wanted(event)]) < count:
                left = deadline - time.monotonic()
                tail = "\n".join(map(str, self.events[-12:]))
                assert left > 0, f"{len(found)} of {count} events within {seconds} s; the last were:\n{tail}"
                self._changed.wait(left)
            return found

    def close(self) -> None:
        for server in self._servers:
            # A blocked accept() is woken by shutdown, not by close.
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()


class Run:
    """One run: a Lighthouse, a folder, and the replicas that were started."""

    def __init__(self, folder: Any, replicas: int, **lighthouse: int) -> None:
        from torchft.coordination import LighthouseServer

        settings = {"min_replicas": 1, "join_timeout_ms": 5000, "quorum_tick_ms": 10, "heartbeat_timeout_ms": 1000}
        self.lighthouse = LighthouseServer(bind="127.0.0.1:0", **{**settings, **lighthouse})
        port = self.lighthouse.address().rpartition(":")[2]
        self.url = f"http://127.0.0.1:{port}"
        self.folder, self.replicas = folder, replicas
        paths = RunPaths(folder)
        paths.create()
        make_keys(paths)
        self.agent = Agent()
        self.processes: list[Any] = []
        self._starts = 0
        self._attempts: Counter[int] = Counter()

    def start(
        self, work: Callable[..., None], *arguments: Any, replica: int, ranks: int = 1, agent: str = ""
    ) -> list[Any]:
        """Start all ranks of a replica; `work(*arguments)` runs in each. Returns their processes. Starts that
        are given one `agent`, an address of `self.agent.listen`, are by one agent."""
        self._starts += 1
        self._attempts[replica] += 1
        port, started = free_port(), []
        for rank in range(ranks):
            environment = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "TORCHFT_LIGHTHOUSE": self.url, "REPLICA_GROUP_ID": str(replica),
                "NUM_REPLICA_GROUPS": str(self.replicas), "SLURM_FT_RUN": str(self.folder),
                "SLURM_FT_REPLICA": str(replica), "SLURM_FT_ATTEMPT": str(self._attempts[replica]),
                "SLURM_FT_SOCKET": agent or self.agent.listen(replica=replica, attempt=self._starts, rank=rank),
            }  # fmt: skip
            log = os.path.join(self.folder, f"{replica}.{self._starts}.{rank}.log")
            process = CONTEXT.Process(target=_child, args=(environment, log, work, arguments), daemon=True)
            process.start()
            started.append(process)
        self.processes += started
        return started

    def log(self, replica: int) -> str:
        """All output of a replica, attempt by attempt."""
        names = sorted(name for name in os.listdir(self.folder) if name.startswith(f"{replica}."))
        texts = []
        for name in names:
            with open(os.path.join(self.folder, name), errors="replace") as file:
                texts.append(file.read())
        return "".join(texts)

    def join(self, processes: list[Any] | None = None, seconds: float = DEADLINE) -> list[int | None]:
        """Wait until the processes have ended; returns their exit codes, None for one that still runs."""
        deadline = time.monotonic() + seconds
        processes = self.processes if processes is None else processes
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0))
        return [process.exitcode for process in processes]

    def close(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        self.agent.close()
        self.lighthouse.shutdown()


def _child(environment: dict[str, str], log: str, work: Callable[..., None], arguments: Any) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(environment)
    import torch

    from slurm_ft.train import bootstrap, progress

    torch.set_num_threads(1)
    channel = progress.channel()
    assert channel is not None
    bootstrap._observe_torchft(channel)
    bootstrap._watch_torchft(channel)
    work(*arguments)


def losses(events: list[Event], replica: int) -> Iterator[tuple[int, float]]:
    """(step, loss) of a replica in the order they were trained, without those that were trained again."""
    last: dict[int, float] = {}
    for event in events:
        if event["type"] == "progress" and event["replica"] == replica and event.get("loss") is not None:
            last[event["step"]] = event["loss"]
    yield from sorted(last.items())


def mean_final_loss(events: list[Event], replicas: int, steps: int, last: int = 10) -> float:
    """Mean loss of the last steps over all replicas: what a disturbed and an undisturbed run are compared by."""
    values = [loss for replica in range(replicas) for step, loss in losses(events, replica) if step > steps - last]
    return sum(values) / len(values)


def call_and_tell(pipe: Any, function: Callable[..., None], arguments: Any) -> None:
    """In a forked process: run the function and send its traceback, or an empty string."""
    try:
        function(*arguments)
    except BaseException:
        pipe.send(traceback.format_exc())
    else:
        pipe.send("")
