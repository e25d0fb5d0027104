"""The control channel, with real sockets on the loopback interface."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import zmq
import zmq.auth

from slurm_ft import channel
from slurm_ft.channel import LONGEST_MESSAGE, Client, Message, Server, make_keys
from slurm_ft.errors import LaunchError, RunFolderError
from slurm_ft.paths import RunPaths
from tests.waiting import until

HOST = "127.0.0.1"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path / "my run (v2)")
    found.create()
    make_keys(found)
    return found


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(20):
            await story()

    asyncio.run(within())


@asynccontextmanager
async def serving(paths: RunPaths) -> AsyncIterator[tuple[Server, list[tuple[bytes, Message]]]]:
    """A server, and what it has heard so far."""
    server, heard = Server(paths, HOST), []

    async def listen() -> None:
        async for item in server.messages():
            heard.append(item)

    task = asyncio.ensure_future(listen())
    try:
        yield server, heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        server.close()
        for _ in range(5):  # pyzmq's authenticator lets go of its descriptors some turns of the loop later
            await asyncio.sleep(0)


@asynccontextmanager
async def dialling(paths: RunPaths, name: bytes = b"0.0") -> AsyncIterator[tuple[Client, list[Message | None]]]:
    """A client, and what it has heard so far."""
    client, heard = Client(paths, name), []

    async def listen() -> None:
        while True:
            heard.append(await client.receive())

    task = asyncio.ensure_future(listen())
    try:
        yield client, heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        client.close()


def types(heard: list[tuple[bytes, Message]]) -> list[str]:
    return [message["type"] for _, message in heard]


def test_messages_go_both_ways_in_order(paths: RunPaths) -> None:
    async def story() -> None:
        async with serving(paths) as (server, heard), dialling(paths) as (client, answers):
            for number in range(100):
                client.send({"type": "news", "number": number, "text": "what\n\0 ü"})
            await until(lambda: len(heard) == 100)
            assert [message["number"] for _, message in heard] == list(range(100))
            assert heard[0] == (b"0.0", {"v": 1, "type": "news", "number": 0, "text": "what\n\0 ü"})
            server.send(b"0.0", {"type": "start"})
            await until(lambda: answers == [{"v": 1, "type": "start"}])

    run(story)


def test_each_peer_gets_its_own_messages_and_one_that_is_gone_is_no_error(paths: RunPaths) -> None:
    async def story() -> None:
        async with serving(paths) as (server, heard):
            async with dialling(paths, b"a") as (a, to_a), dialling(paths, b"b") as (b, to_b):
                a.send({"type": "hello"})
                b.send({"type": "hello"})
                await until(lambda: len(heard) == 2)
                server.send(b"nobody", {"type": "lost"})
                server.send(b"a", {"type": "for a"})
                server.send(b"b", {"type": "for b"})
                await until(lambda: to_a and to_b)
                assert [message and message["type"] for message in (*to_a, *to_b)] == ["for a", "for b"]

    run(story)


@contextmanager
def stranger(paths: RunPaths, endpoint: str, kind: str) -> Iterator[zmq.Socket[bytes]]:
    """A client that does not hold the agents' key; gives what watches its handshake."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        if kind != "no key at all":
            dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
            dealer.curve_serverkey = zmq.auth.load_certificate(paths.secret / "controller.key")[0]
        if kind == "the agents' public key alone":
            dealer.curve_publickey = zmq.auth.load_certificate(paths.secret / "agent.key")[0]
        refused = (
            zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED
        )  # fmt: skip
        with dealer.get_monitor_socket(refused) as refusals:
            dealer.connect(endpoint)
            dealer.send(b'{"v": 1, "type": "intruder"}')
            yield refusals
            dealer.disable_monitor()


@pytest.mark.parametrize("kind", ["no key at all", "a key of its own", "the agents' public key alone"])
def test_who_does_not_hold_the_agents_secret_key_is_refused_and_nothing_is_heard_of_it(
    paths: RunPaths, kind: str
) -> None:
    async def story() -> None:
        async with serving(paths) as (server, heard), dialling(paths) as (client, answers):
            with stranger(paths, server.endpoint, kind) as refusals:
                await until(lambda: refusals.poll(0))
                client.send({"type": "hello"})  # the run's own agents are served all the same
                await until(lambda: heard)
                assert types(heard) == ["hello"]
                server.send(b"0.0", {"type": "alive"})
                await until(lambda: answers)

    run(story)


def test_who_has_no_key_cannot_fill_the_controllers_memory(paths: RunPaths) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    frame = b"\x06" + (LONGEST_MESSAGE + 1).to_bytes(8, "big")

    def refused(endpoint: str) -> bool:
        host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        with socket.create_connection((host, int(port)), 10) as connection:
            connection.sendall(greeting + frame)
            with contextlib.suppress(ConnectionError):
                while connection.recv(4096):  # its own greeting, and then the end
                    pass
        return True

    async def story() -> None:
        async with serving(paths) as (server, _):
            assert await asyncio.to_thread(refused, server.endpoint)

    run(story)


async def keep_saying(client: Client, heard: list[tuple[bytes, Message]]) -> None:
    """As agents do: what is said just when the controller dies may be lost, so it is said again and again."""

    def said() -> bool:
        client.send({"type": "alive"})
        return bool(heard)

    await until(said)


def test_a_restarted_server_is_found_again_on_the_same_port(paths: RunPaths) -> None:
    async def story() -> None:
        async with dialling_after_first_server(paths) as (client, answers, endpoint):
            async with serving(paths) as (server, heard):
                assert server.endpoint == endpoint
                await keep_saying(client, heard)
                server.send(b"0.0", {"type": "who"})
                await until(lambda: {"v": 1, "type": "who"} in answers)

    run(story)


@asynccontextmanager
async def dialling_after_first_server(paths: RunPaths) -> AsyncIterator[tuple[Client, list[Message | None], str]]:
    """A client whose server, with which it has talked, is gone."""
    async with serving(paths) as (server, heard):
        client_context = dialling(paths)
        client, answers = await client_context.__aenter__()
        client.send({"type": "hello"})
        await until(lambda: heard)
    yield client, answers, server.endpoint
    await client_context.__aexit__(None, None, None)


def test_a_server_whose_port_was_taken_meanwhile_listens_elsewhere_and_is_found_by_dialling_again(
    paths: RunPaths,
) -> None:
    async def story() -> None:
        async with dialling_after_first_server(paths) as (client, answers, endpoint):
            with socket.socket() as stranger:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                stranger.bind((HOST, int(endpoint.rpartition(":")[2])))
                stranger.listen()
                async with serving(paths) as (server, heard):
                    assert server.endpoint != endpoint
                    assert paths.endpoint.read_text() == server.endpoint
                    client.dial()
                    await keep_saying(client, heard)
                    server.send(b"0.0", {"type": "who"})
                    await until(lambda: {"v": 1, "type": "who"} in answers)

    run(story)


def test_dialling_again_where_nothing_has_changed_loses_nothing(paths: RunPaths) -> None:
    async def story() -> None:
        async with serving(paths) as (_, heard), dialling(paths) as (client, _answers):
            for number in range(5):
                client.send({"type": str(number)})
                client.dial()
            await until(lambda: types(heard) == list("01234"))

    run(story)


def test_a_client_that_is_told_to_end_while_it_listens_ends(paths: RunPaths) -> None:
    async def story() -> None:
        async with serving(paths), dialling(paths):
            pass  # `dialling` cancels its listener and waits for that

    run(story)


@pytest.mark.parametrize(
    "packet",
    [b"", b"no json", b"[1]", b"{}", b'{"v": 1}', b'{"v": 2, "type": "of a newer version"}', b'"text"', b"\xff\xfe"],
)
def test_what_is_not_of_this_protocol_is_dropped(paths: RunPaths, packet: bytes) -> None:
    async def story() -> None:
        async with serving(paths) as (_, heard), dialling(paths) as (client, _answers):
            assert client._socket is not None
            await client._socket.send(packet)
            await client._socket.send_multipart([b"too", b"many"])
            client.send({"type": "hello"})
            await until(lambda: heard)
            assert types(heard) == ["hello"]

    run(story)


def test_before_there_is_a_controller_an_agent_says_so(paths: RunPaths) -> None:
    async def story() -> None:
        client = Client(paths, b"0.0")
        client.send({"type": "dropped"})
        with pytest.raises(ConnectionError, match="no controller yet"):
            await client.receive()
        client.close()

    run(story)


def test_an_address_that_is_not_ours_says_what_to_set(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        with pytest.raises(LaunchError, match=r"cannot listen on 192\.0\.2\.1") as caught:
            Server(paths, "192.0.2.1")
        assert "SLURM_FT_ADDRESS" in caught.value.hint

    run(story)


# --- keys --------------------------------------------------------------------------------------------------------


def test_only_the_owner_can_read_the_keys_and_the_address(paths: RunPaths) -> None:
    async def story() -> None:
        async with serving(paths):
            pass

    run(story)
    for file in paths.secret.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, file.name


def test_keys_that_are_there_are_kept(paths: RunPaths) -> None:
    before = {file.name: file.read_bytes() for file in paths.secret.iterdir()}
    make_keys(paths)
    assert {file.name: file.read_bytes() for file in paths.secret.iterdir()} == before


def test_two_runs_have_different_keys(paths: RunPaths, tmp_path: Path) -> None:
    other = RunPaths(tmp_path / "other")
    other.create()
    make_keys(other)
    assert channel.keys_of(paths.secret, "agent") != channel.keys_of(other.secret, "agent")


@pytest.mark.parametrize("damage", ["missing", "empty", "no key in it"])
def test_keys_that_cannot_be_read_are_one_sentence(paths: RunPaths, damage: str) -> None:
    file = paths.secret / "agent.key_secret"
    file.unlink() if damage == "missing" else file.write_text("" if damage == "empty" else "x = 3\n")
    with pytest.raises(RunFolderError, match="keys cannot be read"):
        Client(paths, b"0.0")


class Relay:
    """A way to the controller that can be cut: nothing gets through, and no connection is closed."""

    def __init__(self, port: int) -> None:
        self._server, self._far = socket.create_server((HOST, 0)), (HOST, port)
        self.port = self._server.getsockname()[1]
        self._ends: list[socket.socket] = []
        self.whole = threading.Event()
        self.whole.set()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def connections(self) -> int:
        return len(self._ends) // 2

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._server.accept()[0]
                self._ends.append(near)
                self._ends.append(far := socket.create_connection(self._far))
                for ends in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._pump, args=ends))
                    self._threads[-1].start()

    def _pump(self, here: socket.socket, there: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while block := here.recv(65536):
                self.whole.wait()
                there.sendall(block)

    def close(self) -> None:
        for end in [self._server, *self._ends]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(5)
        for end in [self._server, *self._ends]:
            end.close()


def test_an_agent_dials_again_when_its_connection_is_not_answered(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RW-39 for the channel: a host that was cut off is heard soon after the network is back."""
    monkeypatch.setattr(channel, "PING_MS", 100)

    async def story() -> None:
        async with serving(paths) as (server, heard):
            relay = Relay(int(server.endpoint.rpartition(":")[2]))
            paths.endpoint.write_text(f"tcp://{HOST}:{relay.port}")
            async with dialling(paths) as (client, _):
                client.send({"type": "before"})
                await until(lambda: types(heard) == ["before"])
                assert relay.connections == 1
                relay.whole.clear()
                await until(lambda: relay.connections > 1)
                relay.whole.set()
                client.send({"type": "after"})
                await until(lambda: "after" in types(heard))
            relay.close()

    run(story)
