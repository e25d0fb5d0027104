"""Whatever happens in whatever order: hypothesis tells the stories."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slurm_ft.controller.state import FINAL, RANKS_RUN, STEP_EXISTS, State
from slurm_ft.events import Event, Kind
from slurm_ft.spec import Budget, Policy
from tests.world import World

POLICY = Policy(min_replicas=2, in_place=Budget(2, 100.0), step=Budget(2, 300.0), backoff=1.0, backoff_max=8.0)
NUMBERS = st.integers(0, 2)


class AnyHistory(RuleBasedStateMachine):
    """Three replicas of two hosts. `World` itself fails when two steps or two attempts overlap, when the
    Supervisor raises, or when it does not come to rest after an event."""

    world: World
    old: list[Event]

    @initialize(works=st.booleans())
    def begin(self, works: bool) -> None:
        self.world = World(replicas=3, hosts=2, policy=POLICY, launcher_works=works, spares=2)

    def state(self, replica: int) -> State:
        return self.world.replica(replica).state

    def over(self) -> bool:
        return self.world.code is not None

    @rule(replica=NUMBERS, index=st.integers(0, 1))
    def an_agent_reports(self, replica: int, index: int) -> None:
        if replica in self.world.steps and index not in self.world.joined[replica] and not self.over():
            self.world.join(replica, index)

    @rule(replica=NUMBERS)
    def it_trains(self, replica: int) -> None:
        if self.world.running.get(replica):
            self.world.progress(replica)

    @rule(replica=NUMBERS, rank=st.integers(0, 1))
    def a_rank_fails(self, replica: int, rank: int) -> None:
        if rank in self.world.running.get(replica, ()):
            self.world.fail(replica, rank=rank)

    @rule(replica=NUMBERS)
    def all_ranks_end_well(self, replica: int) -> None:
        if len(self.world.running.get(replica, ())) == 2 and self.state(replica) in RANKS_RUN:
            self.world.done(replica)

    @rule(replica=NUMBERS, index=st.integers(0, 1))
    def an_agent_clears(self, replica: int, index: int) -> None:
        if self.world.asked.get(replica) == "clear" and self.state(replica) is State.CLEARING:
            self.world.cleared(replica, index)

    @rule(replica=NUMBERS, index=st.integers(0, 1))
    def an_agent_is_silent(self, replica: int, index: int) -> None:
        if index in self.world.joined.get(replica, ()) and replica in self.world.steps:
            self.world.silent(replica, index)

    @rule(replica=NUMBERS)
    def a_step_exits(self, replica: int) -> None:
        if replica in self.world.steps:
            self.world.exit(replica)

    @rule(seconds=st.sampled_from([0.1, 2.0, 30.0, 130.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule(data=st.data())
    def something_is_told_again(self, data: Any) -> None:
        """Late news: anything of an earlier attempt or step."""
        old = [e for e in self.world.recorded if e.replica is not None and self.is_old(e)]
        if old:
            event = data.draw(st.sampled_from(old))
            before = self.world.supervisor.state
            self.world.take(event.kind, event.replica, **event.data)
            assert self.world.supervisor.state == before

    def is_old(self, event: Event) -> bool:
        assert event.replica is not None
        replica = self.world.replica(event.replica)
        if event.kind in (Kind.PROGRESSED, Kind.RANK_FAILED, Kind.RANK_DONE, Kind.AGENT_CLEARED):
            return bool(event.data["attempt"] < replica.attempt)
        if event.kind in (Kind.AGENT_JOINED, Kind.AGENT_LOST, Kind.STEP_EXITED):
            return bool(event.data["step"] < replica.step)
        return False

    @rule(word=st.sampled_from(["broken", "mended"]))
    def the_launcher_changes(self, word: str) -> None:
        self.world.launcher(word)

    @rule()
    def the_controller_dies(self) -> None:
        self.world.restart()

    @precondition(lambda self: len(self.world.recorded) > 40)
    @rule(code=st.sampled_from([143, 75]))
    def a_stop_is_asked_for(self, code: int) -> None:
        if not self.over():
            self.world.stop(code)

    @rule()
    def a_quorum_is_seen(self) -> None:
        self.world.quorum(0)

    @invariant()
    def what_the_state_says_is_what_there_is(self) -> None:
        for replica in self.world.supervisor.state.replicas:
            exists = replica.id in self.world.steps
            assert exists == (replica.state in STEP_EXISTS)
            if replica.state in RANKS_RUN:
                assert self.world.running[replica.id]
            if replica.state in FINAL:
                assert not self.world.running.get(replica.id)

    @invariant()
    def the_budgets_hold(self) -> None:
        now = self.world.now
        for replica in self.world.supervisor.state.replicas:
            present = max((t for t, r in replica.restarts if r == "spare"), default=0.0)
            for rung, budget in (("in place", POLICY.in_place), ("by step", POLICY.step)):
                recent = [t for t, r in replica.restarts if r == rung and now - t < budget.seconds and t > present]
                assert len(recent) <= budget.restarts

    @invariant()
    def no_host_is_in_two_places(self) -> None:
        state = self.world.supervisor.state
        hosts = [host for replica in state.replicas for host in replica.hosts]
        assert len({*hosts, *state.spares}) == len(hosts) + len(state.spares)

    def teardown(self) -> None:
        """However far it got, a stop brings it to an end."""
        if hasattr(self, "world"):
            if not self.over():
                self.world.stop()
            self.world.settle()
            assert not self.world.steps
            assert sum(event.kind is Kind.RUN_ENDED for event in self.world.recorded) == 1


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=60, stateful_step_count=40)
