"""Kept state when something goes wrong with keeping: what is not whole is never taken for whole, in one process."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from slurm_ft import env  # noqa: E402
from slurm_ft.keeper.client import Found  # noqa: E402
from slurm_ft.keeper.held import seal  # noqa: E402
from slurm_ft.keeper.protocol import Refused  # noqa: E402
from slurm_ft.train.kept import agree, keep_live, snapshot  # noqa: E402
from slurm_ft.train.kept.agree import Offer  # noqa: E402
from slurm_ft.train.kept.keep import Kept, keep  # noqa: E402
from slurm_ft.train.kept.layout import Entry  # noqa: E402
from slurm_ft.train.kept.state import Sources, counts_on_host  # noqa: E402
from slurm_ft.train.transport import PeerTransport, TransportError  # noqa: E402

keeping = sys.modules[Kept.__module__]


class Keeper:
    """What a keeper does, in this process. `room` is how many memories it makes."""

    def __init__(self) -> None:
        self.held: dict[str, Found] = {}
        self.room = 100

    def make(self, size: int) -> int:
        self.room -= 1
        if self.room < 0:
            raise Refused("there is no memory left")
        descriptor = os.memfd_create("kept-test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        seal(descriptor)
        return descriptor

    def put(self, name: str, meta: dict[str, Any], descriptors: list[int]) -> None:
        self.drop(name)
        self.held[name] = Found(meta, [os.dup(each) for each in descriptors], 0)

    def get(self, name: str, claim: bool, wait: float) -> Found | None:
        found = self.held.get(name)
        return found and found._replace(descriptors=[os.dup(each) for each in found.descriptors])

    def drop(self, name: str) -> None:
        for descriptor in self.held.pop(name, Found({}, [], 0)).descriptors:
            os.close(descriptor)

    def close(self) -> None:
        pass


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    keeper = Keeper()
    monkeypatch.setattr(keeping.Client, "connect", lambda path: keeper)
    yield keeper
    for name in list(keeper.held):
        keeper.drop(name)


class Transport:
    torn = False

    def recv_checkpoint(self) -> str:
        return "state"


class Manager:
    def __init__(self) -> None:
        self._checkpoint_transport = Transport()

    def _apply_pending_state_dict(self) -> None:
        pass

    def state_dict(self) -> dict[str, int]:
        return {"step": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def started(
    mode: str, optimizer: Callable[..., Any] = torch.optim.AdamW, ranks: int = 1, **named: Any
) -> tuple[Any, Any, Kept]:
    """A process that begins, as the last one left what is held."""
    keeping._in_use.clear()
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 4)
    inner = optimizer(model.parameters(), lr=0.1)
    environ = {env.KEEPER: "there", env.REPLICA: "0", "WORLD_SIZE": str(ranks)}
    kept = keep(model, inner, mode=mode, every=1, environ=environ, **named)
    return model, inner, kept


def train(model: Any, optimizer: Any, kept: Kept, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4)).sum().backward()
        with kept.step():
            optimizer.step()


@pytest.mark.parametrize("mode", ["off", "live", "both"])
def test_steps_are_counted_from_the_checkpoint_that_is_loaded_instead(keeper: Keeper, mode: str) -> None:
    model, optimizer, kept = started(mode)
    assert kept.restore(newer_than=500)[:2] == ("none", 500)
    train(model, optimizer, kept, 2)
    assert kept.count == 502
    if mode != "off":
        assert started(mode)[2].restore(newer_than=500)[:2] == ("live", 502)


def test_live_memory_that_is_given_up_and_trained_on_is_not_taken_for_whole(keeper: Keeper) -> None:
    keeper.room = 2  # the parameters and the optimizer's state; not the snapshot
    model, optimizer, kept = started("both")
    kept.restore()
    train(model, optimizer, kept, 3)
    assert not kept.active
    *_, successor = started("live")
    found = successor.restore()
    assert found.source == "none" and "an optimizer step was under way" in found.why


@pytest.mark.parametrize("write", ["recv_checkpoint", "_apply_pending_state_dict"])
def test_a_state_that_a_peers_is_written_over_is_not_whole(keeper: Keeper, write: str) -> None:
    manager = Manager()
    model, optimizer, kept = started("live", manager=manager)
    kept.restore()
    train(model, optimizer, kept, 2)
    getattr(manager._checkpoint_transport if write == "recv_checkpoint" else manager, write)()
    assert started("live", manager=Manager())[2].restore().source == "none"
    kept.commit(2)
    assert started("live", manager=Manager())[2].restore()[:2] == ("live", 2)


def test_nor_is_one_that_is_half_a_peers_until_a_transfer_has_succeeded(keeper: Keeper) -> None:
    manager = Manager()
    model, optimizer, kept = started("both", manager=manager)
    kept.restore()
    train(model, optimizer, kept, 2)
    manager._checkpoint_transport.torn = True
    manager._checkpoint_transport.recv_checkpoint()
    kept.commit(3, snapshot=True)
    assert started("both", manager=Manager())[2].restore()[:2] == ("snapshot", 2)
    manager._checkpoint_transport.torn = False
    kept.commit(4)
    assert started("both", manager=Manager())[2].restore()[:2] == ("live", 4)


def test_a_state_that_is_half_a_peers_is_not_given_to_others() -> None:
    transport: PeerTransport[Any] = PeerTransport(timedelta(seconds=5), host="127.0.0.1", key=b"k" * 32)
    transport.torn = True
    with pytest.raises(TransportError, match="half a peer's"):
        transport.send_checkpoint([1], 3, {"a": torch.ones(2)}, timedelta(seconds=5))
    assert transport.asked_while_torn
    transport.shutdown()


def memories() -> int:
    """How many descriptors of held memory this process and the pretended keeper have."""
    links = [
        os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink() and os.path.lexists(path)
    ]
    return sum("kept-test" in link for link in links)


@pytest.mark.parametrize("mode", ["live", "snapshot"])
def test_memory_of_an_older_form_is_given_back(keeper: Keeper, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_live, "ROOM", 0)  # so that a record outgrows its room
    counters = {"all": Counter()}
    model, optimizer, kept = started(mode, extra=counters)
    kept.restore()
    train(model, optimizer, kept)
    before = memories()
    for size in (10_000, 100_000, 1_000_000):
        counters["all"].text = "x" * size
        parameter = next(iter(optimizer.state))
        optimizer.state[parameter][f"more{size}"] = torch.ones(4, 4)
        train(model, optimizer, kept)
    assert memories() <= before
    assert started(mode, extra={"all": Counter()})[2].restore().source == mode


class Counter:
    def __init__(self) -> None:
        self.count, self.text = 0, ""

    def state_dict(self) -> dict[str, Any]:
        return self.__dict__  # its own, as scripts do

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def test_a_snapshot_is_of_one_step_in_all_its_parts(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter()
    model, optimizer, kept = started("snapshot", extra={"counter": counter})
    kept.restore()
    train(model, optimizer, kept)
    checked, go_on = snapshot.checksum, threading.Event()
    monkeypatch.setattr(snapshot, "checksum", lambda slot: go_on.wait(30) and checked(slot))
    counter.count = 2
    train(model, optimizer, kept)
    counter.count = 3  # the next step has begun, and the snapshot of step 2 is not written yet
    go_on.set()
    assert kept._snapshots is not None and kept._snapshots.snapshots is not None
    kept._snapshots.snapshots.finish()
    other = Counter()
    assert started("snapshot", extra={"counter": other})[2].restore()[:2] == ("snapshot", 2)
    assert other.count == 2


def two_ranks_of_which_the_other_has(monkeypatch: pytest.MonkeyPatch, *steps: int) -> tuple[Any, Any, Kept]:
    """This rank as it begins, when the other rank of its replica has snapshots of these steps."""
    others = [Offer("snapshot", step, "settled") for step in steps]
    monkeypatch.setattr(agree, "exchange", lambda offers, *_: [list(offers), others])
    return started("snapshot", ranks=2)


@pytest.mark.parametrize(("other", "found"), [([2, 1], ("snapshot", 2)), ([], ("none", 0))])
def test_a_snapshot_that_was_passed_over_is_not_put_beside_one_of_the_steps_as_they_were_done_again(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, other: list[int], found: tuple[str, int]
) -> None:
    model, optimizer, kept = two_ranks_of_which_the_other_has(monkeypatch)
    kept.restore()
    train(model, optimizer, kept, 3)
    assert kept._snapshots is not None and kept._snapshots.snapshots is not None
    kept._snapshots.snapshots.finish()
    *_, again = two_ranks_of_which_the_other_has(monkeypatch, *other)
    assert again.restore()[:2] == found
    # The other has done step 3 again when both are killed, and this one's snapshot of it had not begun.
    *_, third = two_ranks_of_which_the_other_has(monkeypatch, 3, *other)
    assert third.restore()[:2] == found


def test_what_goes_wrong_with_a_snapshot_does_not_end_a_training(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, kept = started("snapshot")
    kept.restore()
    train(model, optimizer, kept)
    monkeypatch.setattr(snapshot, "checksum", lambda slot: 1 / 0)
    train(model, optimizer, kept, 3)
    assert not kept.active


def test_optimizer_states_of_an_earlier_life_do_not_come_back(keeper: Keeper) -> None:
    model, optimizer, kept = started("live")
    kept.restore()
    train(model, optimizer, kept, 2)
    kept.begin()  # killed within a step: nothing is offered, the memory is used again
    model, optimizer, kept = started("live")
    assert kept.restore().source == "none"
    kept.commit(1)  # whole, before the optimizer has made any state
    model, optimizer, kept = started("live")
    assert kept.restore()[:2] == ("live", 1)
    assert not optimizer.state
    train(model, optimizer, kept)
    model, optimizer, kept = started("live")
    assert kept.restore()[:2] == ("live", 2)
    assert optimizer.state


def test_a_snapshots_optimizer_state_goes_to_where_the_optimizer_would_have_made_it() -> None:
    model = torch.nn.Linear(2, 2, device="meta")
    for fused, place in ((False, "cpu"), (True, "meta")):
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.param_groups[0]["fused"] = fused
        sources = Sources([model], [optimizer])
        assert counts_on_host(optimizer, model.weight) is not fused
        for key in ("step", "exp_avg"):
            sources.make(Entry(f"optimizer.0.0.{key}", "", (), (), 0, False), torch.zeros(()), to_device=True)
        state = optimizer.state[model.weight]
        assert (state["step"].device.type, state["exp_avg"].device.type) == (place, "meta")


class Sync:
    """A DiLoCo whose reduction may be under way."""

    def __init__(self) -> None:
        self._local_step, self._fragments = 0, [self]
        self._allreduce_work: list[str] = []
        self._outer_optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        self.original_parameters = dict[str, Any]()
        self._fragment_id = 0


def test_a_state_is_not_whole_while_a_reduction_is_under_way(keeper: Keeper) -> None:
    """Its result would be lost with the process."""
    sync = Sync()
    model, inner, kept = started("both", sync=sync)
    assert kept.restore().source == "none"
    train(model, inner, kept)
    sync._allreduce_work.append("work")
    train(model, inner, kept)
    sync._allreduce_work.clear()
    _, _, again = started("both", sync=sync)
    restored = again.restore()
    assert (restored.source, restored.step) == ("snapshot", 1)
