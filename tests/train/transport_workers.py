"""What the tests of the checkpoint transport do, in processes that have torch."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_ft.train.transport import PeerGone, PeerTransport, Refused, TransportError
from slurm_ft.train.transport.tree import Row, byte_view, put_together, take_apart

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
LONG = timedelta(seconds=20)
SOON = timedelta(seconds=0.5)
Transport = PeerTransport[Any]


def make(key: bytes = KEY, **named: Any) -> Transport:
    return PeerTransport(LONG, host="127.0.0.1", key=key, **named)


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().contiguous()  # byte_view does not keep it alive
    return bytes(byte_view(plain))


def same(one: Any, other: Any) -> bool:
    """Equal to the last bit, and of the same types."""
    if isinstance(one, torch.Tensor):
        alike = isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.shape == other.shape
        return alike and bits(one) == bits(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


def big_state(seed: int, numbers: int = 3000) -> dict[str, Any]:
    dice = torch.Generator().manual_seed(seed)
    return {"user": {"w": torch.randn(numbers, generator=dice), "b": torch.randn(77, generator=dice)}, "step": seed}


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 6), max_size=3))
    dice = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    dtype = draw(st.sampled_from([*DTYPES, torch.complex64]))
    tensor = (torch.randn(shape, generator=dice) * 100).to(dtype)
    change = draw(st.sampled_from(["none", "transpose", "skip", "parameter", "conj"]))
    if change == "transpose" and tensor.ndim >= 2:
        return tensor.transpose(0, -1)
    if change == "skip" and tensor.ndim:
        return tensor[::2]
    if change == "parameter" and dtype == torch.float32:
        return torch.nn.Parameter(tensor)
    return tensor.conj() if change == "conj" else tensor


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
LEAVES = PLAIN | tensors() | st.binary(max_size=5) | st.just(torch.Size([1, 2])) | st.just(torch.bfloat16)
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers() | st.text(max_size=5) | st.tuples(st.integers()), inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


def any_state_arrives() -> None:
    donor, receiver = make(), make()

    @settings(max_examples=80, deadline=None)
    @given(state=STATES, chunk=st.integers(1, 300), connections=st.integers(1, 4), in_place=st.booleans())
    def arrives(state: Any, chunk: int, connections: int, in_place: bool) -> None:
        own = put_together(take_apart(state)[0])[0]
        receiver.into, receiver._connections, donor._chunk_bytes = (
            (lambda: own) if in_place else None,
            connections,
            chunk,
        )
        donor.send_checkpoint([1], 7, state, LONG)
        got = receiver.recv_checkpoint(0, donor.metadata(), 7, LONG)
        donor.disallow_checkpoint()
        assert same(_without_wrappers(state), got), (state, got)

    arrives()


def _without_wrappers(value: Any) -> Any:
    """Parameters as the tensors they hold: a state has no gradients."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _without_wrappers(item)) for key, item in value.items())
    return type(value)(map(_without_wrappers, value)) if type(value) in (list, tuple) else value


def rows_are_cut_exactly() -> None:
    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 50))
    def cut(sizes: list[int], chunk: int) -> None:
        made = [torch.arange(size, dtype=torch.uint8) for size in sizes]
        row = Row(made, chunk)
        whole = b"".join(bits(tensor) for tensor in made)
        chunks = [b"".join(row.pieces(number)) for number in range(row.chunks)]
        assert b"".join(chunks) == whole and row.bytes == len(whole)
        assert all(len(part) == chunk for part in chunks[:-1]) and all(chunks)

    cut()


def written_in_place() -> None:
    """What fits is received where it will be used; what does not is new."""
    donor, sent = make(chunk_bytes=500), {"w": torch.randn(999), "v": torch.randn(5, 5), "n": torch.zeros(3)}
    own = {"w": torch.zeros(999), "v": torch.zeros(5, 5).t(), "n": torch.zeros(4)}
    receiver = make(into=lambda: own)
    donor.send_checkpoint([1], 1, sent, LONG)
    got = receiver.recv_checkpoint(0, donor.metadata(), 1, LONG)
    assert same(got, sent) and not receiver.torn
    assert same(own["w"], sent["w"]) and got["w"].data_ptr() == own["w"].data_ptr()
    assert not own["v"].any() and len(own["n"]) == 4


def nothing_without_the_secret() -> None:
    donor = make()
    donor.send_checkpoint([1], 1, big_state(1), LONG)
    for key in (OTHER_KEY, b""):
        with expect(PeerGone, "secret"):
            make(key).recv_checkpoint(0, donor.metadata(), 1, LONG)
    # Who says nothing right gets a greeting with a random number, and is hung up on.
    for words in (b"GET / HTTP/1.0\r\n\r\n" * 10, bytes(64), b"\xff" * 64):
        with socket.create_connection(("127.0.0.1", donor._donor.port)) as stranger:
            stranger.sendall(words)
            heard = b""
            with contextlib.suppress(ConnectionError):
                while part := stranger.recv(65536):
                    heard += part
            assert len(heard) <= 53, heard
    # And none of this keeps the rightful one away.
    assert same(make().recv_checkpoint(0, donor.metadata(), 1, LONG), big_state(1))
    # A false donor is found out before anything it says is read.
    false = make(OTHER_KEY)
    false.send_checkpoint([1], 1, big_state(2), LONG)
    with expect(TransportError, "secret"):
        make().recv_checkpoint(0, false.metadata(), 1, LONG)


def a_donor_that_repeats_our_proof_is_refused() -> None:
    """Somebody without the key who sends back what the receiver has sent."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo() -> None:
            for _ in range(3):
                stream, _ = server.accept()
                stream.sendall(b"slurm-ft transport 1\n" + bytes(32))
                nonce, proof = stream.recv(32, socket.MSG_WAITALL), stream.recv(32, socket.MSG_WAITALL)
                stream.sendall(proof)
                assert nonce

        threading.Thread(target=echo, daemon=True).start()
        with expect(Refused, "secret|key"):
            make().recv_checkpoint(0, f"slurm-ft://127.0.0.1:{server.getsockname()[1]}", 1, LONG)


def only_the_step_that_was_asked_for() -> None:
    donor = make()
    with expect((Refused, TimeoutError), "time"):
        make().recv_checkpoint(0, donor.metadata(), 5, SOON)
    donor.send_checkpoint([1], 5, big_state(5), LONG)
    with expect(Refused, "step 5 and not 6"):
        make().recv_checkpoint(0, donor.metadata(), 6, LONG)
    assert same(make().recv_checkpoint(0, donor.metadata(), 5, LONG), big_state(5))
    donor.disallow_checkpoint()
    with expect((Refused, TimeoutError), "time"):
        make().recv_checkpoint(0, donor.metadata(), 5, SOON)
    # One that comes before its donor is ready waits.
    late = threading.Timer(0.3, lambda: donor.send_checkpoint([1], 6, big_state(6), LONG))
    late.start()
    assert same(make().recv_checkpoint(0, donor.metadata(), 6, LONG), big_state(6))
    with expect(TransportError, "another transport"):
        make().recv_checkpoint(0, "http://127.0.0.1:80/checkpoint/", 6, LONG)


class DyingRow(Row):
    """Ends its process when chunk 6 is asked for."""

    def pieces(self, chunk: int) -> list[memoryview]:
        if chunk == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().pieces(chunk)


@contextlib.contextmanager
def dying_donor(state: Any, step: int) -> Iterator[str]:
    """The address of a donor in another process that gets SIGKILL in the middle of its work."""
    here, there = socket.socketpair()
    pid = os.fork()
    if not pid:
        donor = make(chunk_bytes=1000)
        donor.send_checkpoint([1], step, state, LONG)
        offer = donor._donor._offer
        assert offer is not None
        offer.row.__class__ = DyingRow
        there.sendall(donor.metadata().encode())
        time.sleep(60)
        os._exit(1)
    try:
        yield here.recv(100).decode()
    finally:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def a_donor_dies_and_another_goes_on() -> None:
    state = big_state(3)
    for in_place in (False, True):
        own = big_state(9)
        receiver = make(into=(lambda state=own: state) if in_place else None, connections=2)
        with dying_donor(state, 3) as address:
            began = time.monotonic()
            with expect(PeerGone, ""):
                receiver.recv_checkpoint(0, address, 3, LONG)
            assert time.monotonic() - began < LONG.total_seconds() / 2
        kept = receiver._kept
        assert kept is not None and 0 < len(kept.chunks) < kept.row.chunks
        arrived = sum(len(piece) for chunk in kept.chunks for piece in kept.row.pieces(chunk))
        assert receiver.torn == in_place
        second = make(chunk_bytes=1000)
        second.send_checkpoint([1], 3, state, LONG)
        assert same(receiver.recv_checkpoint(0, second.metadata(), 3, LONG), state)
        assert receiver.bytes_received == kept.row.bytes - arrived  # not one byte twice
        assert not receiver.torn and (not in_place or same(own["user"], state["user"]))


def what_was_kept_is_not_taken_for_another_steps() -> None:
    """The next donor may be a step further: what differs is sent, whatever has arrived before."""
    receiver = make(connections=1)
    with dying_donor(big_state(3), 3) as address, expect(PeerGone, ""):
        receiver.recv_checkpoint(0, address, 3, LONG)
    donor = make(chunk_bytes=1000)
    donor.send_checkpoint([1], 4, big_state(4), LONG)
    assert same(receiver.recv_checkpoint(0, donor.metadata(), 4, LONG), big_state(4))


class Cutter:
    """A proxy before a donor that breaks each of the first `cuts` connections after some bytes. The first `mute` are
    accepted, and nothing comes of them."""

    def __init__(self, donor: Transport, cuts: int, after: int, mute: int = 0) -> None:
        self._target, self._cuts, self._after = ("127.0.0.1", donor._donor.port), cuts, after
        self._mute, self._held = mute, list[socket.socket]()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"slurm-ft://127.0.0.1:{self._server.getsockname()[1]}"
        self.connections = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            stream, _ = self._server.accept()
            self.connections += 1
            if self.connections <= self._mute:
                self._held.append(stream)
                continue
            limit = self._after if self.connections <= self._cuts else 1 << 40
            target = socket.create_connection(self._target)
            threading.Thread(target=self._carry, args=(stream, target, 1 << 40), daemon=True).start()
            threading.Thread(target=self._carry, args=(target, stream, limit), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, limit: int) -> None:
        with contextlib.suppress(OSError):
            while limit > 0 and (data := source.recv(min(limit, 4096))):
                sink.sendall(data)
                limit -= len(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def a_broken_connection_goes_on() -> None:
    donor = make(chunk_bytes=500)
    donor.send_checkpoint([1], 2, big_state(2, 20_000), LONG)
    cutter, receiver = Cutter(donor, cuts=5, after=9000), make(connections=2)
    assert same(receiver.recv_checkpoint(0, cutter.address, 2, LONG), big_state(2, 20_000))
    assert cutter.connections > 5
    kept = 80_000 + 77 * 4
    assert receiver.bytes_received == kept  # whole chunks only are counted, and each once


def a_donor_that_is_slow_to_greet_is_asked_again() -> None:
    """Its host may be so busy that the handshake takes longer than a handshake may."""
    from slurm_ft.train.transport import wire

    donor = make()
    donor.send_checkpoint([1], 2, big_state(2), LONG)
    wire.HANDSHAKE_SECONDS = 2.0
    busy = Cutter(donor, cuts=0, after=0, mute=1)
    assert same(make().recv_checkpoint(0, busy.address, 2, LONG), big_state(2))
    wire.HANDSHAKE_SECONDS = 0.2
    with expect(PeerGone, ""):
        make().recv_checkpoint(0, Cutter(donor, cuts=0, after=0, mute=99).address, 2, LONG)
    wire.HANDSHAKE_SECONDS = 5.0
    with expect(TimeoutError, "time"):
        make().recv_checkpoint(0, Cutter(donor, cuts=0, after=0, mute=99).address, 2, SOON)


def a_damaged_chunk_is_noticed() -> None:
    donor = make(chunk_bytes=1000)
    donor.send_checkpoint([1], 2, big_state(2), LONG)
    offer = donor._donor._offer
    assert offer is not None
    offer.digests[3] = bytes(16)[:-1] + b"x"
    with expect(PeerGone, "chunk 3 arrived damaged"):
        make().recv_checkpoint(0, donor.metadata(), 2, LONG)


def the_donor_waits_for_its_readers_but_not_for_ever() -> None:
    donor = make(stall=3.0)
    donor.send_checkpoint([1], 2, big_state(2), LONG)
    receiver = make()
    hanging = socket.create_connection(("127.0.0.1", donor._donor.port))
    from slurm_ft.train.transport import wire

    connection = wire.Connection(hanging, time.monotonic() + 20, 20)
    wire.introduce(connection, KEY)
    connection.send_message({"step": 2, "seconds": 20, "skeleton": True})
    assert connection.receive_message()["ok"]
    began = time.monotonic()
    donor.disallow_checkpoint()  # the reader above asks for nothing more and does not go
    assert 1.0 < time.monotonic() - began < 10
    with expect(PeerGone, ""):
        connection.receive(1)
    assert receiver.bytes_received == 0


class Trap:
    """Unpickled, it would leave a mark."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.path.join(tempfile.gettempdir(), "sft-trap"),)


def a_donor_cannot_run_code_here() -> None:
    donor = make()
    donor.send_checkpoint([1], 1, {"bad": Trap()}, LONG)
    with expect(TransportError, "state.bad"):
        make().recv_checkpoint(0, donor.metadata(), 1, LONG)
    assert not os.path.exists(os.path.join(tempfile.gettempdir(), "sft-trap"))


def damaged_skeletons_are_errors() -> None:
    good, _ = take_apart({"a": [torch.zeros(2), 1]})
    for bad in ({}, {"?": 1}, {"d": 3}, {"x": {"n": 0}}, {"x": {"n": 0, "dtype": "zip", "shape": []}}, {"l": [1]}):
        with expect(TransportError, ""):
            put_together(bad)
    with expect(TransportError, ""):
        put_together({"x": {"n": 5, "dtype": "float32", "shape": [1]}})
    assert same(put_together(good)[0]["a"][1], 1)


def dtensors_arrive() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        sent = {"w": distribute_tensor(torch.randn(7, 3), mesh, [Shard(0)])}
        donor = make(chunk_bytes=16)
        donor.send_checkpoint([1], 1, sent, LONG)
        own = {"w": distribute_tensor(torch.zeros(7, 3), mesh, [Shard(0)])}
        for receiver in (make(), make(into=lambda: own)):
            got = receiver.recv_checkpoint(0, donor.metadata(), 1, LONG)["w"]
            assert isinstance(got, DTensor) and got.placements == sent["w"].placements
            assert same(got.to_local(), sent["w"].to_local())
        assert same(own["w"].to_local(), sent["w"].to_local())
        dist.destroy_process_group()


def secrets_are_read_with_care(folder: str) -> None:
    from slurm_ft.channel import make_keys
    from slurm_ft.errors import UsageError
    from slurm_ft.paths import RunPaths
    from slurm_ft.train.transport import transport_key

    with expect(UsageError, "no secret"):
        transport_key({})
    paths = RunPaths(folder)
    with expect(UsageError, "cannot be read"):
        transport_key({"SLURM_FT_RUN": folder})
    paths.create()
    make_keys(paths)
    of_run = transport_key({"SLURM_FT_RUN": folder})
    assert of_run == transport_key({"SLURM_FT_RUN": folder}) and len(of_run) == 32
    assert of_run not in paths.transport_secret.read_bytes()
    file = Path(folder, "key")
    file.write_bytes(b"s" * 32)
    file.chmod(0o640)
    with expect(UsageError, "others can read"):
        transport_key({"SLURM_FT_TRANSPORT_KEY": str(file)})
    file.chmod(0o600)
    own = transport_key({"SLURM_FT_TRANSPORT_KEY": str(file), "SLURM_FT_RUN": folder})
    assert own != of_run  # what the user names wins
    file.write_bytes(b"short")
    with expect(UsageError, "fewer than 32"):
        transport_key({"SLURM_FT_TRANSPORT_KEY": str(file)})


def a_manager_commits_nothing_on_a_torn_state(folder: str) -> None:
    """Half of a peer's state in place, and no peer left: the rank must end and start again."""
    from unittest import mock

    import torchft

    from slurm_ft.train import ft

    manager = object.__new__(ft.Manager)
    manager.syncs, manager._errored = 0, None
    manager._client, manager._quorum_future, manager._may_heal = mock.Mock(quorum=None), None, False
    manager._commit_failures = manager._borrowed_failures = 0
    manager._checkpoint_transport = mock.Mock(torn=True, asked_while_torn=False)
    with mock.patch.object(torchft.Manager, "should_commit", return_value=True), expect(RuntimeError, "half the peer"):
        manager.should_commit()
    manager._errored = object()  # healing was tried and failed: vote no, and try again at the next quorum
    with mock.patch.object(torchft.Manager, "should_commit", return_value=False):
        assert manager.should_commit() is False
    manager._checkpoint_transport.asked_while_torn = True  # there is no peer that has more, and it is asked for half
    with mock.patch.object(torchft.Manager, "should_commit", return_value=False), expect(RuntimeError, "half the peer"):
        manager.should_commit()


@contextlib.contextmanager
def expect(kind: type[BaseException] | tuple[type[BaseException], ...], words: str) -> Iterator[None]:
    import re

    try:
        yield
    except kind as error:
        assert re.search(words, str(error)), error
    else:
        raise AssertionError(f"no {kind} was raised")
