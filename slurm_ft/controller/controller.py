"""The world around the Supervisor: one asyncio loop that turns what happens into events.

Messages of agents, ends of steps, requests in the control folder, signals, and a tick. It is the only
writer of `events.jsonl`, `state.json` and `saved.json`, and reads and writes the run folder in threads only, so
that a file system that stalls does not stop it. Started again in the same session (by the head, after a crash),
it folds the log, takes over the steps that run, and the agents tell it what it missed.

    SIGTERM, SIGINT, SIGHUP    save, and stop the run in order
    SIGUSR2                    the time limit or a preemption is near: the same, exit 75 (try again)

Started by the head of a higher epoch, on another host, it does the same. Its first event opens the epoch in
the log, which it then reads to that event: from then on readers drop what a deposed controller still writes.
One that is deposed itself (controller/tenure.py) leaves its steps alone, writes nothing more and exits with
EXIT_DEPOSED.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from slurm_ft.aside import Aside
from slurm_ft.channel import Message, Server
from slurm_ft.controller import lighthouse, requests, saving
from slurm_ft.controller.asking import Asking
from slurm_ft.controller.book import Book
from slurm_ft.controller.deliveries import Deliveries, Verdict
from slurm_ft.controller.hanging import HangWatch
from slurm_ft.controller.history import History
from slurm_ft.controller.injecting import Injector
from slurm_ft.controller.keepers import Keepers
from slurm_ft.controller.latelog import NO_ANSWER, SETTLE_WITHIN, LateLog, Trouble
from slurm_ft.controller.loop import Supervisor
from slurm_ft.controller.peers import Peer, Peers
from slurm_ft.controller.returns import ReturnWatch
from slurm_ft.controller.snapshot import snapshot
from slurm_ft.controller.spares import SpareWatch
from slurm_ft.controller.state import RANKS_RUN, STEP_EXISTS, Replica, RunState, State
from slurm_ft.controller.steps import Steps
from slurm_ft.controller.survivors import gone
from slurm_ft.controller.tenure import Tenure
from slurm_ft.errors import EXIT_TRY_AGAIN, LaunchError
from slurm_ft.events import Clock, Event, EventLog, Follower, Kind
from slurm_ft.launch import Launcher
from slurm_ft.launch.base import Ended
from slurm_ft.mesh.layout import assign
from slurm_ft.paths import RunPaths, write_json
from slurm_ft.spec import RunSpec

TICK = 0.25
LATE = 2.0
"""A tick that comes this many seconds after the last one tells of a pause of this process, not of agents."""
HEARD_WITHIN = 4.0
"""Seconds within which an agent must have been heard to count as heard: four of its signs of life."""
CALLS_WITHIN = 5.0
"""Seconds for an agent on the last head's host to call a new controller: it dials again after 3 s of silence, and
it has had `head_timeout` before."""
STATE_INTERVAL = 1.0
LAST_WRITES_WITHIN = 5.0
REQUEST_INTERVAL = 0.5
EXIT_CRASHED = 70
"""This process failed, not the training (EX_SOFTWARE of sysexits.h): the head starts it again."""
EXIT_DEPOSED = 76
"""Another head looks after the run now."""

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
    "member": Kind.MEMBER,
    "rank_failed": Kind.RANK_FAILED,
    "rank_done": Kind.RANK_DONE,
    "cleared": Kind.AGENT_CLEARED,
    "injected": Kind.INJECTED,
    "save_asked": Kind.SAVE_ASKED,
    "saved": Kind.SAVED,
}

log = logging.getLogger("slurm_ft.controller")


class Controller:
    """The world around the Supervisor. It is also the Supervisor's Effects."""

    def __init__(
        self,
        paths: RunPaths,
        spec: RunSpec,
        launcher: Launcher,
        server: Server,
        session: str,
        tenure: Tenure | None = None,
    ) -> None:
        self._tenure = tenure or Tenure()
        self._host = ""
        self._adopting = False
        self._paths, self._spec, self._server = paths, spec, server
        self._session = session
        self._clock = Clock()
        self._log = LateLog(EventLog(paths.events))
        self._saves: list[Event] = []  # the complete ones of the whole run
        self._trouble: Trouble | None = None
        self._files = Aside("files")
        self._book = Book()
        self._deliveries = Deliveries(spec.replica.ranks_per_host)
        self._on_disk: dict[tuple[int, int, int], int] = {}  # how much of each agent's news is
        self._peers = Peers(server)
        self._asking = Asking(self._peers)
        self._steps = Steps(paths, launcher, self._peers, self._do, self._step_exited)
        self._spares = SpareWatch(spec.host, launcher, self._state, self._host_checked, spec.replica.keeper)
        self._work: set[asyncio.Task[None]] = set()
        self._hangs = HangWatch(spec.policy.hang_after, spec.policy.min_replicas)
        self._said: dict[int, str] = {}
        self._facts: dict[str, Any] = {}
        self._changed = asyncio.Event()
        self.supervisor = Supervisor(spec.policy, self, self._record, self._clock)
        self._keepers = Keepers(paths, spec, launcher.allocation, self.supervisor.take)
        self._injector = Injector(paths, spec, self._log, self._peers, self._state, self.supervisor.take)
        self._returns = ReturnWatch(
            spec.cluster,
            self._clock,
            lambda: str(self._facts.get("job_id", "")),
            self._state,
            lambda host: self.supervisor.take(Kind.HOST_RETURNED, host=host),
        )

    def _state(self) -> RunState:
        return self.supervisor.state

    def _record(self, event: Event) -> None:
        if not self._tenure.may_act():
            self._changed.set()
            return
        self._log.append(replace(event, epoch=self._tenure.epoch))
        if event.kind is Kind.SAVE_ENDED and event.data["complete"]:
            self._saves.append(event)
            self._files.post(
                partial(write_json, self._paths.saved, saving.marker(self._saves)),
                lambda error: log.error("saved.json was not written: %s", error),
            )
        if event.kind is Kind.RUN_STARTED:
            self._facts = {**event.data, "started": event.t}
        self._changed.set()

    # --- the life of a run -----------------------------------------------------------------------------

    async def run(self, hosts: list[str], job_id: str, host: str) -> int:
        """Look after the run until it is over; gives its exit code."""
        self._host = host
        self._do(self._tenure.keep(self._able, self._changed.set))
        log = Follower(self._paths.events)
        history = await asyncio.to_thread(History(self._spec.replica.ranks_per_host).read_on, log)
        self._open_epoch(history.epoch)
        adopted = self._recover(await asyncio.to_thread(history.read_on, log))
        if not adopted:
            self._begin(hosts, job_id, host)
        self.supervisor.take(
            Kind.CONTROLLER_STARTED, pid=os.getpid(), host=host, endpoint=self._server.endpoint, adopted=adopted
        )
        self._keepers.start(hosts)
        if adopted:
            self._adopt()
        loop = asyncio.get_running_loop()
        for number, (why, code) in SIGNALS.items():
            loop.add_signal_handler(number, partial(self._stop, why, code))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the head starts us with these blocked
        for work in (
            self._listen(), self._tick(), self._read_requests(), self._write_states(),
            self._spares.run(), self._returns.run(),
        ):  # fmt: skip
            self._do(work)
        while self.supervisor.state.ended is None:
            if not self._tenure.may_act():
                return await self._step_down()
            self._tell_survivors()
            self.supervisor.act()
            self._say_reasons()
            if self.supervisor.state.ended is None:
                self._changed.clear()
                await self._changed.wait()
        return await self._end(self.supervisor.state.ended)

    def _open_epoch(self, written: int) -> None:
        """Begin our epoch in the log, unless a controller before this one has: `written` is the highest there."""
        if written >= self._tenure.epoch:
            return
        claim = self._tenure.claim
        self.supervisor.take(
            Kind.HEAD_STARTED,
            host=claim.host,
            pid=claim.pid,
            before=claim.before,
            silence=claim.silence,
            age=max(0.0, self._clock() - claim.at),
            up=max(0.0, claim.up - claim.at),
        )
        self._log.settle(SETTLE_WITHIN)

    def _able(self) -> bool:
        """Can we do our job? Only as long as we are not cut off from most of our agents."""
        return self._spec.cluster == "local" or self._peers.most_are_heard(time.monotonic(), HEARD_WITHIN, self._host)

    async def _step_down(self) -> int:
        """We are deposed: the steps are another controller's now, and so is all that is written."""
        log.warning("deposed by the head of epoch %d", self._tenure.over)
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        self._steps.let_go()
        self._keepers.let_go()
        self._server.close()
        return EXIT_DEPOSED

    def _recover(self, history: History) -> bool:
        """Is this a session that an earlier controller began? Then take its state from the log."""
        self._before, self._saves = history.state, history.saves
        if history.started is None or history.started.data.get("session") != self._session:
            return False
        self.supervisor.state = history.state
        self._facts = {**history.started.data, "started": history.started.t, "head_host": self._host}
        self._book, self._deliveries = history.book, history.deliveries
        self._keepers.replay(history.keepers)
        self.supervisor.unsure = {r.id for r in history.state.replicas if r.state is State.PENDING}
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
            restart=_number(os.environ.get("SLURM_RESTART_COUNT", "")),
            attempts={str(r.id): r.attempt for r in before},
            steps={str(r.id): r.step for r in before},
        )
        if words := lighthouse.lack(spec.replica.command, spec.replicas, {**os.environ, **spec.replica.environment}):
            self._note(words)

    def _adopt(self) -> None:
        """Take over the steps that an earlier controller of this session has started."""
        for replica in self.supervisor.state.replicas:
            if replica.state not in STEP_EXISTS or replica.pid is None:
                continue
            self._steps.adopt(replica, replica.pid)
            if replica.state is State.TRAINING:
                self._hangs.adopted(replica.id)
            self._peers.expect(replica, self._lost_host(), self._spec.policy.agent_timeout - CALLS_WITHIN)
            if replica.state is State.ENDING:
                self.end_step(replica, self._spec.policy.kill_grace)
        self._adopting = True

    def _lost_host(self) -> str:
        """The host of the head that we follow, which is probably dead; '' when we follow none."""
        claim = self._tenure.claim
        return claim.before if claim.silence and claim.before != self._host else ""

    def _note_adoption(self) -> None:
        """Tell, once, that all agents that there are have called; the last head's host probably has none."""
        missing = self._peers.missing
        if self._adopting and not missing - {self._lost_host()}:
            self._adopting = False
            self.supervisor.take(Kind.ADOPTED, agents=self._peers.called)

    async def _end(self, code: int) -> int:
        await self._keepers.end()
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        self._files.post(lambda: self._paths.stop.unlink(missing_ok=True))
        self._files.post(partial(write_json, self._paths.state, self._snapshot()))
        if not self._log.close() or not self._files.drain(LAST_WRITES_WITHIN):
            log.error("the run folder cannot be written: the last events are lost")
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
        self._tenure.heard_of(int(message.get("epoch", 0)))
        if not self._tenure.may_act():
            self._changed.set()
            return
        kind = message["type"]
        if kind == "hello":
            self._hello(name, message)
            return
        if kind == "unfit":  # of an agent that leaves at once, perhaps without ever having said hello
            names = ("step", "index", "host", "what")
            self.supervisor.take(Kind.HOST_UNFIT, message["replica"], **{key: message[key] for key in names})
            return
        peer = self._peers.get(name)
        if peer is None:
            if kind != "leaving":
                self._peers.ask_who(name)
            return
        peer.heard = time.monotonic()
        if kind == "alive":
            self._answer(name, peer, message)
        elif kind == "leaving":
            self._peers.drop(name)
            if not self._peers.any_of(peer.replica, peer.step):
                self._steps.left(peer.replica, peer.step)
        elif kind == "progress":
            self._progress(peer, message)
        elif kind in FORWARDED:
            verdict = self._deliveries.take(peer.who, message["n"])
            if verdict is Verdict.NEXT:
                self._news(peer, message)
            elif verdict is Verdict.GAP:
                self._peers.ask_who(name)

    def _answer(self, name: bytes, peer: Peer, message: Message) -> None:
        """Answer a sign of life. What is not on disk yet is not acknowledged: after a crash it must be told again."""
        got = self._deliveries.last(peer.who)
        if self._log.settle(0.0):
            self._on_disk[peer.who] = got
        if _missed(self.supervisor.state.replicas[peer.replica], message, got):
            self._peers.ask_who(name)
        else:
            self._peers.send(name, {"type": "alive", "got": self._on_disk.get(peer.who, 0)})

    def _hello(self, name: bytes, message: Message) -> None:
        peer = Peer(message["replica"], message["step"], message["index"], message["host"], time.monotonic())
        replica = self.supervisor.state.replicas[peer.replica]
        self.supervisor.taken[peer.replica] = max(peer.step, self.supervisor.taken.get(peer.replica, 0))
        if peer.step != replica.step or replica.state not in STEP_EXISTS:
            self._peers.send(name, {"type": "shutdown", "grace": self._spec.policy.kill_grace})
            return
        self._peers.add(name, peer)
        self._deliveries.begins(peer.who, int(message["first"]))
        self._peers.send(name, {"type": "alive"})
        if replica.state is State.LAUNCHING:
            names = ("step", "index", "host", "address", "port", "step_id", "agent_pid", "gpus")
            self.supervisor.take(Kind.AGENT_JOINED, peer.replica, **{key: message.get(key) for key in names})
        else:
            self._catch_up(peer, replica, message)

    def _catch_up(self, peer: Peer, replica: Replica, message: Message) -> None:
        """An agent that we knew calls again, after one of us was away: repeat what may have been lost. It does
        the same (see agent/outbox.py)."""
        if replica.state in RANKS_RUN and message["attempt"] < replica.attempt:
            self.start_ranks(replica)
        elif replica.state is State.CLEARING:
            self.clear_ranks(replica)
        elif replica.state is State.ENDING:
            self._peers.tell(replica, {"type": "shutdown", "grace": self._spec.policy.kill_grace})

    def _host_checked(self, kind: Kind, host: str, what: str) -> None:
        self.supervisor.take(kind, host=host, **({"what": what} if what else {}))

    def _progress(self, peer: Peer, message: Message) -> None:
        if message["attempt"] != self.supervisor.state.replicas[peer.replica].attempt:
            return
        if not message.get("step"):  # a phase before the first step is no progress yet
            return
        if message["step"] != self._book.page(peer.replica).step:
            self._hangs.moved(peer.replica)
        self._book.progress(peer.replica, message)
        if not self.supervisor.state.collective:  # there a step counts once it is committed
            self._get_on(peer.replica, message["attempt"])
        self._sample(peer.replica)

    def _news(self, peer: Peer, message: Message) -> None:
        kind = FORWARDED[message["type"]]
        data = {name: value for name, value in message.items() if name not in ("v", "type", "epoch")}
        current = message.get("attempt") == self.supervisor.state.replicas[peer.replica].attempt
        if kind in (Kind.COMMIT, Kind.MEMBER) and message["rank"] != 0:
            return  # every rank of a replica says the same
        if current and kind is Kind.COMMIT:
            self._book.commit(peer.replica, message)
            self._hangs.moved(peer.replica)
        elif current and kind is Kind.QUORUM:
            self._book.page(peer.replica).quorum_id = message.get("quorum_id")
        elif current and kind is Kind.MEMBER:
            self._book.page(peer.replica).member = message.get("id")
        if kind in (Kind.RANK_FAILED, Kind.RANK_DONE):
            self._sample(peer.replica, last=True)
        if current and kind is Kind.RANK_FAILED:
            data["train_step"] = self._book.page(peer.replica).step
        self.supervisor.take(kind, peer.replica, **data)
        if kind is Kind.COMMIT and message.get("committed"):
            self._get_on(peer.replica, message["attempt"])

    def _tell_survivors(self) -> None:
        """Before anything is repaired: those who wait for a replica that is gone need not."""
        for item in gone(self.supervisor.state, self._book.members):
            self._book.page(item.replica).member = None
            told = [replica for replica in item.survivors if self._leave(replica, item.member)]
            self.supervisor.take(Kind.SURVIVORS_TOLD, item.replica, member=item.member, told=told)

    def _leave(self, replica: int, member: str) -> bool:
        return self._peers.tell(self.supervisor.state.replicas[replica], {"type": "abort", "member": member})

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
            self._tell_trouble()
            now = time.monotonic()
            if now - last > LATE:
                # We were stopped, or a write of ours hung: that agents were not heard is our own doing.
                self._peers.hear_all(now)
                self._hangs.excuse_all(now)
            last = now
            self._miss_silent_agents(now)
            self._note_adoption()
            self._asking.remind(self.supervisor.state, now)
            self._find_hanging(now)
            self._changed.set()

    def _tell_trouble(self) -> None:
        """Say that events wait, and note it among them when they wait no longer."""
        before, self._trouble = self._trouble, self._log.trouble
        if self._trouble is not None and before is None:
            log.error("events wait in memory, the training goes on: %s", self._trouble.what)
        ended = self._log.ended_trouble()
        if ended is not None:
            waited = time.monotonic() - ended.since
            self._note(f"{ended.what}: for {waited:.1f} s events waited in memory, {ended.waiting} of them at last")

    def _miss_silent_agents(self, now: float) -> None:
        policy = self._spec.policy
        # Cut off from most agents we may be the one that is lost: they have time to choose another head.
        patience = policy.agent_timeout + (0.0 if self._able() else 2 * policy.head_timeout)
        for peer, silence in self._peers.silent(now, patience):
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
        for number, seconds, what in self._hangs.find(self.supervisor.state, self._book, now, self._clock()):
            self._note_hanging(number, seconds, what)

    def _note_hanging(self, number: int, seconds: float, what: str) -> None:
        replica = self.supervisor.state.replicas[number]
        step = self._book.page(number).step
        self._sample(number, last=True)
        self.supervisor.take(
            Kind.RANK_FAILED,
            number,
            attempt=replica.attempt,
            rank=0,
            host=replica.hosts[0],
            what=what,
            hung=True,
            age=seconds,
            log=str(self._paths.rank_log(number, replica.attempt, 0)),
            **({} if step is None else {"train_step": step}),
        )

    def _save(self, why: str) -> None:
        """Ask the ranks to save, unless they have been asked already."""
        state = self.supervisor.state
        if state.save is None and state.ended is None:
            within = self._spec.policy.save_within
            self.supervisor.take(Kind.SAVE_REQUESTED, **self._asking.request(state, why, within))
            self._asking.remind(self.supervisor.state, time.monotonic())

    def _stop(self, why: str, code: int) -> None:
        if not self.supervisor.state.stop:
            self._save(why)
        self.supervisor.take(Kind.STOP_REQUESTED, why=why, code=code)

    def _step_exited(self, replica: int, step: int, ended: Ended) -> None:
        self._peers.drop_step(replica, step)
        self._sample(replica, last=True)
        away = {"unanswered": True} if ended.unanswered else {}
        self.supervisor.take(Kind.STEP_EXITED, replica, step=step, code=ended.code, what=ended.what, **away)

    async def _read_requests(self) -> None:
        while True:
            await asyncio.sleep(REQUEST_INTERVAL)
            if await self._files.do(partial(requests.stop_is_asked_for, self._paths)):
                self._stop(requests.STOP_WORDS, 128 + signal.SIGTERM)
            if await self._files.do(partial(requests.save_is_asked_for, self._paths)):
                self._save("a save was asked for")
            if self._peers.all_have_called:  # who has not called cannot be told
                complaints: list[str] = []
                found = await self._files.do(lambda: list(requests.taken(self._paths, complaints.append)))  # noqa: B023
                for text in complaints:
                    self._note(text)
                for request in found:
                    self._injector.inject(request)

    def _note(self, text: str) -> None:
        self.supervisor.take(Kind.NOTE, text=text)

    # --- Effects: what the supervisor asks for ---------------------------------------------------------

    def hold(self) -> str:
        if self._log.settle(SETTLE_WITHIN):
            return ""
        trouble = self._log.trouble  # none yet, when a write has only just begun to hang
        full = trouble is not None and trouble.what != NO_ANSWER  # a launch needs no room
        return "" if full and not self._log.stalled else NO_ANSWER

    def launch(self, replica: Replica, step: int) -> int:
        if not self._tenure.may_act():
            raise LaunchError("another head looks after the run")
        self._log.settle(SETTLE_WITHIN)
        return self._steps.launch(replica, step)

    def start_ranks(self, replica: Replica) -> None:
        self._book.started(replica.id, replica.attempt)
        self._hangs.started(replica.id)
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
        if self._tenure.may_act():
            self._steps.end(replica, grace)

    # --- what we show ----------------------------------------------------------------------------------

    async def _write_states(self) -> None:
        while self._tenure.may_act():
            try:
                await self._files.do(partial(write_json, self._paths.state, self._snapshot()))
            except OSError as error:
                log.warning("state.json waits: %s", error)
            await asyncio.sleep(STATE_INTERVAL)

    def _snapshot(self) -> dict[str, Any]:
        return snapshot(self._clock(), self.supervisor.state, self._facts, self._book, self.supervisor.reasons)


def _number(text: str) -> int:
    """Slurm's count in a variable that may be missing: 0 then."""
    return int(text) if text.isdigit() else 0


def _missed(replica: Replica, message: Message, got: int) -> bool:
    """Did a message to or from this agent get lost with a connection, by what its sign of life says? Then it is
    asked to say who it is, and all is said again."""
    lost = int(message.get("told", 0)) > got
    return lost or (replica.state in RANKS_RUN and message.get("attempt", replica.attempt) < replica.attempt)
