"""DiLoCo and LocalSGD that try a failed synchronisation again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import train_workers as workers

torch = pytest.importorskip("torch")
torchft = pytest.importorskip("torchft.local_sgd") and pytest.importorskip("torchft")


from slurm_ft.train import ft, local_sgd  # noqa: E402

SYNC = 4


class Manager(ft.Manager):
    """One whose votes end as told, in a group of its own; every reduction halves what is reduced."""

    def __init__(self, votes: Sequence[bool]) -> None:
        self.votes, self.quorums, self.step = list(votes), 0, 0
        self.syncs, self.committed = 0, False
        self._use_async_quorum = False
        self._client = SimpleNamespace(quorum=None)
        self._commit_failures, self._max_retries = 0, 2
        self.limits: list[int | None] = []

    def start_quorum(self, *_: Any, **__: Any) -> None:
        self.quorums += 1

    def allreduce(self, tensor: torch.Tensor, **_: Any) -> Any:
        tensor.mul_(0.5)
        return torchft.work._DummyWork([tensor])

    def should_commit(self, timeout: Any = None) -> bool:
        self.syncs, self.committed = self.syncs + 1, self.votes.pop(0) if self.votes else True
        self.step += self.committed
        self._commit_failures = 0 if self.committed else self._commit_failures + 1
        self.limits.append(self._max_retries)
        return self.committed

    def current_step(self) -> int:
        return self.step

    def register_state_dict_fn(self, *_: Any) -> None: ...
    def allow_state_dict_read(self) -> None: ...
    def disallow_state_dict_read(self) -> None: ...


def diloco(manager: Manager, model: torch.nn.Sequential, inner: Any, kind: type[Any], parts: int, delay: int) -> Any:
    fragments = [model] if parts == 1 else list(model)
    outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in fragments]
    return kind(manager, fragments, inner, outer, SYNC * parts, pin_memory=False, fragment_sync_delay=delay)


def trained(votes: Sequence[bool], steps: int, make: Callable[..., Any]) -> tuple[torch.Tensor, Manager]:
    """The weights after so many inner steps."""
    torch.manual_seed(0)
    manager, model = Manager(votes), torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with make(manager, model, inner):
        for step in range(steps):
            inner.zero_grad()
            model(torch.full((1, 3), float(step + 1))).sum().backward()
            inner.step()
    return torch.cat([parameter.detach().view(-1) for parameter in model.parameters()]), manager


@pytest.mark.parametrize("parts", [1, 2])
def test_an_intervals_work_survives_a_synchronisation_that_fails(parts: int) -> None:
    def make(*given: Any) -> Any:
        return diloco(*given, local_sgd.DiLoCo, parts, 0)

    undisturbed, once = trained([], 3 * SYNC, make)
    weights, manager = trained([True, False, False], 3 * SYNC, make)
    assert torch.equal(weights, undisturbed)
    assert (manager.step, manager.quorums - once.quorums) == (3, 2)


@pytest.mark.parametrize(("parts", "delay"), [(1, 2), (2, 1)])
def test_a_delayed_synchronisation_that_fails_is_done_again_at_once(parts: int, delay: int) -> None:
    """What was learnt since its reduction began goes into the second one, so the weights are others."""
    weights, manager = trained(
        [True, False, False], 3 * SYNC, lambda *given: diloco(*given, local_sgd.DiLoCo, parts, delay)
    )
    stock, _ = trained([True, False], 3 * SYNC, lambda *given: diloco(*given, torchft.local_sgd.DiLoCo, parts, delay))
    assert manager.step == 3 and not torch.equal(weights, stock)


def test_after_so_many_tries_the_interval_is_dropped_as_torchft_does() -> None:
    votes = [True, *[False] * local_sgd.TRIES]
    weights, manager = trained(votes, 2 * SYNC, lambda *given: diloco(*given, local_sgd.DiLoCo, 1, 0))
    stock, _ = trained([True, False], 2 * SYNC, lambda *given: diloco(*given, torchft.local_sgd.DiLoCo, 1, 0))
    first, _ = trained([], SYNC, lambda *given: diloco(*given, local_sgd.DiLoCo, 1, 0))
    assert torch.equal(weights, stock) and torch.equal(weights, first)
    assert manager.quorums == 1 + local_sgd.TRIES


def test_local_sgd_averages_after_all() -> None:
    def make(manager: Manager, model: Any, inner: Any) -> Any:
        return local_sgd.LocalSGD(manager, model, inner, SYNC)

    undisturbed, _ = trained([], 2 * SYNC, make)
    weights, manager = trained([False, True, False], 2 * SYNC, make)
    assert torch.equal(weights, undisturbed) and manager.step == 2


@pytest.mark.parametrize(("attempt", "loaded", "first"), [("1", 0, SYNC), ("2", 0, 1), ("2", 3, SYNC)])
@pytest.mark.parametrize("delay", [0, 2])
def test_a_replica_that_starts_again_without_a_state_synchronises_after_one_step(
    monkeypatch: pytest.MonkeyPatch, attempt: str, loaded: int, first: int, delay: int
) -> None:
    """And is healed then, rather than after an interval that is thrown away; from then on as usual."""
    monkeypatch.setenv("SLURM_FT_ATTEMPT", attempt)
    begun: list[int] = []

    class Counting(Manager):
        def start_quorum(self, *_: Any, **__: Any) -> None:
            begun.append(self.inner_steps)

    model = torch.nn.Linear(3, 3)
    manager, inner = Counting([]), torch.optim.SGD(model.parameters(), lr=0.1)
    manager.step = loaded
    with diloco(manager, model, inner, local_sgd.DiLoCo, 1, delay):
        for step in range(first + delay + SYNC):
            manager.inner_steps = step + 1
            inner.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            inner.step()
    assert begun[0] == (first if first == 1 else SYNC - delay)
    assert begun[1] == (first + SYNC if first == 1 else 2 * SYNC - delay)


def test_torchfts_own_manager_which_tells_no_vote_is_refused() -> None:
    class Stock:
        _use_async_quorum = False

    with pytest.raises(TypeError, match=r"needs a slurm_ft\.train\.ft\.Manager"):
        local_sgd.LocalSGD(Stock(), torch.nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)], lr=1.0), 2)


@pytest.mark.parametrize("kind", ["stock", "mended"])
def test_survivors_of_a_death_in_mid_synchronisation_do_no_step_twice(start_run: Any, kind: str) -> None:
    run = start_run(3)
    survivors = [run.start(workers.diloco, kind, False, replica=replica)[0] for replica in range(2)]
    run.start(workers.diloco, kind, True, replica=2)
    run.agent.wait(lambda event: event["type"] == "dying")
    assert run.join(survivors) == [0, 0], run.log(0) + run.log(1)
    steps = [event["steps"] for event in run.agent.events if event["type"] == "trained"]
    committed = workers.DILOCO_SYNCS * workers.DILOCO_EVERY
    # Without the mend: the survivors throw a whole interval away, and train it again.
    assert steps == [committed + (workers.DILOCO_EVERY if kind == "stock" else 0)] * 2
    assert len({event["digest"] for event in run.agent.events if event["type"] == "trained"}) == 1


def test_who_failed_commits_nothing_without_a_peer_that_may_have_committed(start_run: Any, tmp_path: Path) -> None:
    """It would be as far as that peer then, and differ from it for good."""
    run = start_run(3, join_timeout_ms=2000)
    kept = [
        run.start(workers.diloco_half, role, str(tmp_path), replica=replica)[0]
        for replica, role in enumerate(("fails", "commits"))
    ]
    run.start(workers.diloco_half, "dies", str(tmp_path), replica=2)
    run.agent.wait(lambda event: event["type"] == "dying")
    [back] = run.start(workers.diloco_half, "back", str(tmp_path), replica=2)
    assert run.join([*kept, back]) == [0, 0, 0], run.log(0) + run.log(1) + run.log(2)
    assert len({event["digest"] for event in run.agent.events if event["type"] == "trained"}) == 1
    assert "may have committed, and is not in this quorum" in run.log(0)


def bare(step: int, max_step: int, members: Sequence[str], **more: Any) -> ft.Manager:
    """A Manager after a quorum."""
    manager = ft.Manager.__new__(ft.Manager)
    quorum = SimpleNamespace(replica_ids=list(members), max_step=max_step)
    about = {"_client": SimpleNamespace(quorum=quorum), "_step": step, "_errored": None, "_quorum_future": None}
    manager.__dict__.update(about, _may_heal=True)
    manager.__dict__.update(more)
    return manager


@pytest.mark.parametrize(
    ("heartbeats", "told_gone", "absent"),
    [
        ({"b": 0.1, "d": 5.0}, {}, ["b"]),
        ({"b": 0.1}, {"b": 0.05}, []),
        ({"b": 0.1}, {"b": 0.6}, ["b"]),
        ({"b": 2.0}, {}, []),
        (None, {"d": 9.0}, ["b"]),
    ],
    ids=["it lives", "the controller said so since", "it came back", "no sign of life", "nobody can say who lives"],
)
def test_only_peers_that_live_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
    heartbeats: dict[str, float] | None,
    told_gone: dict[str, float],
    absent: list[str],
) -> None:
    """`heartbeats` and `told_gone` are seconds ago. A peer that came back has the name under which it had died."""
    view = None if heartbeats is None else ft.LighthouseView(heartbeats=heartbeats)
    monkeypatch.setattr(ft, "view_lighthouse", lambda url: view)
    now = time.monotonic()
    monkeypatch.setattr(ft, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(ft.survivors, "gone", {name: now - ago for name, ago in told_gone.items()})
    assert bare(1, 1, ["a"], not_without=frozenset({"a", "b", "d"}))._absent() == absent


@pytest.mark.parametrize(
    ("step", "more", "ends"),
    [(0, {}, True), (3, {}, False), (0, {"_errored": "x"}, False), (0, {"_may_heal": False}, False)],
)
def test_a_rank_that_was_not_healed_with_the_others_of_its_replica_ends(
    step: int, more: dict[str, Any], ends: bool
) -> None:
    manager = bare(step, 3, ["a"], **more)
    if ends:
        with pytest.raises(RuntimeError, match="this rank is at step 0, its replica was healed to 3"):
            manager._check_step()
    else:
        manager._check_step()


def test_tries_do_not_count_against_the_retries_of_a_manager() -> None:
    _, manager = trained([False, False, False, True], 2 * SYNC, lambda *given: diloco(*given, local_sgd.DiLoCo, 1, 0))
    assert (manager._max_retries, manager._commit_failures, manager.limits) == (2, 0, [2, None, None, 2])
