"""The controller's process: `python -m slurm_ft.controller.main --run-dir DIR --session ID ...`.

One asyncio loop that turns what happens into events for the Supervisor: messages of agents, ends of steps,
requests in the control folder, signals, and a tick. It is the only writer of `events.jsonl` and
`state.json`. Started again in the same session (by the head, after a crash), it folds the log, takes over
the steps that run, and the agents tell it what it missed.

    SIGTERM, SIGINT    stop the run in order
    SIGUSR2            the time limit or a preemption is near: stop in order, exit 75 (try again)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from slurm_ft.channel import Message, Server
from slurm_ft.controller import requests
from slurm_ft.controller.book import Book
from slurm_ft.controller.keepers import Keepers
from slurm_ft.controller.loop import Supervisor
from slurm_ft.controller.pace import Pace, hanging
from slurm_ft.controller.snapshot import snapshot
from slurm_ft.controller.supervise import FINAL, RANKS_RUN, STEP_EXISTS, Replica, RunState, State, fold
from slurm_ft.errors import EXIT_TRY_AGAIN, SlurmFTError
from slurm_ft.events import Clock, Event, EventLog, Kind, read
from slurm_ft.launch import Launcher, StepHandle, StepRequest
from slurm_ft.launch.local import LocalLauncher
from slurm_ft.launch.srun import SrunLauncher, allocation_from
from slurm_ft.mesh.layout import assign
from slurm_ft.paths import RunPaths, read_json, write_json
from slurm_ft.slurm.hostlist import expand
from slurm_ft.spec import RunSpec

TICK = 0.25
STANDING_PHASES = frozenset({"checkpoint", "eval"})
"""Phases in which a replica may stand still for as long as it takes."""
LATE = 2.0
"""A tick that comes this many seconds after the last one tells of a pause of this process, not of agents."""
STATE_INTERVAL = 1.0
REQUEST_INTERVAL = 0.5
ESCALATE_AFTER = 10.0
"""Seconds that a step may take to end after each of: shutdown by its agents, TERM, KILL."""
EXIT_CRASHED = 70
"""This process failed, not the training (EX_SOFTWARE of sysexits.h): the head starts it again."""

SIGNALS = {
    signal.SIGTERM: ("it got SIGTERM", 128 + signal.SIGTERM),
    signal.SIGINT: ("it was interrupted", 128 + signal.SIGINT),
    signal.SIGHUP: ("it lost its terminal (SIGHUP)", 128 + signal.SIGHUP),
    signal.SIGUSR2: ("the time limit or a preemption is near", EXIT_TRY_AGAIN),
}
EXPECTED = b"expected."
"""How the names begin that stand for agents which have not called a restarted controller yet."""
FORWARDED = {
    "phase": Kind.PHASE,
    "quorum": Kind.QUORUM,
    "commit": Kind.COMMIT,
    "torchft_error": Kind.TORCHFT_ERROR,
    "rank_failed": Kind.RANK_FAILED,
    "rank_done": Kind.RANK_DONE,
    "cleared": Kind.AGENT_CLEARED,
    "injected": Kind.INJECTED,
}

log = logging.getLogger("slurm_ft.controller")


@dataclass
class Peer:
    """An agent that has said who it is."""

    replica: int
    step: int
    index: int
    host: str
    heard: float


class Controller:
    """The world around the Supervisor. It is also the Supervisor's Effects."""

    def __init__(self, paths: RunPaths, spec: RunSpec, launcher: Launcher, server: Server, session: str) -> None:
        self._paths, self._spec, self._launcher, self._server = paths, spec, launcher, server
        self._session = session
        self._clock = Clock()
        self._log = EventLog(paths.events, on_trouble=lambda error: log.warning("events wait: %s", error))
        self._book = Book()
        self._steps: dict[int, StepHandle] = {}
        self._peers: dict[bytes, Peer] = {}
        self._work: set[asyncio.Task[None]] = set()
        self._paces: dict[int, Pace] = {}
        self._said: dict[int, str] = {}
        self._facts: dict[str, Any] = {}
        self._changed = asyncio.Event()
        self.supervisor = Supervisor(spec.policy, self, self._record, self._clock)
        allocation = None if spec.cluster == "local" else allocation_from(os.environ)
        self._keepers = Keepers(paths, spec, allocation, self.supervisor.take)
        self._kept: list[Event] = []

    def _record(self, event: Event) -> None:
        self._log.append(event)
        if event.kind is Kind.RUN_STARTED:
            self._facts = {**event.data, "started": event.t}
        self._changed.set()

    # --- the life of a run -----------------------------------------------------------------------------

    async def run(self, hosts: list[str], job_id: str, host: str) -> int:
        """Look after the run until it is over; gives its exit code."""
        adopted = self._recover()
        if not adopted:
            self._begin(hosts, job_id, host)
        self.supervisor.take(
            Kind.CONTROLLER_STARTED, pid=os.getpid(), host=host, endpoint=self._server.endpoint, adopted=adopted
        )
        self._keepers.start(hosts, self._kept)
        if adopted:
            self._adopt()
        loop = asyncio.get_running_loop()
        for number, (why, code) in SIGNALS.items():
            loop.add_signal_handler(number, partial(self._stop, why, code))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the head starts us with these blocked
        for work in (self._listen(), self._tick(), self._read_requests(), self._write_states()):
            self._do(work)
        while self.supervisor.state.ended is None:
            self.supervisor.act()
            self._say_reasons()
            if self.supervisor.state.ended is None:
                self._changed.clear()
                await self._changed.wait()
        return await self._end(self.supervisor.state.ended)

    def _recover(self) -> bool:
        """Is this a session that an earlier controller began? Then take its state from the log."""
        events = list(read(self._paths.events))
        starts = [index for index, event in enumerate(events) if event.kind is Kind.RUN_STARTED]
        self._before = fold(events[starts[-1] :]) if starts else RunState()
        if not starts or events[starts[-1]].data.get("session") != self._session:
            return False
        self.supervisor.state = self._before
        self._facts = {**events[starts[-1]].data, "started": events[starts[-1]].t}
        self._book.replay(events[starts[-1] :])
        self._kept = [event for event in events[starts[-1] :] if event.kind is Kind.KEEPER]
        self.supervisor.unsure = {r.id for r in self._before.replicas if r.state is State.PENDING}
        return True

    def _begin(self, hosts: list[str], job_id: str, host: str) -> None:
        spec = self._spec
        layout = assign(hosts, spec.replicas, spec.replica.hosts, spec.spares, spec.replica.ranks_per_host)
        before = self._before.replicas
        self.supervisor.take(
            Kind.RUN_STARTED,
            session=self._session,
            name=spec.name,
            job_id=job_id,
            cluster=spec.cluster,
            head_host=host,
            replicas=[list(names) for names in layout.replicas],
            spares=list(layout.spares),
            ranks_per_host=spec.replica.ranks_per_host,
            min_replicas=spec.policy.min_replicas,
            attempts={str(r.id): r.attempt for r in before},
            steps={str(r.id): r.step for r in before},
        )

    def _adopt(self) -> None:
        """Take over the steps that an earlier controller of this session has started."""
        now = time.monotonic()
        for replica in self.supervisor.state.replicas:
            if replica.state not in STEP_EXISTS or replica.pid is None:
                continue
            request = self._request(replica, replica.step)
            self._watch(replica.id, replica.step, self._launcher.adopt(request, replica.pid))
            if replica.state is State.TRAINING:
                self._paces[replica.id] = Pace(now)
            for index in replica.addresses:
                # Until it calls, this stands for the agent: one that never does is lost.
                name = EXPECTED + f"{replica.id}.{index}".encode()
                self._peers[name] = Peer(replica.id, replica.step, index, replica.hosts[index], now)
            if replica.state is State.ENDING:
                self.end_step(replica, self._spec.policy.kill_grace)

    async def _end(self, code: int) -> int:
        self._paths.stop.unlink(missing_ok=True)
        self._write_state()
        await self._keepers.end()
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        self._write_state()
        self._log.close()
        self._server.close()
        return code

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.critical("a task of the controller failed", exc_info=task.exception())
            os._exit(EXIT_CRASHED)

    def _say_reasons(self) -> None:
        """Log a reason when it changes; what counts up in it is no change."""
        for replica, reason in self.supervisor.reasons.items():
            words = "".join(letter for letter in reason if not letter.isdigit() and letter != ".")
            if self._said.get(replica) != words:
                self._said[replica] = words
                log.info("replica %d %s: %s", replica, self.supervisor.state.replicas[replica].state, reason)

    # --- what comes in ---------------------------------------------------------------------------------

    async def _listen(self) -> None:
        async for name, message in self._server.messages():
            self._hear(name, message)

    def _hear(self, name: bytes, message: Message) -> None:
        kind = message["type"]
        if kind == "hello":
            self._hello(name, message)
            return
        peer = self._peers.get(name)
        if peer is None:
            if kind != "leaving":
                self._server.send(name, {"type": "who"})
            return
        peer.heard = time.monotonic()
        if kind == "alive":
            missed = _missed(self.supervisor.state.replicas[peer.replica], peer.index, message)
            self._server.send(name, {"type": "who" if missed else "alive"})
        elif kind == "leaving":
            del self._peers[name]
        elif kind == "progress":
            self._progress(peer, message)
        elif kind in FORWARDED:
            self._news(peer, message)

    def _hello(self, name: bytes, message: Message) -> None:
        peer = Peer(message["replica"], message["step"], message["index"], message["host"], time.monotonic())
        replica = self.supervisor.state.replicas[peer.replica]
        if peer.step != replica.step or replica.state not in STEP_EXISTS:
            self._server.send(name, {"type": "shutdown", "grace": self._spec.policy.kill_grace})
            return
        self._peers = {n: p for n, p in self._peers.items() if (p.replica, p.index) != (peer.replica, peer.index)}
        self._peers[name] = peer
        self._server.send(name, {"type": "alive"})
        if replica.state is State.LAUNCHING:
            names = ("step", "index", "host", "address", "port", "step_id", "agent_pid", "gpus")
            self.supervisor.take(Kind.AGENT_JOINED, peer.replica, **{key: message.get(key) for key in names})
        else:
            self._catch_up(peer, replica, message)

    def _catch_up(self, peer: Peer, replica: Replica, message: Message) -> None:
        """An agent that we knew calls again, after one of us was away: repeat what may have been lost."""
        for end in message["ends"]:
            self._news(peer, end)
        if replica.state in RANKS_RUN and message["attempt"] < replica.attempt:
            self.start_ranks(replica)
        elif replica.state is State.CLEARING:
            self.clear_ranks(replica)
        elif replica.state is State.ENDING:
            self._tell(replica, {"type": "shutdown", "grace": self._spec.policy.kill_grace})

    def _progress(self, peer: Peer, message: Message) -> None:
        if message["attempt"] != self.supervisor.state.replicas[peer.replica].attempt:
            return
        if not message.get("step"):  # a phase before the first step is no progress yet
            return
        if message["step"] != self._book.page(peer.replica).step:
            self._moved(peer.replica)
        self._book.progress(peer.replica, message)
        if not self.supervisor.state.collective:  # there a step counts once it is committed
            self._get_on(peer.replica, message["attempt"])
        self._sample(peer.replica)

    def _news(self, peer: Peer, message: Message) -> None:
        kind = FORWARDED[message["type"]]
        data = {name: value for name, value in message.items() if name not in ("v", "type")}
        current = message.get("attempt") == self.supervisor.state.replicas[peer.replica].attempt
        if kind is Kind.COMMIT and message["rank"] != 0:
            return  # every rank of a replica says the same
        if current and kind is Kind.COMMIT:
            self._book.commit(peer.replica, message)
            self._moved(peer.replica)
        elif current and kind is Kind.QUORUM:
            self._book.page(peer.replica).quorum_id = message.get("quorum_id")
        elif current and kind is Kind.PHASE:
            self._book.page(peer.replica).phase = message.get("phase")
        if kind in (Kind.RANK_FAILED, Kind.RANK_DONE):
            self._sample(peer.replica, last=True)
        self.supervisor.take(kind, peer.replica, **data)
        if kind is Kind.COMMIT and message.get("committed"):
            self._get_on(peer.replica, message["attempt"])

    def _get_on(self, replica: int, attempt: int) -> None:
        if self.supervisor.state.replicas[replica].state is State.RUNNING:
            self.supervisor.take(Kind.PROGRESSED, replica, attempt=attempt)

    def _sample(self, replica: int, last: bool = False) -> None:
        sample = self._book.sample(replica, self._clock(), last)
        if sample is not None:
            self.supervisor.take(Kind.PROGRESS, replica, **sample)

    async def _tick(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK)
            self._log.flush()
            now = time.monotonic()
            if now - last > LATE:
                # We were stopped, or a write of ours hung: that agents were not heard is our own doing.
                for peer in self._peers.values():
                    peer.heard = now
                for pace in self._paces.values():
                    pace.moved_at = now
            last = now
            self._miss_silent_agents(now)
            self._find_hanging(now)
            self._changed.set()

    def _miss_silent_agents(self, now: float) -> None:
        for name, peer in list(self._peers.items()):
            silence = now - peer.heard
            if silence > self._spec.policy.agent_timeout:
                del self._peers[name]
                self.supervisor.take(
                    Kind.AGENT_LOST,
                    peer.replica,
                    step=peer.step,
                    index=peer.index,
                    host=peer.host,
                    what=f"the agent on {peer.host} is silent since {silence:.0f} s",
                    age=silence,
                )

    def _find_hanging(self, now: float) -> None:
        """A replica that hangs has failed, like one whose rank has died."""
        replicas = self.supervisor.state.replicas
        if self.supervisor.state.collective and self.supervisor.state.first_done is not None:
            return  # the training is finished; who is left may be writing the last checkpoint
        busy = {number for number, page in self._book.pages.items() if page.phase in STANDING_PHASES}
        training = frozenset(r.id for r in replicas if r.state is State.TRAINING) - busy
        alone = sum(r.state not in FINAL for r in replicas) == 1
        hang_after = self._spec.policy.hang_after
        for number, seconds in hanging(self._paces, training, alone, now, hang_after).items():
            self._sample(number, last=True)
            self.supervisor.take(
                Kind.RANK_FAILED,
                number,
                attempt=replicas[number].attempt,
                rank=0,
                host=replicas[number].hosts[0],
                what=f"it has stood still for {seconds:.0f} s at step {self._book.page(number).step}",
                hung=True,
                age=seconds,
                log=str(self._paths.rank_log(number, replicas[number].attempt, 0)),
            )

    def _moved(self, replica: int) -> None:
        now = time.monotonic()
        if replica in self._paces:
            self._paces[replica].moved(now)
        else:
            self._paces[replica] = Pace(now)

    def _stop(self, why: str, code: int) -> None:
        self.supervisor.take(Kind.STOP_REQUESTED, why=why, code=code)

    async def _read_requests(self) -> None:
        while True:
            await asyncio.sleep(REQUEST_INTERVAL)
            if requests.stop_is_asked_for(self._paths):
                self._stop("a stop was asked for", 128 + signal.SIGTERM)
            if not any(name.startswith(EXPECTED) for name in self._peers):  # who has not called cannot be told
                for request in requests.taken(self._paths, self._note):
                    self._inject(request)

    def _note(self, text: str) -> None:
        self.supervisor.take(Kind.NOTE, text=text)

    def _inject(self, request: requests.Inject) -> None:
        order = {"id": request.id, "rank": request.rank, "kind": request.kind}
        if not 0 <= request.replica < len(self.supervisor.state.replicas):
            self.supervisor.take(Kind.INJECTED, **order, error=f"there is no replica {request.replica}")
            return
        index = request.rank // self._spec.replica.ranks_per_host
        for name, peer in self._peers.items():
            if (peer.replica, peer.index) == (request.replica, index):
                self._server.send(name, {"type": "inject", **order})
                return
        error = f"rank {request.rank} of replica {request.replica} is not running"
        self.supervisor.take(Kind.INJECTED, request.replica, **order, error=error)

    # --- Effects: what the supervisor asks for ---------------------------------------------------------

    def _request(self, replica: Replica, step: int) -> StepRequest:
        return StepRequest(self._paths, replica.id, step, replica.hosts)

    def launch(self, replica: Replica, step: int) -> int:
        handle = self._launcher.launch(self._request(replica, step))
        self._watch(replica.id, step, handle)
        return handle.pid

    def _watch(self, replica: int, step: int, handle: StepHandle) -> None:
        self._steps[replica] = handle
        self._do(self._await_step(replica, step, handle))

    async def _await_step(self, replica: int, step: int, handle: StepHandle) -> None:
        ended = await handle.wait()
        # What the agents said last may still be on its way: it names the cause, the step's end does not.
        await asyncio.sleep(0)
        self._peers = {n: p for n, p in self._peers.items() if (p.replica, p.step) != (replica, step)}
        self._sample(replica, last=True)
        self.supervisor.take(Kind.STEP_EXITED, replica, step=step, code=ended.code, what=ended.what)

    def _tell(self, replica: Replica, message: Message) -> bool:
        names = [n for n, peer in self._peers.items() if (peer.replica, peer.step) == (replica.id, replica.step)]
        for name in names:
            self._server.send(name, message)
        return bool(names)

    def start_ranks(self, replica: Replica) -> None:
        self._book.started(replica.id, replica.attempt)
        self._paces.pop(replica.id, None)
        self._tell(
            replica,
            {
                "type": "start",
                "attempt": replica.attempt,
                "first_host": replica.addresses[0],
                "port": replica.agents[0],
            },
        )

    def clear_ranks(self, replica: Replica) -> None:
        hung = replica.failure is not None and replica.failure.hung
        grace = self._spec.policy.kill_grace
        self._tell(replica, {"type": "clear", "attempt": replica.attempt, "grace": grace, "stacks": hung})

    def end_step(self, replica: Replica, grace: float) -> None:
        self._do(self._escalate(replica, grace))

    async def _escalate(self, replica: Replica, grace: float) -> None:
        """End a step: by its agents, then by TERM, then by KILL; at once by KILL when no agent answers."""
        handle = self._steps[replica.id]
        if self._tell(replica, {"type": "shutdown", "grace": grace}):
            if await self._gone(replica, grace):
                return
            await handle.terminate()
            if await self._gone(replica, 0.0):
                return
        await handle.kill()

    async def _gone(self, replica: Replica, grace: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace + ESCALATE_AFTER):
                while self.supervisor.state.replicas[replica.id].pid == replica.pid:
                    await asyncio.sleep(0.05)
                return True
        return False

    # --- what we show ----------------------------------------------------------------------------------

    async def _write_states(self) -> None:
        while True:
            self._write_state()
            await asyncio.sleep(STATE_INTERVAL)

    def _write_state(self) -> None:
        try:
            now, reasons = self._clock(), self.supervisor.reasons
            write_json(self._paths.state, snapshot(now, self.supervisor.state, self._facts, self._book, reasons))
        except OSError as error:
            log.warning("state.json waits: %s", error)


def _missed(replica: Replica, index: int, message: Message) -> bool:
    """Did a message to or from this agent get lost with a connection, by what its sign of life says? Then it is
    asked to say who it is, and all is said again."""
    attempt = message.get("attempt", replica.attempt)
    if replica.state is State.CLEARING:
        return message.get("cleared") == replica.attempt and index not in replica.agents
    if replica.state not in RANKS_RUN:
        return False
    return attempt < replica.attempt or not replica.done_ranks.issuperset(message.get("ended", ()))


def _launcher(spec: RunSpec) -> Launcher:
    return LocalLauncher() if spec.cluster == "local" else SrunLauncher(allocation_from(os.environ))


async def _main(options: argparse.Namespace) -> int:
    paths = RunPaths(options.run_dir)
    spec = RunSpec.from_json(read_json(paths.spec))
    server = Server(paths, options.address)
    controller = Controller(paths, spec, _launcher(spec), server, options.session)
    return await controller.run(expand(options.hosts), options.job_id, options.host)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("run-dir", "session", "hosts", "job-id", "host", "address"):
        parser.add_argument(f"--{name}", required=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited "ignore" would hide how children end
    try:
        sys.exit(asyncio.run(_main(parser.parse_args())))
    except SlurmFTError as error:
        error.show()
        sys.exit(error.exit_code)
    except Exception:
        log.exception("the controller failed")
        sys.exit(EXIT_CRASHED)


if __name__ == "__main__":
    main()
