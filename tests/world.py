"""A pretended world for the real Supervisor: steps, agents and ranks that do what a test tells them to.

`World` is the Supervisor's Effects and its clock. Each method lets one thing happen and then lets the
Supervisor act. What must never happen, two steps of one replica or new ranks beside old ones, fails at once.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from slurm_ft.controller.fold import fold
from slurm_ft.controller.loop import Supervisor
from slurm_ft.controller.state import FINAL, Replica, State
from slurm_ft.controller.supervise import decide
from slurm_ft.errors import LaunchError
from slurm_ft.events import Event, Kind
from slurm_ft.spec import Policy


class World:
    """`replicas` replicas of `hosts` hosts with `ranks` ranks each. Time passes when a test lets it."""

    def __init__(
        self,
        replicas: int = 1,
        hosts: int = 1,
        ranks: int = 1,
        policy: Policy | None = None,
        launcher_works: bool = True,
        spares: int = 0,
    ) -> None:
        self.policy = policy or Policy()
        self.now = 1000.0
        self.recorded: list[Event] = []
        self.effects: list[str] = []
        self.launcher_works = launcher_works
        self.held = ""
        self.hosts, self.ranks = hosts, ranks
        self.steps: dict[int, int] = {}
        self.joined: dict[int, set[int]] = {}
        self.running: dict[int, set[int]] = {}  # the hosts on which ranks of a replica run
        self.asked: dict[int, str] = {}  # what the agents or the step were told last: clear or end
        self._pids = count(100)
        self.supervisor = Supervisor(self.policy, self, self.recorded.append, lambda: self.now)
        names = [[f"node{r * hosts + h}" for h in range(hosts)] for r in range(replicas)]
        spare_names = [f"spare{number}" for number in range(spares)]
        self.supervisor.take(Kind.RUN_STARTED, session="s", replicas=names, spares=spare_names, ranks_per_host=ranks)
        self.supervisor.act()

    # --- Effects -------------------------------------------------------------------------------------------

    def launch(self, replica: Replica, step: int) -> int:
        assert replica.id not in self.steps, "two steps of one replica"
        if not self.launcher_works:
            self.effects.append(f"launch {replica.id}.{step} fails")
            raise LaunchError("no such node")
        spares = [host for host in replica.hosts if host.startswith("spare")]
        self.effects.append(f"launch {replica.id}.{step}" + "".join(f" with {host}" for host in spares))
        self.steps[replica.id] = step
        self.joined[replica.id] = set()
        self.asked.pop(replica.id, None)
        return next(self._pids)

    def start_ranks(self, replica: Replica) -> None:
        self.effects.append(f"start {replica.id}.{replica.attempt}")
        assert self.joined[replica.id] == set(range(self.hosts)), "ranks are started before all agents are there"
        assert not self.running.get(replica.id), "ranks are started beside older ones"
        assert replica.addresses[0] and replica.agents[0], "nobody knows where the ranks meet"
        self.running[replica.id] = set(range(self.hosts))
        self.asked.pop(replica.id, None)

    def clear_ranks(self, replica: Replica) -> None:
        self.effects.append(f"clear {replica.id}.{replica.attempt}")
        self.asked[replica.id] = "clear"

    def hold(self) -> str:
        return self.held

    def end_step(self, replica: Replica, grace: float) -> None:
        assert self.steps[replica.id] == replica.step
        self.effects.append(f"end {replica.id}.{replica.step} grace {grace:g}")
        self.asked[replica.id] = "end"

    # --- what happens --------------------------------------------------------------------------------------

    @property
    def code(self) -> int | None:
        return self.supervisor.state.ended

    def replica(self, number: int) -> Replica:
        return self.supervisor.state.replicas[number]

    def take(self, kind: Kind, replica: int | None = None, /, **data: Any) -> None:
        """An event, a millisecond after the last one; the Supervisor acts on it and comes to rest."""
        self.now = round(self.now + 0.001, 3)
        self.supervisor.take(kind, replica, **data)
        self.supervisor.act()
        assert self.code is not None or self.held or not decide(self.now, self.supervisor.state, self.policy)[0]

    def wait(self, seconds: float) -> None:
        self.now = round(self.now + seconds, 3)
        self.supervisor.act()

    def join(self, replica: int, *indexes: int) -> None:
        """Agents report: all of the replica's, or those with these indexes."""
        for index in indexes or range(self.hosts):
            self.joined[replica].add(index)
            self.take(Kind.AGENT_JOINED, replica, step=self.steps[replica], index=index, port=20_000 + index,
                      address=f"10.0.0.{index}", step_id=f"7.{self.steps[replica]}")  # fmt: skip

    def progress(self, replica: int) -> None:
        self.take(Kind.PROGRESSED, replica, attempt=self.replica(replica).attempt)

    def quorum(self, replica: int) -> None:
        self.take(Kind.QUORUM, replica, attempt=self.replica(replica).attempt)

    def commit(self, replica: int) -> None:
        self.take(Kind.COMMIT, replica, attempt=self.replica(replica).attempt, committed=True)
        self.progress(replica)

    def fail(self, replica: int, what: str = "rank 0 was killed by SIGKILL", rank: int = 0) -> None:
        self.take(Kind.RANK_FAILED, replica, attempt=self.replica(replica).attempt, rank=rank, what=what)

    def done(self, replica: int, *ranks: int) -> None:
        """Ranks end well: all of the replica's, or these."""
        for rank in ranks or range(self.hosts * self.ranks):
            if not ranks or len(self.replica(replica).done_ranks) + 1 == self.hosts * self.ranks:
                self.running[replica] = set()
            self.take(Kind.RANK_DONE, replica, attempt=self.replica(replica).attempt, rank=rank)

    def cleared(self, replica: int, *indexes: int) -> None:
        """Agents have ended what was left of the ranks."""
        for index in indexes or range(self.hosts):
            assert self.asked.get(replica) == "clear"
            self.running.get(replica, set()).discard(index)
            attempt = self.replica(replica).attempt
            self.take(Kind.AGENT_CLEARED, replica, attempt=attempt, index=index, port=21_000 + attempt)

    def silent(self, replica: int, index: int = 0) -> None:
        """An agent is not heard of any more. Its ranks may well go on."""
        host = self.replica(replica).hosts[index]
        self.take(
            Kind.AGENT_LOST,
            replica,
            step=self.steps[replica],
            index=index,
            host=host,
            what="the agent is silent",
            age=15.0,
        )

    def unfit(self, replica: int, index: int = 0, what: str = "0 of 8 GPUs are there") -> None:
        """A host of the replica fails its check; its agent leaves."""
        host = self.replica(replica).hosts[index]
        self.joined.get(replica, set()).discard(index)
        self.take(Kind.HOST_UNFIT, replica, step=self.steps[replica], index=index, host=host, what=what)

    def spare(self, host: str, word: str) -> None:
        """A waiting spare is found to be `fit` or `unfit`."""
        self.take(Kind.HOST_FIT if word == "fit" else Kind.HOST_UNFIT, host=host, what="its file server is away")

    def exit(self, replica: int, what: str = "the step exited with code 137") -> None:
        """The step is gone, and with it all its processes."""
        step = self.steps.pop(replica)
        self.running.pop(replica, None)
        self.asked.pop(replica, None)
        self.take(Kind.STEP_EXITED, replica, step=step, code=137, what=what)

    def away(self, replica: int) -> None:
        """The step was not started, because Slurm did not answer."""
        self._not_started(replica, unanswered=True)

    def refused(self, replica: int) -> None:
        """The step was not started, because Slurm refused it."""
        self._not_started(replica)

    def _not_started(self, replica: int, **data: Any) -> None:
        step, what = self.steps.pop(replica), "srun exited with code 97"
        self.take(Kind.STEP_EXITED, replica, step=step, code=97, what=what, **data)

    def up(self, replica: int) -> None:
        """All goes well until the replica trains."""
        self.join(replica)
        self.progress(replica)

    def launcher(self, word: str) -> None:
        """The launcher is `broken` or `mended`."""
        self.launcher_works = word == "mended"

    def stop(self, code: int = 143, why: str = "a stop was asked for") -> None:
        self.take(Kind.STOP_REQUESTED, why=why, code=code)

    def restart(self) -> None:
        """The controller dies and another one takes over from the log."""
        lines = "".join(event.to_line() for event in self.recorded).splitlines()
        events = [event for event in map(Event.from_line, lines) if event is not None]
        assert events == self.recorded
        state = fold(events)
        assert state == self.supervisor.state
        self.supervisor = Supervisor(self.policy, self, self.recorded.append, lambda: self.now, state)
        self.supervisor.act()

    def settle(self, rounds: int = 200) -> None:
        """Everybody does what was asked of them, and time passes, until the run has ended."""
        for _ in range(rounds):
            if self.code is not None:
                return
            for replica, asked in list(self.asked.items()):
                if asked == "end":
                    self.exit(replica, "as asked")
                elif self.replica(replica).state is State.CLEARING:
                    self.cleared(replica)
            self.wait(5.0)
        raise AssertionError(f"the run does not end: {self.supervisor.reasons}")

    @property
    def all_final(self) -> bool:
        return all(replica.state in FINAL for replica in self.supervisor.state.replicas)
