"""The keeper as a real process: what it holds, for whom, what it refuses, and when it leaves."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft.agent.process import die_with_parent
from slurm_ft.keeper import protocol
from slurm_ft.keeper.client import Client, Found
from slurm_ft.keeper.held import Shelf
from slurm_ft.keeper.place import is_ours, private_folder, socket_path
from slurm_ft.keeper.protocol import Refused
from slurm_ft.keeper.server import answer
from tests.waiting import wait_until

MIB = 1 << 20


class Keeper:
    """A keeper of a run folder, on a host of this name."""

    def __init__(self, run: Path, host: str, *options: str) -> None:
        self.run, self.path = run, socket_path(run, host)
        argv = [sys.executable, "-m", "slurm_ft.keeper.server", f"--run-dir={run}", f"--host={host}", *options]
        self.process = subprocess.Popen(
            argv, stderr=subprocess.PIPE, text=True, preexec_fn=die_with_parent(os.getpid())
        )

    def end(self) -> str:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.communicate(timeout=10)[1]


@contextlib.contextmanager
def a_keeper(*options: str) -> Iterator[Keeper]:
    with tempfile.TemporaryDirectory() as folder:
        keeper = Keeper(Path(folder), "host1", *options)
        try:
            yield keeper
        finally:
            keeper.end()


@pytest.fixture(scope="module")
def keeper() -> Iterator[Keeper]:
    with a_keeper(f"--limit={64 * MIB}") as found:
        yield found


@pytest.fixture
def client(keeper: Keeper) -> Iterator[Client]:
    with Client.connect(keeper.path, 30.0) as found:
        yield found


def contents(found: Found | None) -> bytes:
    assert found is not None
    with mmap.mmap(found.descriptors[0], 0) as memory:
        data = memory[:5]
    protocol.close_all(found.descriptors)
    return data


def in_another_process(path: Path, code: str) -> subprocess.Popen[str]:
    """A process that is connected as `k` to the keeper and runs `code`; it says what it prints."""
    program = f"import sys\nfrom slurm_ft.keeper.client import Client\nk = Client.connect({str(path)!r})\n{code}"
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent(os.getpid()),
    )


def test_memory_lives_on_when_the_process_that_wrote_it_was_killed(keeper: Keeper, client: Client) -> None:
    code = "import mmap\nfd = k.make(4096)\nmmap.mmap(fd, 4096)[:5] = b'state'\nk.put('live', {'step': 7}, [fd])\n"
    writer = in_another_process(keeper.path, code + "print('put', flush=True)\ninput()")
    assert writer.stdout is not None and writer.stdout.readline() == "put\n"
    with pytest.raises(Refused, match=f"process {writer.pid} owns live and lives on after 0 s"):
        client.get("live", claim=True)
    with pytest.raises(Refused, match="owns live and lives"):
        client.put("live", {}, [client.make(1)])
    with pytest.raises(Refused, match="owns live and lives"):
        client.drop("live")
    os.kill(writer.pid, signal.SIGKILL)
    found = client.get("live", claim=True, wait=10)
    assert found is not None and (found.meta, found.owner) == ({"step": 7}, writer.pid)
    assert contents(found) == b"state"
    writer.communicate()
    client.drop("live")
    assert client.get("live") is None


def test_a_claim_waits_for_the_end_of_the_owner(keeper: Keeper, client: Client) -> None:
    owner = in_another_process(keeper.path, "k.put('mine', {}, [k.make(1)])\nprint('put', flush=True)\ninput()")
    assert owner.stdout is not None and owner.stdin is not None and owner.stdout.readline() == "put\n"
    heir = in_another_process(keeper.path, "print('asks', flush=True)\nprint(k.get('mine', True, 10).owner)")
    assert heir.stdout is not None and heir.stdout.readline() == "asks\n"
    assert client.names()["mine"] == {"bytes": 1, "owner": owner.pid, "owned": True}
    owner.communicate("\n", timeout=10)
    assert heir.communicate(timeout=10)[0] == f"{owner.pid}\n"
    client.drop("mine")


def test_a_put_under_the_same_name_replaces_and_frees_what_was_there(client: Client) -> None:
    for _ in range(3):  # 48 MiB each under a limit of 64
        descriptor = client.make(16 * MIB)
        client.put("big", {}, [descriptor, descriptor, descriptor])
        os.close(descriptor)
    assert client.names()["big"]["bytes"] == 48 * MIB
    with pytest.raises(Refused, match="limit"):
        client.make(17 * MIB)
    client.drop("big")
    os.close(client.make(17 * MIB))


def test_made_memory_is_filled_and_cannot_be_shrunk(client: Client) -> None:
    descriptor = client.make(2 * MIB)
    try:
        assert os.fstat(descriptor).st_blocks * 512 == 2 * MIB
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, MIB)
    finally:
        os.close(descriptor)


def test_what_is_no_memory_is_refused(client: Client) -> None:
    with socket.socket() as some, pytest.raises(Refused, match="only memory can be held"):
        client.put("socket", {}, [some.fileno()])
    with pytest.raises(Refused, match="no descriptor"):
        client.put("nothing", {}, [])


packets = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
requests = st.dictionaries(st.sampled_from(["v", "op", "name", "meta", "bytes", "claim", "wait"]), packets) | st.builds(
    lambda rest, op: {**rest, "v": 1, "op": op},
    st.dictionaries(st.sampled_from(["name", "meta", "claim", "wait"]), packets),
    st.sampled_from(["get", "put", "drop", "list", "make"]),
)


@given(requests)
def test_any_object_gets_an_answer_or_is_refused_in_words(packet: dict[str, object]) -> None:
    shelf = Shelf(1 << 20)
    try:
        reply, _, _ = answer(shelf, packet, [], os.getpid())
    except Refused as error:
        assert str(error)
    else:
        assert reply["ok"] is True


def test_rubbish_on_the_socket_is_refused_and_the_connection_goes_on(keeper: Keeper) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.connect(str(keeper.path))
        for rubbish in (b"{", b"[1]", b"\xff\xfe", b"x" * (protocol.PACKET_BYTES + 100), b"[" * 50_000):
            raw.send(rubbish)
            reply = protocol.receive(raw)
            assert reply is not None and reply[0]["ok"] is False and "this is no request" in reply[0]["why"]
        raw.send(b'{"v":1,"op":"list"}')
        reply = protocol.receive(raw)
        assert reply is not None and reply[0]["ok"] is True


def test_descriptors_of_refused_requests_are_closed(keeper: Keeper, client: Client) -> None:
    def count() -> int:
        return len(os.listdir(f"/proc/{keeper.process.pid}/fd"))

    client.names()  # answered: the keeper has accepted this connection
    before, descriptor = count(), client.make(1)
    for _ in range(20):
        with pytest.raises(Refused):
            client.put("a name", {}, [descriptor] * 5)
    os.close(descriptor)
    wait_until(lambda: count() <= before)


def test_only_its_user_can_reach_it(keeper: Keeper) -> None:
    assert stat.S_IMODE(os.stat(keeper.path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(keeper.path.parent).st_mode) == 0o700
    assert len(str(socket_path("/" + "a" * 4000, "h" * 300, uid=2**32 - 2))) < 108


def test_a_folder_that_others_could_have_made_is_not_trusted(tmp_path: Path) -> None:
    private_folder(tmp_path / "user" / "run")
    is_ours(tmp_path / "user" / "run")
    (tmp_path / "user" / "run").chmod(0o755)
    (tmp_path / "link").symlink_to(tmp_path / "user")
    for folder in (tmp_path / "user" / "run", tmp_path / "link"):
        with pytest.raises(PermissionError, match="this user's alone"):
            is_ours(folder)
        with pytest.raises(PermissionError):
            private_folder(folder / "below" if folder.is_symlink() else folder)


def test_two_keepers_of_a_run_on_a_host_are_one() -> None:
    with a_keeper() as first:
        Client.connect(first.path, 30.0).close()
        second = Keeper(first.run, "host1")
        assert "there is one already" in second.process.communicate(timeout=10)[1]
        assert second.process.returncode == 0
        Client.connect(first.path, 30.0).close()
        words = first.end()
        assert "it was told to" in words and first.process.returncode == 0
        assert not first.path.parent.exists()


def test_it_leaves_by_itself_when_nobody_is_connected_and_no_controller_writes() -> None:
    with a_keeper("--orphan-timeout=0.2") as keeper:
        connected = Client.connect(keeper.path, 30.0)
        with pytest.raises(subprocess.TimeoutExpired):
            keeper.process.wait(1.5)
        connected.close()
        _, words = keeper.process.communicate(timeout=10)
        assert "no controller for 0.2 s" in words
