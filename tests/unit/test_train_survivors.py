"""What a rank does when it is told that a replica is gone: with real sockets, and a Manager that is pretended."""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_ft.train import survivors
from tests.waiting import wait_until


class Listener:
    """A peer's end: a TCP server of this process, and what was connected to it."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.ends: list[socket.socket] = []

    def connect(self) -> socket.socket:
        here = socket.create_connection(self.server.getsockname())
        self.ends += [here, self.server.accept()[0]]
        return here

    def close(self) -> None:
        for end in [*self.ends, self.server]:
            end.close()


@pytest.fixture
def peer() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


class ProcessGroupOther:
    """As torchft's, for what is looked at here: `configure` opens connections."""

    def __init__(self, peer: Listener) -> None:
        self._timeout = timedelta(seconds=7)
        self.peer, self.connections, self.aborts = peer, [], 0
        self.go_on = threading.Event()
        self.go_on.set()

    def configure(self, *args: Any) -> None:
        self.connections = [self.peer.connect()]
        self.go_on.wait(10)
        self.connections.append(self.peer.connect())

    def abort(self) -> None:
        self.aborts += 1


class ProcessGroupGloo(ProcessGroupOther):
    """One whose `abort` would wait for what hangs."""


class Manager:
    """torchft's, as far as it is watched."""

    def __init__(
        self,
        pg: Any,
        timeout: timedelta = timedelta(seconds=60),
        quorum_timeout: timedelta = timedelta(seconds=60),
        connect_timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        self._pg = pg
        self._timeout, self._quorum_timeout, self._connect_timeout = timeout, quorum_timeout, connect_timeout
        self._logger = SimpleNamespace(_replica_id="replica_0:aaaa")
        self.members: list[str] = []
        self._client = SimpleNamespace(_quorum=lambda: SimpleNamespace(replica_ids=list(self.members)), other=5)

    def quorum(self, *members: str) -> None:
        self.members = list(members)
        self._client._quorum()
        self._pg.configure("store", "0", 0, len(members))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes watched Managers; `make.told` is what was reported."""
    monkeypatch.setattr(survivors, "_managers", weakref.WeakKeyDictionary())  # those of other tests may live on
    module = SimpleNamespace(Manager=type("Manager", (Manager,), {}))
    told: list[tuple[str, dict[str, Any]]] = []
    defaults = {"timeout": 90, "quorum_timeout": 600, "connect_timeout": 10}
    survivors.install(module, defaults, lambda kind, **fields: told.append((kind, fields)))

    def build(*args: Any, **kwargs: Any) -> Any:
        return module.Manager(*args, **kwargs)

    build.told = told  # type: ignore[attr-defined]
    build.module = module  # type: ignore[attr-defined]
    return build


def alive(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True


def test_the_connections_of_a_group_with_the_gone_member_are_closed_and_no_others(make, peer) -> None:
    before = peer.connect()
    manager = make(ProcessGroupGloo(peer))
    manager.quorum("replica_0:aaaa", "replica_1:bbbb")
    after = peer.connect()
    assert survivors.leave("replica_1:bbbb") == 1
    assert [alive(c) for c in manager._pg.connections] == [False, False]
    assert alive(before) and alive(after)
    assert peer.server.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN), "what listens goes on listening"
    assert manager._pg.aborts == 0, "abort waits for what hangs"


@pytest.mark.parametrize("gone", ["replica_1:cccc", "replica_1", "replica_2:bbbb", ""])
def test_a_group_without_that_very_member_is_left_alone(make, peer, gone) -> None:
    """RW-40: another attempt of the same replica is another member."""
    manager = make(ProcessGroupGloo(peer))
    manager.quorum("replica_0:aaaa", "replica_1:bbbb")
    assert survivors.leave(gone) == 0
    assert all(alive(c) for c in manager._pg.connections)


def test_an_order_that_comes_after_the_next_quorum_changes_nothing(make, peer) -> None:
    manager = make(ProcessGroupGloo(peer))
    manager.quorum("replica_0:aaaa", "replica_1:bbbb")
    manager.quorum("replica_0:aaaa", "replica_1:cccc")
    assert survivors.leave("replica_1:bbbb") == 0
    assert all(alive(c) for c in manager._pg.connections)


def test_an_order_before_any_quorum_and_a_second_order_do_nothing(make, peer) -> None:
    manager = make(ProcessGroupGloo(peer))
    assert survivors.leave("replica_1:bbbb") == 0
    manager.quorum("replica_0:aaaa", "replica_1:bbbb")
    assert survivors.leave("replica_1:bbbb") == 1
    assert survivors.leave("replica_1:bbbb") == 0


def test_a_group_that_is_just_being_configured_is_freed_whatever_it_opens_next(make, peer) -> None:
    manager = make(ProcessGroupGloo(peer))
    manager._pg.go_on.clear()
    configuring = threading.Thread(target=manager.quorum, args=("replica_0:aaaa", "replica_1:bbbb"))
    configuring.start()
    wait_until(lambda: manager._pg.connections, 5)
    leaving = threading.Thread(target=survivors.leave, args=("replica_1:bbbb",))
    leaving.start()
    wait_until(lambda: not alive(manager._pg.connections[0]), 5)
    manager._pg.go_on.set()
    configuring.join(5)
    leaving.join(5)
    assert not leaving.is_alive()
    manager.quorum("replica_0:aaaa")
    assert all(alive(c) for c in manager._pg.connections), "the next group is not hit"


def test_a_group_of_another_kind_is_aborted_and_a_wrapped_gloo_is_known(make, peer) -> None:
    manager = make(ProcessGroupOther(peer))
    manager.quorum("replica_0:aaaa", "replica_1:bbbb")
    assert survivors.leave("replica_1:bbbb") == 1
    assert manager._pg.aborts == 1
    assert survivors.is_gloo(SimpleNamespace(_pg=ProcessGroupGloo(peer)))
    assert not survivors.is_gloo(SimpleNamespace(_pg=None))


def test_the_rest_of_the_client_is_as_it_was_and_the_member_and_the_time_outs_are_told(make, peer) -> None:
    manager = make(ProcessGroupGloo(peer))
    assert manager._client.other == 5
    assert make.told == [
        ("member", {"id": "replica_0:aaaa", "timeouts": {
            "timeout": 90.0, "quorum_timeout": 600.0, "connect_timeout": 10.0, "process_group": 7.0,
        }}),
    ]  # fmt: skip


def test_a_time_out_that_the_program_gives_wins_and_so_does_torchfts_variable(make, peer, monkeypatch) -> None:
    monkeypatch.setenv("TORCHFT_QUORUM_TIMEOUT_SEC", "33")  # torchft reads it itself
    manager = make(ProcessGroupGloo(peer), timedelta(seconds=5), connect_timeout=timedelta(seconds=6))
    assert manager._timeout == timedelta(seconds=5)
    assert manager._connect_timeout == timedelta(seconds=6)
    assert manager._quorum_timeout == timedelta(seconds=60)


def test_a_manager_that_is_unlike_torchfts_is_not_watched_and_works(make) -> None:
    manager = make(None)
    assert manager._timeout == timedelta(seconds=90)
    assert make.told == []


def test_watching_twice_is_watching_once(make, peer) -> None:
    first = make.module.Manager.__init__
    survivors.install(make.module, {}, lambda kind, **fields: None)
    assert make.module.Manager.__init__ is first


def test_only_tcp_connections_are_shut(peer) -> None:
    ours, theirs = socket.socketpair()
    connection = peer.connect()
    inodes = {os.readlink(f"/proc/self/fd/{s.fileno()}") for s in (ours, connection, peer.server)}
    assert survivors.shut(inodes) == 1
    assert alive(ours) and not alive(connection)
    ours.close()
    theirs.close()


class Stores:
    """torchft.process_group, as far as its clients of stores are looked at: one is made at the try `works`."""

    def __init__(self, works: int = 1) -> None:
        self.works, self.tries, self.whole = works, [], None

    def create_store_client(self, store_addr: str, timeout: timedelta) -> Any:
        self.tries.append(timeout)
        if len(self.tries) < self.works:
            raise RuntimeError("timed out")
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self.whole = timeout


@pytest.fixture
def dead() -> Iterator[str]:
    """The address of a store that has gone. Its port is bound, so that nobody else comes to listen on it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}/a/prefix"


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_dead_store_is_given_up_when_a_member_is_gone(dead, peer, when) -> None:
    stores = Stores()
    survivors.install_store(stores)
    watched = survivors.Watched(ProcessGroupGloo(peer))
    watched.quorum(["replica_0:aaaa", "replica_1:bbbb"])
    gone = "replica_1:bbbb"
    begun = threading.Event()

    def create() -> None:
        begun.set()
        stores.create_store_client(dead, timeout=timedelta(seconds=60))

    if when == "before":
        assert watched.leave(gone)
    with ThreadPoolExecutor() as pool:
        made = pool.submit(watched.configure, create)
        assert begun.wait(5)
        if when == "meanwhile":
            assert watched.leave(gone)
        with pytest.raises(ConnectionAbortedError, match="is gone"):
            made.result(10)
    assert not stores.tries


def test_the_next_quorum_may_make_a_group_again(peer) -> None:
    stores = Stores()
    survivors.install_store(stores)
    watched = survivors.Watched(ProcessGroupGloo(peer))
    watched.quorum(["replica_0:aaaa", "replica_1:bbbb"])
    watched.leave("replica_1:bbbb")
    watched.quorum(["replica_0:aaaa", "replica_1:cccc"])
    address = "{}:{}/a/prefix".format(*peer.server.getsockname())
    assert watched.configure(stores.create_store_client, address, timedelta(seconds=9)) is stores


def test_a_dead_store_is_given_up_at_the_time_out_without_a_word(dead) -> None:
    stores = Stores()
    survivors.install_store(stores)
    with pytest.raises(ConnectionRefusedError):
        stores.create_store_client(dead, timeout=timedelta(seconds=0.2))


def test_a_client_is_tried_shortly_and_again_and_has_the_whole_time_out_afterwards(peer) -> None:
    stores = Stores(works=3)
    survivors.install_store(stores)
    address = "{}:{}/a/prefix".format(*peer.server.getsockname())
    assert stores.create_store_client(address, timeout=timedelta(seconds=60)) is stores
    assert stores.tries == [timedelta(seconds=survivors.TRY)] * 3
    assert stores.whole == timedelta(seconds=60)


def test_the_last_error_of_torchs_client_is_raised_at_the_time_out(peer) -> None:
    stores = Stores(works=10**9)
    survivors.install_store(stores)
    address = "{}:{}/a/prefix".format(*peer.server.getsockname())
    with pytest.raises(RuntimeError, match="timed out"):
        stores.create_store_client(address, timeout=timedelta(0))


def test_that_a_member_is_gone_is_known_until_a_quorum_has_it_again() -> None:
    before = time.monotonic()
    survivors.leave("replica_9:told")
    assert before <= survivors.gone["replica_9:told"] <= time.monotonic()
    survivors.Watched(None).quorum(["replica_8:other"])
    assert "replica_9:told" in survivors.gone
    survivors.Watched(None).quorum(["replica_9:told"])
    assert "replica_9:told" not in survivors.gone
