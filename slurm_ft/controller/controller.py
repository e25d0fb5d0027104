"""The world around the Supervisor: one asyncio loop that turns what happens into events.

Messages of agents, ends of steps, requests in the control folder, signals, and a tick. It is the only
writer of `events.jsonl` and `state.json`. Started again in the same session (by the head, after a crash),
it folds the log, takes over the steps that run, and the agents tell it what it missed.

    SIGTERM, SIGINT, SIGHUP    stop the run in order
    SIGUSR2                    the time limit or a preemption is near: stop in order, exit 75 (try again)
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any

from slurm_ft.channel import Message, Server
from slurm_ft.controller import hurt, requests
from slurm_ft.controller.book import Book
from slurm_ft.controller.loop import Supervisor
from slurm_ft.controller.pace import Pace, hanging
from slurm_ft.controller.peers import Peer, Peers
from slurm_ft.controller.snapshot import snapshot
from slurm_ft.controller.state import FINAL, RANKS_RUN, STEP_EXISTS, Replica, RunState, State, fold
from slurm_ft.controller.steps import Steps
from slurm_ft.errors import EXIT_TRY_AGAIN
from slurm_ft.events import Clock, Event, EventLog, Kind, read
from slurm_ft.launch import Launcher
from slurm_ft.launch.base import Ended
from slurm_ft.mesh.layout import assign
from slurm_ft.paths import RunPaths, write_json
from slurm_ft.spec import RunSpec

TICK = 0.25
STANDING_PHASES = frozenset({"checkpoint", "eval"})
"""Phases in which a replica may stand still for as long as it takes."""
LATE = 2.0
"""A tick that comes this many seconds after the last one tells of a pause of this process, not of agents."""
STATE_INTERVAL = 1.0
REQUEST_INTERVAL = 0.5
EXIT_CRASHED = 70
"""This process failed, not the training (EX_SOFTWARE of sysexits.h): the head starts it again."""

SIGNALS = {
    signal.SIGTERM: ("it got SIGTERM", 128 + signal.SIGTERM),
    signal.SIGINT: ("it was interrupted", 128 + signal.SIGINT),
    signal.SIGHUP: ("it lost its terminal (SIGHUP)", 128 + signal.SIGHUP),
    signal.SIGUSR2: ("the time limit or a preemption is near", EXIT_TRY_AGAIN),
}
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


class Controller:
    """The world around the Supervisor. It is also the Supervisor's Effects."""

    def __init__(self, paths: RunPaths, spec: RunSpec, launcher: Launcher, server: Server, session: str) -> None:
        self._paths, self._spec, self._server = paths, spec, server
        self._session = session
        self._clock = Clock()
        self._log = EventLog(paths.events, on_trouble=lambda error: log.warning("events wait: %s", error))
        self._book = Book()
        self._peers = Peers(server)
        self._steps = Steps(paths, launcher, self._peers, self._do, self._step_exited)
        self._work: set[asyncio.Task[None]] = set()
        self._paces: dict[int, Pace] = {}
        self._said: dict[int, str] = {}
        self._facts: dict[str, Any] = {}
        self._changed = asyncio.Event()
        self.supervisor = Supervisor(spec.policy, self, self._record, self._clock)

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
            self._steps.adopt(replica, replica.pid)
            if replica.state is State.TRAINING:
                self._paces[replica.id] = Pace(now)
            self._peers.expect(replica)
            if replica.state is State.ENDING:
                self.end_step(replica, self._spec.policy.kill_grace)

    async def _end(self, code: int) -> int:
        self._paths.stop.unlink(missing_ok=True)
        self._write_state()
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
                self._peers.send(name, {"type": "who"})
            return
        peer.heard = time.monotonic()
        if kind == "alive":
            missed = _missed(self.supervisor.state.replicas[peer.replica], peer.index, message)
            self._peers.send(name, {"type": "who" if missed else "alive"})
        elif kind == "leaving":
            self._peers.drop(name)
        elif kind == "progress":
            self._progress(peer, message)
        elif kind in FORWARDED:
            self._news(peer, message)

    def _hello(self, name: bytes, message: Message) -> None:
        peer = Peer(message["replica"], message["step"], message["index"], message["host"], time.monotonic())
        replica = self.supervisor.state.replicas[peer.replica]
        if peer.step != replica.step or replica.state not in STEP_EXISTS:
            self._peers.send(name, {"type": "shutdown", "grace": self._spec.policy.kill_grace})
            return
        self._peers.add(name, peer)
        self._peers.send(name, {"type": "alive"})
        if replica.state is State.LAUNCHING:
            names = ("step", "index", "host", "address", "port", "step_id", "agent_pid", "gpus")
            self.supervisor.take(Kind.AGENT_JOINED, peer.replica, **{key: message.get(key) for key in names})
        else:
            self._catch_up(peer, replica, message)

    def _catch_up(self, peer: Peer, replica: Replica, message: Message) -> None:
        """An agent that we knew calls again, after one of us was away: repeat what may have been lost."""
        for news in (*message["commits"], *message["ends"]):
            self._news(peer, news)
        if replica.state in RANKS_RUN and message["attempt"] < replica.attempt:
            self.start_ranks(replica)
        elif replica.state is State.CLEARING:
            self.clear_ranks(replica)
        elif replica.state is State.ENDING:
            self._peers.tell(replica, {"type": "shutdown", "grace": self._spec.policy.kill_grace})

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
        if kind is Kind.COMMIT and (message["rank"] != 0 or (current and self._book.has(peer.replica, message))):
            return  # every rank of a replica says the same, and an agent that calls again says it twice
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
                self._peers.hear_all(now)
                for pace in self._paces.values():
                    pace.moved_at = now
            last = now
            self._miss_silent_agents(now)
            self._find_hanging(now)
            self._changed.set()

    def _miss_silent_agents(self, now: float) -> None:
        for peer, silence in self._peers.silent(now, self._spec.policy.agent_timeout):
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

    def _step_exited(self, replica: int, step: int, ended: Ended) -> None:
        self._peers.drop_step(replica, step)
        self._sample(replica, last=True)
        self.supervisor.take(Kind.STEP_EXITED, replica, step=step, code=ended.code, what=ended.what)

    async def _read_requests(self) -> None:
        while True:
            await asyncio.sleep(REQUEST_INTERVAL)
            if requests.stop_is_asked_for(self._paths):
                self._stop("a stop was asked for", 128 + signal.SIGTERM)
            if self._peers.all_have_called:  # who has not called cannot be told
                for request in requests.taken(self._paths, self._note):
                    self._inject(request)

    def _note(self, text: str) -> None:
        self.supervisor.take(Kind.NOTE, text=text)

    def _inject(self, request: requests.Inject) -> None:
        """Carry a request out, or hand it to the agent, who then answers."""
        order = {"id": request.id, "rank": request.rank, "kind": request.kind, "seconds": request.seconds}
        answer = partial(self.supervisor.take, Kind.INJECTED, request.replica, **order)
        replica = request.replica
        if replica is None:
            if request.kind == "controller":
                answer(error="")  # afterwards nobody would
            answer(error=self._hurt_run(request))
        elif not 0 <= replica < len(self.supervisor.state.replicas):
            answer(error=f"there is no replica {replica}")
        elif request.kind == "srun":
            answer(error=self._hurt_client(self.supervisor.state.replicas[replica]))
        elif not self._peers.tell_host(
            replica, request.rank // self._spec.replica.ranks_per_host, {"type": "inject", **order}
        ):
            answer(error=f"rank {request.rank} of replica {replica} is not running")

    def _hurt_run(self, request: requests.Inject) -> str:
        if request.kind == "controller":
            return hurt.kill(os.getpid())
        if request.kind == "lighthouse":
            return hurt.kill_lighthouse(self._paths.root)
        return f"the kind `{request.kind}` is unknown"

    def _hurt_client(self, replica: Replica) -> str:
        if self._spec.cluster == "local":
            return "a local run has no srun; use `agent`"
        return "its step is not running" if replica.pid is None else hurt.kill(replica.pid)

    # --- Effects: what the supervisor asks for ---------------------------------------------------------

    def launch(self, replica: Replica, step: int) -> int:
        return self._steps.launch(replica, step)

    def start_ranks(self, replica: Replica) -> None:
        self._book.started(replica.id, replica.attempt)
        self._paces.pop(replica.id, None)
        self._peers.tell(
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
        self._peers.tell(replica, {"type": "clear", "attempt": replica.attempt, "grace": grace, "stacks": hung})

    def end_step(self, replica: Replica, grace: float) -> None:
        self._steps.end(replica, grace)

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
