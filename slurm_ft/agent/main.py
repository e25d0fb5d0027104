"""The agent's process: `python -m slurm_ft.agent.main --run-dir DIR --replica N --step N --hosts LIST`.

One asyncio loop. It dials the controller, says who it is, and does what it is told:

    start      start the ranks of an attempt
    clear      end what is left of an attempt; answer with a port for the next one
    shutdown   end the ranks and leave
    inject     hurt a rank, or this host, on purpose
    save       ask the ranks to save (see saves.py)
    abort      a replica is gone: have the ranks leave their collective with it
    who        say again who you are (to a controller that was started again)

and tells of every rank's end, of progress, and once a second that it lives. Ranks keep running while there
is no controller, and the agents see to it that there is one again (agent/successor.py); after the policy's
`orphan_timeout` without one the agent ends its ranks and leaves, and gives the run up if nobody looks after it.
Only the controller of the highest epoch that the agent knows of is obeyed and counts as heard.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any

from slurm_ft import env
from slurm_ft.agent import fitness
from slurm_ft.agent.address import address_towards, free_port
from slurm_ft.agent.ends import left_by
from slurm_ft.agent.housekeeping import Housekeeping
from slurm_ft.agent.hurt import hurt
from slurm_ft.agent.listen import Forwarder, RankSocket
from slurm_ft.agent.observed import Observed
from slurm_ft.agent.oom import OomWatch
from slurm_ft.agent.outbox import Outbox
from slurm_ft.agent.planner import Planner
from slurm_ft.agent.process import open_log
from slurm_ft.agent.ranks import Exit, Plan, Ranks
from slurm_ft.agent.saves import Saves
from slurm_ft.agent.stacks import by_pyspy
from slurm_ft.agent.successor import Successor
from slurm_ft.agent.visibility import bus_ids
from slurm_ft.aside import Aside
from slurm_ft.channel import HEARTBEAT, Client, Message
from slurm_ft.errors import EXIT_LAUNCH
from slurm_ft.native import probes
from slurm_ft.paths import RunPaths, read_json
from slurm_ft.slurm.hostlist import expand
from slurm_ft.spec import RunSpec
from slurm_ft.train.progress import STACKS_SIGNAL

PROGRESS_INTERVAL = 0.25
FORK_INTERVAL = 0.05
REDIAL_AFTER = 3.0
FILES_WITHIN = 2.0
"""Seconds for reading what a dead rank left in the run folder; its end is told without it then."""
STACKS_WITHIN = 0.5
"""Seconds that a rank has to write its stacks; the handler runs at once, even while the GIL is held."""
FIT_SHARE = 0.5
"""Of the agent_timeout, for a health check: the controller waits no longer than that for our word."""


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
        self._gpus: list[str] = []  # those that the step sees, by bus id: indexes mean something else on each host
        self._attempt = 0
        self._cleared = self._to_clear = 0
        self._injected: set[int] = set()  # ranks of this attempt that were hurt on purpose
        self._outbox = Outbox(self._client.send)
        self._observed = Observed(0, self._tell)
        save_signal = self._spec.replica.save_signal
        self._saves = Saves(self._index, save_signal, self._socket.send, self._signal_rank, self._tell)
        self._files = Aside("files")  # the run folder's file system may be away
        self._housekeeping = Housekeeping(
            self._paths.root, host, replica, lambda: list(self._ranks.pids.values()), lambda: bool(self._gpus)
        )
        self._oom = OomWatch()
        self._last_address = ""
        self._heard = time.monotonic()
        self._orphaned = False
        self._begun = asyncio.Event()  # the ranks of this attempt are started, if they are to be
        self._begun.set()
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
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            # A job's --signal without `B:` is meant for the ranks, and goes to all processes of all steps.
            loop.add_signal_handler(number, lambda: None)
        found = await asyncio.to_thread(probes.gpus)
        platform = next((gpu.platform for gpu in found), "")
        self._gpus = bus_ids(os.environ, found, platform)
        self._lighthouse = await self._forwarder.start()
        self._planner = Planner(
            paths=self._paths,
            spec=self._spec,
            replica=self._replica,
            hosts=self._hosts,
            index=self._index,
            socket=self._socket.name,
            lighthouse=self._lighthouse,
            platform=platform,
            gpus=len(found),
        )
        self._ranks = Ranks(self._exited, self._planner.preload())
        if await self._fit():
            self._hello()
            for work in (
                self._receive(), self._live(), self._flush(), self._housekeeping.watch(), self._successor.watch()
            ):  # fmt: skip
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
        """Ours, as the controller's way leads. A folder that is away for a moment changes nothing."""
        try:
            self._last_address = address_towards(self._paths.endpoint.read_text())
        except OSError:
            if not self._last_address:
                raise
        return self._last_address

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
        self._do(self._tell_end(end, self._attempt))

    async def _tell_end(self, end: Exit, attempt: int) -> None:
        """Tell how a rank has ended, with what it left behind if that can be read in time."""
        left = "", ""
        if end.code:
            with contextlib.suppress(TimeoutError):
                work = self._files.do(partial(left_by, self._paths, self._replica, attempt, end.rank))
                left = await asyncio.wait_for(work, FILES_WITHIN)
        self._tell(self._end_message(end, attempt, *left))

    def _end_message(self, end: Exit, attempt: int, message: str, traceback: str) -> Message:
        if end.code == 0:
            return {"type": "rank_done", "attempt": attempt, "rank": end.rank}
        log = self._paths.rank_log(self._replica, attempt, end.rank)
        local = end.rank - self._index * self._spec.replica.ranks_per_host
        killed = end.code in (-signal.SIGKILL, 128 + signal.SIGKILL) and end.rank not in self._injected
        lack = self._oom.words() if killed else ""
        words = f"rank {end.rank} was killed {lack}" if lack else end.words
        return {
            "type": "rank_failed",
            "attempt": attempt,
            "rank": end.rank,
            "host": self._host,
            "what": f"{words}: {message}" if message else words,
            "code": end.code,
            "signal": end.signal_name,
            "age": time.monotonic() - end.at,
            "log": str(log),
            "traceback": traceback,
            **({"gpu": self._gpus[local % len(self._gpus)]} if self._gpus else {}),
            **({"oom": True} if lack else {}),
            **({"injected": True} if end.rank in self._injected else {}),
        }

    def _packet(self, rank: int, packet: dict[str, Any]) -> None:
        if not self._saves.packet(rank, packet, self._attempt):
            self._observed.packet(rank, packet)

    def _signal_rank(self, number: int, rank: int) -> bool:
        return self._ranks.signal(number, rank)

    async def _fit(self) -> bool:
        """Is this host fit, by the run's health check? One that is not is reported, and left."""
        seconds = self._spec.policy.agent_timeout * FIT_SHARE
        command = self._spec.host.health_check
        environ = {
            **fitness.check_environment(os.environ),
            env.HOST: self._host,
            env.KEEPER_MODE: self._spec.replica.keeper,
        }
        what = await fitness.fault(fitness.shell(command), environ, seconds, again=True) if command else ""
        if what:
            print(f"slurm-ft agent: {self._host} failed its check: {what}", file=sys.stderr, flush=True)
            names = {"replica": self._replica, "step": self._step, "index": self._index, "host": self._host}
            self._client.send({"type": "unfit", **names, "what": what})
            self._do(self._leave(self._spec.policy.kill_grace, EXIT_LAUNCH))
        return not what

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL)
            self._observed.flush()

    async def _live(self) -> None:
        while True:
            told = {"attempt": self._attempt, "told": self._outbox.last, "epoch": self._epoch}
            self._client.send({"type": "alive", **told})
            silence = self._silence()
            if silence > self._spec.policy.agent_timeout and self._lighthouse and not self._forwarder.fenced:
                self._do(self._fence())
            if silence > REDIAL_AFTER:
                with contextlib.suppress(OSError):  # the folder may be away too
                    self._client.dial()
            if silence > self._spec.policy.orphan_timeout and not self._orphaned:
                self._orphaned = True
                self._do(self._give_up(silence))
            await asyncio.sleep(HEARTBEAT)

    async def _fence(self) -> None:
        """The controller has given this host up by now. If it is the network that is cut, the ranks must not come
        back to the Lighthouse with it; if the controller is away alone, they train on."""
        if not await self._forwarder.reaches():
            print("slurm-ft agent: neither controller nor Lighthouse in reach: the ranks are fenced", file=sys.stderr)
            self._forwarder.fence()

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
        if kind == "alive":
            self._forwarder.open()  # the controller still counts on us
            self._outbox.acknowledged(int(message.get("got", 0)))
        elif kind == "start":
            self._start(message)
        elif kind == "clear":
            self._do(self._clear(int(message["attempt"]), float(message["grace"]), bool(message.get("stacks"))))
        elif kind == "shutdown":
            self._do(self._leave(float(message["grace"]), 0))
        elif kind == "inject":
            self._do(self._inject_when_started(message))
        elif kind == "abort":
            for rank in self._socket.ranks():
                self._socket.send(rank, {"type": "abort", "member": message["member"]})
        elif kind == "save":
            self._save(str(message["id"]), int(message["attempt"]))
        elif kind == "who":
            self._hello()
            self._outbox.again()

    def _start(self, message: Message) -> None:
        attempt = int(message["attempt"])
        if attempt <= self._attempt:  # said twice, by a controller that was started again
            return
        self._attempt = attempt
        self._injected.clear()
        self._saves.begin_attempt()
        self._observed = Observed(attempt, self._tell)
        self._begun.clear()
        self._do(self._begin(attempt, self._planner.plans(attempt, str(message["first_host"]), int(message["port"]))))

    async def _begin(self, attempt: int, plans: list[Plan]) -> None:
        """Start the ranks once their logs can be opened, however long that takes: who waits for the file system
        here is not the agent's loop. On a full disk there is no log to wait for."""
        with contextlib.suppress(OSError):
            await self._files.do(lambda: [open_log(plan.log).close() for plan in plans])
        words = await self._housekeeping.sweep(attempt) if self._cleared != attempt - 1 else ""
        if words:
            print(f"slurm-ft agent: before attempt {attempt}: {words}", file=sys.stderr)
        self._oom.begin()
        if attempt == self._attempt and self._to_clear < attempt:
            self._ranks.start(plans)
        self._begun.set()

    def _save(self, id: str, attempt: int) -> None:
        if attempt == self._attempt:
            self._saves.ask(id, attempt, self._ranks.numbers)

    async def _clear(self, attempt: int, grace: float, stacks: bool) -> None:
        """End what is left of an attempt, and start no more of it. One that comes late, because a restarted
        controller has said it twice, must not end the ranks of the next attempt."""
        self._to_clear = max(self._to_clear, attempt)
        if stacks and attempt == self._attempt:
            await self._write_stacks()
        await self._housekeeping.remember()
        if attempt < self._attempt:
            return
        await self._ranks.clear(grace)
        left = await self._housekeeping.sweep(attempt + 1)
        if not await self._fit():
            return
        self._cleared = attempt
        message = {"type": "cleared", "attempt": attempt, "index": self._index, "port": free_port()}
        self._tell(message | ({"leftovers": left} if left else {}))

    async def _write_stacks(self) -> None:
        """Have the stacks of the ranks' threads written into their logs (see stacks.py).

        Only ranks that we observe get the signal; a program without the bootstrap would die of it.
        """
        logs = {pid: self._paths.rank_log(self._replica, self._attempt, n) for n, pid in self._ranks.pids.items()}
        await by_pyspy(logs)
        for rank in self._socket.ranks():
            self._ranks.signal(signal.SIGCONT, rank)
            self._ranks.signal(STACKS_SIGNAL, rank)
        await asyncio.sleep(STACKS_WITHIN)

    async def _give_up(self, silence: float) -> None:
        # It was perhaps we who stood still, with the whole job (scontrol suspend): then we are about to hear something.
        await asyncio.sleep(REDIAL_AFTER)
        self._orphaned = self._silence() > silence
        if not self._orphaned:
            return
        print(f"slurm-ft agent: no controller for {self._silence():.0f} s, leaving", file=sys.stderr)
        await self._ranks.clear(self._spec.policy.kill_grace)
        await self._successor.give_up()
        await self._leave(self._spec.policy.kill_grace, 1)

    async def _leave(self, grace: float, code: int) -> None:
        await self._ranks.clear(grace)
        if not self._over.done():
            self._over.set_result(code)

    async def _inject_when_started(self, message: Message) -> None:
        await self._begun.wait()
        rank = int(message["rank"])
        while error := hurt(message["kind"], rank, message.get("seconds"), self._ranks, self._socket):
            if rank not in self._ranks.numbers or rank in self._ranks.pids:
                break
            await asyncio.sleep(FORK_INTERVAL)  # its zygote still imports
        if not error:
            self._injected.add(rank)
        self._tell({"type": "injected", "id": message["id"], "error": error, **_named(message)})


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
