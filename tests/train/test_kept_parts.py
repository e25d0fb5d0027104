"""The parts of kept state: records, layouts, the two formats in memory, and what a kill in mid-write leaves."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from slurm_ft import native  # noqa: E402
from slurm_ft.keeper.held import seal  # noqa: E402
from slurm_ft.train.kept import agree  # noqa: E402
from slurm_ft.train.kept.agree import Offer  # noqa: E402
from slurm_ft.train.kept.checksum import KINDS, checksum, is_right  # noqa: E402
from slurm_ft.train.kept.keep_live import overlapping  # noqa: E402
from slurm_ft.train.kept.layout import ALIGNMENT, Layout, digest, plan  # noqa: E402
from slurm_ft.train.kept.live import Live  # noqa: E402
from slurm_ft.train.kept.memory import LIVE, SNAPSHOT, Damaged, Memory  # noqa: E402
from slurm_ft.train.kept.pace import Pace  # noqa: E402
from slurm_ft.train.kept.record import Unkeepable, decode, encode  # noqa: E402
from slurm_ft.train.kept.snapshot import Snapshots, readable  # noqa: E402


class Maker:
    """Makes memory as the keeper does, in this process."""

    def make(self, size: int) -> int:
        descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        seal(descriptor)
        return descriptor


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers() | st.just("~"), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(plain)
def test_a_record_comes_back_as_it_was(value: Any) -> None:
    assert decode(encode(value)) == value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_a_tensor_in_a_record_comes_back_bit_for_bit(dtype: Any, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    back = decode(encode({"t": tensor}))["t"]
    assert back.dtype == dtype and back.shape == tensor.shape and torch.equal(back, tensor)


def test_what_a_record_cannot_hold_is_named() -> None:
    with pytest.raises(Unkeepable, match=r"the state\['extra'\]\['loader'\] holds a function"):
        encode({"extra": {"loader": plan}})


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@given(st.dictionaries(st.text(min_size=1, max_size=5), shapes, max_size=6), st.randoms(use_true_random=False))
def test_tensors_of_a_layout_lie_apart_and_keep_their_strides(forms: dict[str, tuple[int, ...]], dice: Any) -> None:
    tensors = {}
    for name, shape in forms.items():
        tensor = torch.empty(shape, dtype=dice.choice([torch.float32, torch.int8, torch.float64]))
        order = list(range(len(shape)))
        dice.shuffle(order)
        tensors[name] = tensor.permute(order)
    layout = plan(tensors)
    assert Layout.from_bytes(layout.to_bytes(), layout.size) == layout
    end = 0
    for entry in layout.entries:
        assert entry.offset >= end and entry.offset % ALIGNMENT == 0
        end = entry.offset + entry.size
        assert entry.shape == tuple(tensors[entry.name].shape)
        if math.prod(entry.shape) > 0 and 1 not in entry.shape:
            assert entry.stride == tuple(tensors[entry.name].stride())
    assert layout.size >= end


def test_another_name_type_or_shape_is_another_digest() -> None:
    base = [("a", "float32", (2, 3))]
    others = [[("b", "float32", (2, 3))], [("a", "float64", (2, 3))], [("a", "float32", (3, 2))], [*base, *base]]
    assert digest(base) == digest(list(base))
    assert len({digest(forms) for forms in (base, *others)}) == 5


@given(st.binary(max_size=300))
def test_a_damaged_layout_is_an_error(text: bytes) -> None:
    with pytest.raises(ValueError, match="the layout is damaged"):
        Layout.from_bytes(text + b"]", 1000)


# --- live ----------------------------------------------------------------------------------------------------


def live_of(values: list[float]) -> Live:
    tensors = {"w": torch.tensor(values)}
    live = Live.create(Maker(), plan(tensors), 1000)
    live.views["w"].copy_(tensors["w"])
    return live


def again(live: Live) -> Live:
    """As another process maps it."""
    return Live.adopt([os.dup(descriptor) for descriptor in live.descriptors])


def test_live_memory_is_valid_between_commit_and_begin_only() -> None:
    live = live_of([1.0, 2.0])
    with pytest.raises(Damaged):
        again(live).record()
    for step in range(1, 5):
        assert live.commit({"step": step})
        assert again(live).record() == {"step": step}
        live.begin()
        live.begin()
        with pytest.raises(Damaged, match="while an optimizer step was under way"):
            again(live).record()
    assert again(live).views["w"].tolist() == [1.0, 2.0]


def test_tensors_that_come_later_get_a_further_memory() -> None:
    live = live_of([1.0])
    live.grow(Maker(), {"m": torch.zeros(2, 2)}, set())
    live.views["m"].fill_(3)
    live.commit({"step": 1})
    assert again(live).views["m"].tolist() == [[3, 3], [3, 3]]
    assert again(live).views["w"].tolist() == [1.0]


def test_a_record_that_has_no_room_is_not_written() -> None:
    live = live_of([1.0])
    assert live.commit({"step": 1}) and not live.commit({"step": 2, "text": "x" * 5000})
    assert again(live).record() == {"step": 1}


@given(st.data())
def test_memory_that_was_tampered_with_is_refused_and_crashes_nobody(data: Any) -> None:
    live = live_of([1.0, 2.0, 3.0])
    live.commit({"step": 1})
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.one_of(st.integers(0, 80), st.integers(0, live.memories[0].size - 1)))
        live.memories[0]._map[at] = data.draw(st.integers(0, 255))
    try:
        adopted = again(live)
        adopted.record()
        assert all(view.numel() == 3 for view in adopted.views.values())
    except Damaged:
        pass


# --- live, on a GPU ------------------------------------------------------------------------------------------


@pytest.fixture
def library() -> Any:
    """The host library stands in for a GPU's: the same calls, on host memory."""
    try:
        return native.load("host")
    except native.NativeError as error:
        pytest.skip(f"needs the native host library: {error}")


def on_device(library: Any) -> tuple[Live, Any]:
    live = Live.create(Maker(), plan({}), 1000, on_gpu=True)
    tensor = torch.arange(6.0).reshape(2, 3)
    live.grow_on_device(Maker(), library, 0, {"w": tensor}, set())
    live.views["w"].copy_(tensor)
    return live, library


def test_tensors_of_a_device_are_found_again_with_their_record(library: Any) -> None:
    live, _ = on_device(library)
    for step in (1, 2, 3):
        live.begin()
        live.views["w"].add_(1)
        live.commit({"step": step})
    found = Live.adopt([os.dup(descriptor) for descriptor in live.descriptors], lambda: library)
    assert found.record() == {"step": 3}
    assert found.views["w"].tolist() == [[3, 4, 5], [6, 7, 8]]
    live.begin()
    with pytest.raises(Damaged, match="under way"):
        found.record()


def test_what_the_device_had_done_counts_and_not_what_the_host_had(library: Any) -> None:
    """The host has gone on for three steps whose work on the device was never done."""
    live, _ = on_device(library)
    for step in (1, 2, 3, 4):
        live.commit({"step": step})
    for word, step in ((4, 2), (8, 4)):
        live.devices[0].mark(word, 0)
        assert live.record() == {"step": step}
    live.devices[0].mark(5, 0)
    with pytest.raises(Damaged, match="under way"):
        live.record()
    for step in range(5, 14):
        live.commit({"step": step})
    live.devices[0].mark(4, 0)  # so far behind that its record has been written over
    with pytest.raises(Damaged, match="is not there"):
        live.record()


# --- snapshots -----------------------------------------------------------------------------------------------


def tensors(value: float) -> dict[str, Any]:
    return {"a": torch.full((700,), value), "b": torch.full((3, 100), value + 0.5, dtype=torch.float64)}


@given(st.integers(0, 13_000), st.integers(1, 4))
def test_a_kill_at_any_byte_of_a_snapshot_leaves_the_one_before(budget: int, committed: int) -> None:
    """What a kill leaves is a prefix of the stores. Here they are done one by one, up to a budget, onto a memory in
    which `committed` snapshots are whole: the newest of them is read back, or the new one if all of it was stored."""
    writer = Snapshots.create(Maker(), plan(tensors(0)), 500)
    for number in range(1, committed + 1):
        writer.take(tensors(number), {"step": number}, wait=True)
    before = bytes(writer.memory._map)
    writer.take(tensors(committed + 1), {"step": committed + 1}, wait=True)
    after = bytes(writer.memory._map)
    stores = stores_between(before, after, writer.memory, committed + 1)
    state = bytearray(before)
    for at, piece in stores[:budget]:
        state[at : at + len(piece)] = piece
    writer.memory._map[:] = bytes(state)
    descriptor = os.dup(writer.memory.descriptor)
    found = readable(Memory.adopt(descriptor, SNAPSHOT))
    whole = committed + (budget >= len(stores))
    assert found and found[0].record["step"] == whole
    value = float(whole)
    assert torch.equal(found[0].tensors()["a"], torch.full((700,), value))
    assert torch.equal(found[0].tensors()["b"], torch.full((3, 100), value + 0.5, dtype=torch.float64))
    os.close(descriptor)


def stores_between(before: bytes, after: bytes, memory: Memory, number: int) -> list[tuple[int, bytes]]:
    """The stores of one snapshot in their order: its record struck out; the slot; the record; its number; the word."""
    slot = memory.parts.data + (number % 2) * memory.slot_bytes
    record = memory.parts.records + (number % 2) * memory.parts.capacity
    slot_bytes = [(at, after[at : at + 1]) for at in range(slot, slot + memory.slot_bytes)]
    record_bytes = [
        (at, after[at : at + 1]) for at in range(record + 8, record + memory.parts.capacity) if before[at] != after[at]
    ]
    return [
        (record, bytes(8)), *slot_bytes, *record_bytes, (record, after[record : record + 8]), (64, after[64:72])
    ]  # fmt: skip


def test_both_slots_can_be_read_and_a_damaged_one_is_passed_over() -> None:
    writer = Snapshots.create(Maker(), plan(tensors(0)), 500)
    assert readable(writer.memory) == []
    for number in (1, 2, 3):
        writer.take(tensors(number), {"step": number}, wait=True)
    assert [found.record["step"] for found in readable(writer.memory)] == [3, 2]
    assert [found.record["step"] for found in readable(writer.memory, newest_only=True)] == [3]
    writer.memory.slot(1)[5] ^= 1
    assert [found.record["step"] for found in readable(writer.memory, newest_only=True)] == [2]
    assert [found.record["step"] for found in readable(writer.memory)] == [2]


def test_tensors_may_be_written_once_the_copy_is_done() -> None:
    source = tensors(1)
    writer = Snapshots.create(Maker(), plan(source), 500)
    for _ in range(20):
        writer.take(source, {"step": 1})
        writer.wait_copied()
        source["a"].fill_(99)
        writer.finish()
        assert torch.equal(readable(writer.memory)[0].tensors()["a"], torch.full((700,), 1.0))
        source["a"].fill_(1)


def test_what_went_wrong_in_the_background_is_raised_by_the_next_snapshot() -> None:
    writer = Snapshots.create(Maker(), plan(tensors(0)), 500)
    writer.take(tensors(1), {"step": 1, "text": "x" * 9000})
    with pytest.raises(Damaged, match="no room"):
        writer.take(tensors(2), {"step": 2})
    assert readable(writer.memory) == []


def test_strided_and_half_precision_tensors_come_back() -> None:
    source = {"c": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), "h": torch.randn(7).bfloat16()}
    writer = Snapshots.create(Maker(), plan(source), 500)
    writer.take(source, {"step": 1}, wait=True)
    found = readable(writer.memory)[0].tensors()
    assert torch.equal(found["c"], source["c"]) and found["c"].stride() == source["c"].stride()
    assert torch.equal(found["h"], source["h"])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_checksum_finds_one_wrong_bit(kind: str) -> None:
    if kind == "xxh3":
        pytest.importorskip("xxhash")
    data = bytearray(os.urandom(10_000))
    right = checksum(memoryview(data), kind)
    assert is_right(memoryview(data), right)
    data[5000] ^= 4
    assert not is_right(memoryview(data), right)
    assert not is_right(memoryview(data), "md17:00")


def test_memory_of_the_other_kind_is_not_adopted() -> None:
    memory = Memory.create(Maker(), LIVE, plan(tensors(0)), 100, 2)
    with pytest.raises(Damaged, match="another kind"):
        Memory.adopt(memory.descriptor, SNAPSHOT)


# --- agreement, pace, aliasing -------------------------------------------------------------------------------


def test_ranks_go_on_from_the_newest_state_that_all_have() -> None:
    first = [Offer("live", 124, "settled"), Offer("snapshot", 120, "settled"), Offer("snapshot", 110, "settled")]
    second = [Offer("snapshot", 120, "settled"), Offer("live", 123, "settled")]
    assert agree.choose([first, second]) == Offer("snapshot", 120, "settled")
    assert agree.choose([first, first]) == first[0]
    assert agree.choose([first, second], newer_than=120) is None
    assert agree.choose([first, []]) is None
    chosen = agree.choose([[Offer("live", 5, "pending"), Offer("snapshot", 5, "settled")]])
    assert chosen is not None and chosen.mark == "settled"
    assert agree.mine([Offer("snapshot", 5, "settled"), Offer("live", 5, "settled")], chosen).source == "live"


def test_ranks_tell_each_other_through_the_store_of_their_replica() -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    offers = {0: [Offer("live", 7, "settled")], 1: [Offer("snapshot", 5, "settled")]}

    def ask(rank: int) -> list[list[Offer]]:
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        return agree.exchange(offers[rank], place)

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(ask, (0, 1)))
    assert answers == [[offers[0], offers[1]]] * 2


def test_two_trainings_of_a_process_tell_their_own_offers_each() -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    first, second = [Offer("live", 7, "settled")], [Offer("live", 8, "settled")]

    def ask(rank: int, name: str, offers: list[Offer]) -> list[list[Offer]]:
        return agree.exchange(offers, {**place, "RANK": str(rank)}, name)

    with ThreadPoolExecutor(4) as pool:
        both = (("a", first), ("b", second))
        asked = [pool.submit(ask, rank, name, offers) for rank in (0, 1) for name, offers in both]
        assert [answer.result() for answer in asked] == [[first] * 2, [second] * 2] * 2


@given(st.floats(0.001, 10), st.floats(0.001, 10))
def test_snapshots_cost_no_more_than_their_share(step_seconds: float, seconds: float) -> None:
    pace = Pace(None)
    pace.stepped(0.0)
    pace.stepped(step_seconds)
    pace.cost(seconds)
    assert seconds <= 0.02 * step_seconds * pace.interval or pace.interval == 4096
    assert pace.interval == 1 or seconds > 0.02 * step_seconds * pace.interval / 2
    assert Pace(7).interval == 7 and Pace(None, ranks=2).interval == 32


def test_tensors_that_share_memory_are_found() -> None:
    whole = torch.zeros(10)
    assert overlapping({"a": whole[:5], "b": whole[5:]}) is None
    assert overlapping({"a": whole[:6], "b": whole[5:]}) == ("a", "b")
