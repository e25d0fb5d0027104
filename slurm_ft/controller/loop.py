"""The one place where events come in and actions go out.

`Supervisor.take` records an event and takes it into the state; `Supervisor.act` asks `decide` what to do
and does it, until there is nothing left to do. Whatever touches the world is behind `Effects`, so stories
are told to this very loop in tests. An action's record is made before its effect where the effect can be
repeated (an agent that is told twice to start an attempt does it once). Records reach the disk in order but
later (see latelog.py), so a crash may lose the last of them: what agents were told they say again when they
call the next controller, and of a step that may have been started without a record that has survived, the
next step's number is kept clear (`unsure`, `taken`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from slurm_ft.controller import supervise
from slurm_ft.controller.fold import observe
from slurm_ft.controller.state import Replica, RunState
from slurm_ft.errors import LaunchError
from slurm_ft.events import Event, Kind
from slurm_ft.spec import Policy

MOST_ROUNDS = 50
"""Rounds of deciding after one event. More are needed only where repairs fail at once and may begin at once."""


class Effects(Protocol):
    """What the supervisor can do to the world."""

    def launch(self, replica: Replica, step: int) -> int:
        """Start a step; gives the number of its first process. Raises LaunchError."""
        ...

    def start_ranks(self, replica: Replica) -> None:
        """Tell the replica's agents to start the ranks of its current attempt."""
        ...

    def clear_ranks(self, replica: Replica) -> None:
        """Tell the replica's agents to end what is left of its ranks."""
        ...

    def hold(self) -> str:
        """Why no step can be launched now, or ''."""
        ...

    def end_step(self, replica: Replica, grace: float) -> None:
        """End the replica's step; its exit comes as an event."""
        ...


class Supervisor:
    """The state of a run and the loop over it."""

    def __init__(
        self,
        policy: Policy,
        effects: Effects,
        record: Callable[[Event], None],
        clock: Callable[[], float],
        state: RunState | None = None,
    ) -> None:
        self.state = state or RunState()
        self.reasons: dict[int, str] = {}
        # Replicas of which a controller before this one may have started a step without recording it.
        self.unsure: set[int] = set()
        # The highest number of a step by which an agent has called: no later step may have it.
        self.taken: dict[int, int] = {}
        self._policy = policy
        self._effects = effects
        self._record = record
        self._clock = clock

    def take(self, kind: Kind, replica: int | None = None, /, **data: Any) -> None:
        """Something has happened: record it and take it in."""
        event = Event(self._clock(), kind, replica, data)
        self._record(event)
        self.state = observe(self.state, event)

    def act(self) -> None:
        """Do all that is to be done now; after MOST_ROUNDS the rest waits for the next tick."""
        for _ in range(MOST_ROUNDS):
            actions, reasons = supervise.decide(self._clock(), self.state, self._policy)
            self.reasons = reasons or self.reasons  # of a run that has ended the last ones stand
            actions = self._held_back(actions)
            if not actions:
                return
            for action in actions:
                self._perform(action)

    def _held_back(self, actions: list[supervise.Action]) -> list[supervise.Action]:
        """These actions without the launches that must wait."""
        launches = {action.replica for action in actions if isinstance(action, supervise.LaunchStep)}
        why = self._effects.hold() if launches else ""
        if not why:
            return actions
        self.reasons |= {replica: f"{self.reasons[replica]}, as soon as it can be: {why}" for replica in launches}
        return [action for action in actions if not isinstance(action, supervise.LaunchStep)]

    def _perform(self, action: supervise.Action) -> None:
        match action:
            case supervise.LaunchStep(replica):
                self._launch(self.state.replicas[replica])
            case supervise.TakeSpare(replica, bad, spare):
                self.take(Kind.HOST_REPLACED, replica, bad=bad, spare=spare)
            case supervise.Park(replica, why):
                self.take(Kind.PARKED, replica, why=why, hosts=list(self.state.replicas[replica].suspects))
            case supervise.Delay(replica, until, why):
                self.take(Kind.DELAYED, replica, until=until, why=why)
            case supervise.StartRanks(replica, attempt, rung):
                ranks = self.state.replicas[replica].ranks
                self.take(Kind.RANKS_STARTED, replica, attempt=attempt, rung=rung, ranks=ranks)
                self._effects.start_ranks(self.state.replicas[replica])
            case supervise.ClearRanks(replica):
                self.take(Kind.CLEARING, replica, attempt=self.state.replicas[replica].attempt)
                self._effects.clear_ranks(self.state.replicas[replica])
            case supervise.EndStep(replica, then, why, grace):
                before = self.state.replicas[replica]
                self.take(Kind.STEP_ENDING, replica, step=before.step, then=str(then), why=why)
                if before.pid is not None:
                    self._effects.end_step(before, grace)
            case supervise.EndSave(id, outcome):
                self.take(Kind.SAVE_ENDED, id=id, **outcome.data)
            case supervise.EndRun(code, why):
                self.take(Kind.RUN_ENDED, code=code, why=why)

    def _launch(self, replica: Replica) -> None:
        # A number that a step nobody recorded cannot have: its agents are then known as strangers and sent away.
        step = max(replica.step + 1 + (replica.id in self.unsure), self.taken.get(replica.id, 0) + 1)
        self.unsure.discard(replica.id)
        hosts = list(replica.hosts)
        try:
            pid = self._effects.launch(replica, step)
        except LaunchError as error:
            self.take(Kind.STEP_LAUNCHED, replica.id, step=step, pid=None, hosts=hosts)
            self.take(Kind.STEP_EXITED, replica.id, step=step, code=None, what=error.message)
            return
        self.take(Kind.STEP_LAUNCHED, replica.id, step=step, pid=pid, hosts=hosts)
