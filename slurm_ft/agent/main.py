"""The agent's process: `python -m slurm_ft.agent.main --run-dir DIR --replica N --step N --hosts LIST`.

One asyncio loop. It dials the controller, says who it is, and does what it is told:

    start      start the ranks of an attempt
    clear      end what is left of an attempt; answer with a port for the next one
    shutdown   end the ranks and leave
    inject     hurt a rank, or this host, on purpose
    who        say again who you are (to a controller that was started again)

and tells of every rank's end, of progress, and once a second that it lives. Ranks keep running while there
is no controller, and the agents see to it that there is one again (agent/successor.py); after the policy's
`orphan_timeout` without one the agent ends its ranks, gives the run up and leaves. Only the controller of the
highest epoch that the agent knows of is obeyed and counts as heard.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slurm_ft import env
from slurm_ft.agent.command import rank_argv
from slurm_ft.agent.environ import Place, rank_environment
from slurm_ft.agent.hurt import hurt
from slurm_ft.agent.listen import Forwarder, RankSocket
from slurm_ft.agent.observed import Observed
from slurm_ft.agent.outbox import Outbox
from slurm_ft.agent.preload import host_has_gpu, modules_for
from slurm_ft.agent.ranks import Exit, Plan, Preload, Ranks, split_cpus
from slurm_ft.agent.successor import Successor
from slurm_ft.agent.visibility import bus_ids, rank_surroundings, visibility
from slurm_ft.channel import HEARTBEAT, Client, Message
from slurm_ft.native import probes
from slurm_ft.paths import RunPaths, read_json
from slurm_ft.slurm.hostlist import expand
from slurm_ft.spec import RunSpec
from slurm_ft.train.progress import STACKS_SIGNAL

PROGRESS_INTERVAL = 0.25
REDIAL_AFTER = 3.0
TAIL_BYTES = 4000
STACKS_WITHIN = 0.5
"""Seconds that a rank has to write its stacks; the handler runs at once, even while the GIL is held."""
PORTS = range(20_000, 32_000)
"""Below the kernel's ephemeral range, so that no outgoing connection takes a port we chose."""


def free_port(host: str = "") -> int:
    """A port that is free now, from PORTS. Nothing reserves it: a rank that finds it taken fails and the
    next attempt gets another."""
    start = int.from_bytes(os.urandom(4), "big")
    for offset in range(len(PORTS)):
        port = PORTS[(start + offset * 7) % len(PORTS)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise OSError("no port between 20000 and 32000 is free")


def address_towards(endpoint: str) -> str:
    """Our address on the way to the controller: what other hosts of the allocation can reach us by."""
    target = urlsplit(endpoint)
    family = socket.AF_INET6 if ":" in (target.hostname or "") else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((target.hostname, target.port))
        return str(probe.getsockname()[0])


def read_error(path: Path) -> tuple[str, str]:
    """(message, traceback) from torch elastic's error file; empty when there is none."""
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return "", ""
    if not isinstance(message, dict):
        return str(message or ""), ""
    extra = message.get("extraInfo") or {}
    return str(message.get("message", "")), str(extra.get("py_callstack", ""))[-TAIL_BYTES:]


def tail(path: Path) -> str:
    """The end of a log, for a rank that left no traceback."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return "\n".join(file.read().decode("utf-8", errors="replace").splitlines()[-20:])
    except OSError:
        return ""


class Agent:
    """The owner of one host's ranks. See the module's docstring."""

    def __init__(self, run_dir: str, replica: int, step: int, hosts: list[str], host: str) -> None:
        self._paths = RunPaths(run_dir)
        self._spec = RunSpec.from_json(read_json(self._paths.spec))
        self._replica, self._step, self._host = replica, step, host
        self._hosts = hosts
        self._index = hosts.index(host)
        self._client = Client(self._paths, f"{replica}.{self._index}.{step}.{os.getpid()}".encode())
        self._socket = RankSocket(self._packet)
        self._forwarder = Forwarder(self._paths.lighthouse)
        self._lighthouse = ""
        self._platform = ""  # of this host's GPUs: rocm, cuda, or nothing
        self._gpus: list[str] = []  # those that the step sees, by bus id: indexes mean something else on each host
        self._attempt = 0
        self._injected: set[int] = set()  # ranks of this attempt that were hurt on purpose
        self._outbox = Outbox(self._client.send)
        self._observed = Observed(0, self._tell)
        self._heard = time.monotonic()
        self._epoch = 0
        place = replica * len(hosts) + self._index
        self._successor = Successor(
            self._paths, self._spec, place, host, self._silence, self._address, self._learn_epoch
        )
        self._over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._work: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Serve until told to leave; gives the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, partial(self._on_signal, number))
        found = await asyncio.to_thread(probes.gpus)
        self._platform = next((gpu.platform for gpu in found), "")
        self._gpus = bus_ids(os.environ, found, self._platform)
        self._lighthouse = await self._forwarder.start()
        self._ranks = Ranks(self._exited, self._preload())
        self._hello()
        for work in (self._receive(), self._live(), self._flush(), self._successor.watch()):
            self._do(work)
        code = await self._over
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        self._ranks.close()
        await self._forwarder.close()
        self._socket.close()
        self._client.send({"type": "leaving", "code": code})
        self._client.close()
        return code

    def _address(self) -> str:
        return address_towards(self._paths.endpoint.read_text())

    def _silence(self) -> float:
        """Seconds since a controller was heard."""
        return time.monotonic() - self._heard

    def _learn_epoch(self, epoch: int) -> None:
        """There is a head of this epoch. With a new one the Lighthouse has moved too."""
        if epoch > self._epoch > 0:
            self._forwarder.drop()
        self._epoch = max(self._epoch, epoch)

    def _on_signal(self, number: int) -> None:
        self._do(self._leave(self._spec.policy.stop_grace, 128 + number))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        if not task.cancelled() and task.exception() is not None and not self._over.done():
            self._over.set_exception(task.exception() or RuntimeError())

    # --- what we tell ----------------------------------------------------------------------------------

    def _hello(self) -> None:
        self._client.send(
            {
                "type": "hello",
                "replica": self._replica,
                "step": self._step,
                "index": self._index,
                "host": self._host,
                "address": self._address(),
                "port": free_port(),
                "step_id": os.environ.get("SLURM_STEP_ID", ""),
                "agent_pid": os.getpid(),
                "attempt": self._attempt,
                "gpus": self._gpus,
                "first": self._outbox.first,
            }
        )

    def _tell(self, message: Message) -> None:
        """Tell news, which no controller may miss; the next sample of progress replaces one that is lost."""
        if message["type"] == "progress":
            self._client.send(message)
        else:
            self._outbox.tell(message)

    def _exited(self, end: Exit) -> None:
        self._observed.flush()
        self._tell(self._end_message(end))

    def _end_message(self, end: Exit) -> Message:
        if end.code == 0:
            return {"type": "rank_done", "attempt": self._attempt, "rank": end.rank}
        log = self._paths.rank_log(self._replica, self._attempt, end.rank)
        local = end.rank - self._index * self._spec.replica.ranks_per_host
        message, traceback = read_error(self._paths.error(self._replica, self._attempt, end.rank))
        return {
            "type": "rank_failed",
            "attempt": self._attempt,
            "rank": end.rank,
            "host": self._host,
            "what": f"{end.words}: {message}" if message else end.words,
            "code": end.code,
            "signal": end.signal_name,
            "age": time.monotonic() - end.at,
            "log": str(log),
            "traceback": traceback or tail(log),
            **({"gpu": self._gpus[local % len(self._gpus)]} if self._gpus else {}),
            **({"injected": True} if end.rank in self._injected else {}),
        }

    def _packet(self, rank: int, packet: dict[str, Any]) -> None:
        self._observed.packet(rank, packet)

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL)
            self._observed.flush()

    async def _live(self) -> None:
        while True:
            # With what the controller must know, in case a message was lost with a connection.
            self._client.send(
                {
                    "type": "alive",
                    "attempt": self._attempt,
                    "told": self._outbox.last,
                    "epoch": self._epoch,
                }
            )
            silence = self._silence()
            if silence > REDIAL_AFTER:
                self._client.dial()
            if silence > self._spec.policy.orphan_timeout:
                print(f"slurm-ft agent: no controller for {silence:.0f} s, leaving", file=sys.stderr)
                self._do(self._give_up())
                return
            await asyncio.sleep(HEARTBEAT)

    # --- what we are told ------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            message = await self._client.receive()
            if message is None:
                continue
            epoch = int(message.get("epoch", 0))
            if epoch < self._epoch:
                self._client.send({"type": "deposed", "epoch": self._epoch})
                continue
            self._learn_epoch(epoch)
            self._heard = time.monotonic()
            self._obey(message)

    def _obey(self, message: Message) -> None:
        kind = message["type"]
        if kind == "start":
            self._start(message)
        elif kind == "clear":
            self._do(self._clear(int(message["attempt"]), float(message["grace"]), bool(message.get("stacks"))))
        elif kind == "shutdown":
            self._do(self._leave(float(message["grace"]), 0))
        elif kind == "inject":
            error = hurt(message["kind"], message["rank"], message.get("seconds"), self._ranks, self._socket)
            if not error:
                self._injected.add(int(message["rank"]))
            self._tell({"type": "injected", "id": message["id"], "error": error, **_named(message)})
        elif kind == "who":
            self._hello()
            self._outbox.again()
        elif kind == "alive":
            self._outbox.acknowledged(int(message.get("got", 0)))

    def _start(self, message: Message) -> None:
        attempt = int(message["attempt"])
        if attempt <= self._attempt:  # said twice, by a controller that was started again
            return
        self._attempt = attempt
        self._injected.clear()
        self._observed = Observed(attempt, self._tell)
        self._ranks.start(self._plans(attempt, str(message["first_host"]), int(message["port"])))

    def _preload(self) -> Preload | None:
        """The zygote for this run's command, if it is to have one."""
        command = self._spec.replica.command
        modules = modules_for(command, host_has_gpu()) if self._spec.replica.zygote else ()
        if not modules:
            return None
        # Whatever asks for a GPU while it is imported must ask in a way that leaves the fork usable.
        environment = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **self._environment(0, 0, "", 0)}
        del environment[env.SOCKET]  # the zygote is no rank and has nothing to report
        return Preload(command, modules, environment)

    def _plans(self, attempt: int, first_host: str, port: int) -> list[Plan]:
        replica = self._spec.replica
        cpus = split_cpus(sorted(os.sched_getaffinity(0)), replica.ranks_per_host)
        argv = rank_argv(replica.command, sys.executable)
        plans = []
        for local in range(replica.ranks_per_host):
            rank = self._index * replica.ranks_per_host + local
            log = self._paths.rank_log(self._replica, attempt, rank)
            plans.append(Plan(rank, local, argv, self._environment(attempt, local, first_host, port), log, cpus[local]))
        return plans

    def _environment(self, attempt: int, local: int, first_host: str, port: int) -> dict[str, str]:
        """The environment of one rank of an attempt; that of attempt 0 is the zygote's."""
        replica = self._spec.replica
        rank = self._index * replica.ranks_per_host + local
        place = Place(
            run=str(self._paths.root),
            replica=self._replica,
            replicas=self._spec.replicas,
            min_replicas=self._spec.policy.min_replicas,
            attempt=attempt,
            rank=rank,
            local_rank=local,
            ranks=replica.ranks,
            ranks_per_host=replica.ranks_per_host,
            first_host=first_host,
            port=port,
            socket=self._socket.name,
            lighthouse=self._lighthouse,
            error_file=str(self._paths.error(self._replica, attempt, rank)),
        )
        seen = visibility(os.environ, local, replica.ranks_per_host, self._platform)
        return rank_environment(
            rank_surroundings(os.environ, seen), place, replica.environment, [*self._hosts, first_host]
        )

    async def _clear(self, attempt: int, grace: float, stacks: bool) -> None:
        """End what is left of an attempt. One that comes late, because a restarted controller has said it twice,
        must not end the ranks of the next attempt."""
        if stacks and attempt == self._attempt:
            await self._write_stacks()
        if attempt < self._attempt:
            return
        await self._ranks.clear(grace)
        self._tell({"type": "cleared", "attempt": attempt, "index": self._index, "port": free_port()})

    async def _write_stacks(self) -> None:
        """Have the ranks that we observe write the stacks of their threads into their logs.

        The bootstrap has set the signal up; a program without it would die of it.
        """
        for rank in self._socket.ranks():
            self._ranks.signal(signal.SIGCONT, rank)
            self._ranks.signal(STACKS_SIGNAL, rank)
        await asyncio.sleep(STACKS_WITHIN)

    async def _give_up(self) -> None:
        await self._ranks.clear(self._spec.policy.kill_grace)
        await self._successor.give_up()
        await self._leave(self._spec.policy.kill_grace, 1)

    async def _leave(self, grace: float, code: int) -> None:
        await self._ranks.clear(grace)
        if not self._over.done():
            self._over.set_result(code)


def _named(message: Message) -> dict[str, Any]:
    return {name: message.get(name) for name in ("rank", "kind", "seconds")}


async def _main(arguments: argparse.Namespace) -> int:
    hosts = expand(arguments.hosts)
    host = arguments.host or os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    if host not in hosts:
        print(f"slurm-ft agent: this host is {host}, which is not in {arguments.hosts}", file=sys.stderr)
        return 2
    return await Agent(arguments.run_dir, arguments.replica, arguments.step, hosts, host).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--hosts", required=True, help="the replica's hosts, as a hostlist")
    parser.add_argument("--host", help="the name of this host; Slurm's by default")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited "ignore" would hide how ranks end
    sys.exit(asyncio.run(_main(parser.parse_args())))


if __name__ == "__main__":
    main()
