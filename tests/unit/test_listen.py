"""The sockets of an agent on its own host: the ranks' packets, and the way to the Lighthouse."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_ft.agent.listen import Forwarder, RankSocket
from slurm_ft.train import progress
from tests.waiting import until

Packets = list[tuple[int, dict[str, Any]]]


def run(story: Awaitable[None]) -> None:
    async def within() -> None:
        async with asyncio.timeout(20):
            await story

    asyncio.run(within())


def connect(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect("\0" + name.removeprefix("@"))
    return connection


def with_socket(story: Callable[[RankSocket, Packets], Awaitable[None]]) -> None:
    async def within() -> None:
        packets: Packets = []
        ranks = RankSocket(lambda rank, packet: packets.append((rank, packet)))
        try:
            await story(ranks, packets)
        finally:
            ranks.close()

    run(within())


# --- packets of ranks --------------------------------------------------------------------------------------------


def test_what_is_sent_to_a_rank_goes_to_it_and_not_to_a_program_that_it_has_started() -> None:
    async def story(ranks: RankSocket, packets: Packets) -> None:
        rank, child = connect(ranks.name), connect(ranks.name)
        rank.settimeout(5)
        for number, connection in enumerate((rank, child), 1):
            connection.send(json.dumps({"type": "hello", "rank": 2}).encode())
            connection.send(json.dumps({"type": "progress", "step": number}).encode())
            await until(lambda number=number: len(packets) == number)
        assert [who for who, _ in packets] == [2, 2]
        assert ranks.send(2, {"type": "save"})
        child.close()
        await until(lambda: len(ranks._connections[2]) == 1)
        assert ranks.ranks() == [2] and ranks.send(2, {"type": "abort"})
        assert [json.loads(rank.recv(1000))["type"] for _ in range(2)] == ["save", "abort"]
        rank.close()
        await until(lambda: not ranks.ranks())
        assert not ranks.send(2, {"type": "save"})

    with_socket(story)


def test_packets_are_those_of_the_rank_that_said_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ranks: RankSocket, packets: Packets) -> None:
        monkeypatch.setenv("RANK", "5")
        channel = progress.Channel(ranks.name)
        channel.send("progress", step=3, loss=1.5)
        await until(lambda: packets)
        assert packets[0][0] == 5
        assert packets[0][1].items() >= {"type": "progress", "step": 3, "loss": 1.5}.items()
        assert ranks.send(5, {"type": "nothing that it knows"})
        channel._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
        await until(lambda: not ranks.send(5, {}))
        channel._socket.close()  # type: ignore[union-attr]

    with_socket(story)


class Scalar:
    """As torch and numpy have them."""

    def __init__(self, value: object) -> None:
        self._value = value

    def item(self) -> object:
        if isinstance(self._value, list):
            raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")
        return self._value

    def __str__(self) -> str:
        return f"tensor({self._value})"


def test_numbers_of_torch_are_sent_as_numbers_and_nothing_else_makes_reporting_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(ranks: RankSocket, packets: Packets) -> None:
        monkeypatch.setenv("RANK", "0")
        channel = progress.Channel(ranks.name)
        channel.send("progress", step=Scalar(3), loss=Scalar(1.5), tokens=Scalar([1, 2]))
        await until(lambda: packets)
        assert packets[0][1].items() >= {"step": 3, "loss": 1.5, "tokens": "tensor([1, 2])"}.items()
        channel._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
        channel._socket.close()  # type: ignore[union-attr]

    with_socket(story)


def test_a_packet_that_is_too_long_is_left_out_and_the_next_one_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ranks: RankSocket, packets: Packets) -> None:
        monkeypatch.setenv("RANK", "0")
        channel = progress.Channel(ranks.name)
        channel.send("saved", error="x" * (progress.PACKET_BYTES + 1))
        channel.send("progress", step=3)
        await until(lambda: packets)
        assert packets[0][1]["step"] == 3
        channel._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
        channel._socket.close()  # type: ignore[union-attr]

    with_socket(story)


def test_a_rank_that_never_came_cannot_be_told_anything() -> None:
    async def story(ranks: RankSocket, packets: Packets) -> None:
        assert not ranks.send(0, {"type": "exit", "code": 3})

    with_socket(story)


@pytest.mark.parametrize(
    "packet",
    [b"no json", b"[1]", b'"text"', b"\xff\xff", b'{"type": "hello"}', b'{"type": "hello", "rank": "x"}',
     b"x" * 60_000],
)  # fmt: skip
def test_who_sends_nonsense_is_dropped_and_the_others_are_heard(packet: bytes) -> None:
    async def story(ranks: RankSocket, packets: Packets) -> None:
        with connect(ranks.name) as odd, connect(ranks.name) as good:
            odd.send(packet)
            good.send(b'{"type": "hello", "rank": 1}')
            good.send(b'{"type": "progress", "step": 1}')
            await until(lambda: packets)
            assert packets == [(1, {"type": "progress", "step": 1})]
            odd.setblocking(False)
            await until(lambda: _is_closed(odd))

    with_socket(story)


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(10) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_a_restarted_ranks_connection_takes_the_place_of_the_old_one() -> None:
    async def story(ranks: RankSocket, packets: Packets) -> None:
        with connect(ranks.name) as new:
            with connect(ranks.name) as old:
                old.send(b'{"type": "hello", "rank": 0}')
                await until(lambda: ranks.send(0, {}))
                new.send(b'{"type": "hello", "rank": 0}')
                new.send(b'{"type": "progress"}')
                await until(lambda: packets)
            old_gone = asyncio.Event()
            asyncio.get_running_loop().call_soon(old_gone.set)
            await old_gone.wait()
            assert ranks.send(0, {"type": "for the new one"})
            assert json.loads(new.recv(1000)) == {"type": "for the new one"}

    with_socket(story)


def test_a_busy_agent_never_blocks_a_training_step_and_gets_it_all_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ranks: RankSocket, packets: Packets) -> None:
        monkeypatch.setenv("RANK", "0")
        channel = progress.Channel(ranks.name)
        for step in range(3000):  # far more than the socket holds; the agent does not read meanwhile
            channel.send("progress", step=step, note="x" * 500)
        assert channel._waiting

        def all_there() -> bool:
            channel.send("again")
            return any(packet.get("step") == 2999 for _, packet in packets)

        await until(all_there)
        assert [packet["step"] for _, packet in packets if packet["type"] == "progress"] == list(range(3000))
        channel._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
        channel._socket.close()  # type: ignore[union-attr]

    with_socket(story)


def test_a_rank_is_ended_from_within_with_the_code_that_it_is_told() -> None:
    async def story(ranks: RankSocket, packets: Packets) -> None:
        code = "from slurm_ft.train.progress import report; report(step=1)\nimport time; time.sleep(60)"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, env={**os.environ, "SLURM_FT_SOCKET": ranks.name, "RANK": "2"}
        )
        await until(lambda: packets)
        assert ranks.send(2, {"type": "exit", "code": 77})
        assert await process.wait() == 77

    with_socket(story)


def test_reporting_outside_a_rank_or_to_an_agent_that_is_gone_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from slurm_ft.train.progress import report; report(step=1, loss=2.0); print('fine')"
    for name in ("", "@no-such-agent"):
        out = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "SLURM_FT_SOCKET": name, "RANK": "x"},
            capture_output=True,
            text=True,
            timeout=20,
        )
        assert (out.stdout, out.stderr) == ("fine\n", "")


def test_a_data_loaders_worker_does_not_speak_for_its_rank() -> None:
    code = """if True:
        import os
        from slurm_ft.train.progress import report
        report(step=1)
        if os.fork() == 0:
            report(step=99)
            os._exit(0)
        os.wait()
        report(step=2)
    """

    async def story(ranks: RankSocket, packets: Packets) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, env={**os.environ, "SLURM_FT_SOCKET": ranks.name, "RANK": "0"}
        )
        assert await process.wait() == 0
        await until(lambda: len(packets) == 2)
        assert [packet["step"] for _, packet in packets] == [1, 2]

    with_socket(story)


# --- the way to the Lighthouse -----------------------------------------------------------------------------------


class Lighthouse:
    """Answers each line with its own name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.open = 0

    async def start(self) -> Lighthouse:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}\n"
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        while line := await reader.readline():
            writer.write(f"{self.name} {line.decode()}".encode())
        writer.close()
        self.open -= 1

    async def close(self) -> None:
        self._server.close()
        await self._server.wait_closed()


async def ask(address: str, *lines: str) -> list[str]:
    """The answers, each asked for when the last one has come; an empty one when the connection is closed."""
    host, port = address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answers = []
    for line in lines:
        writer.write(f"{line}\n".encode())
        answers.append((await reader.readline()).decode().strip())
    writer.close()
    await writer.wait_closed()
    return answers


def test_the_forwarder_leads_to_the_lighthouse_of_the_day_and_its_own_address_stays(tmp_path: Path) -> None:
    async def story() -> None:
        file = tmp_path / "lighthouse"
        first, second = await Lighthouse("first").start(), await Lighthouse("second").start()
        file.write_text(first.address)
        forwarder = Forwarder(file)
        address = await forwarder.start()
        assert address.startswith("http://127.0.0.1:")
        assert await ask(address, "a", "b") == ["first a", "first b"]
        await first.close()
        assert await ask(address, "c") == [""]  # it is closed at once, so that the rank dials again
        file.write_text(second.address)
        assert await ask(address, "d") == ["second d"]
        await forwarder.close()
        await second.close()

    run(story())


def test_who_asks_while_a_lighthouse_is_started_again_is_kept_waiting_for_it(tmp_path: Path) -> None:
    async def story() -> None:
        file = tmp_path / "lighthouse"
        file.write_text("")
        forwarder = Forwarder(file)
        asked = asyncio.ensure_future(ask(await forwarder.start(), "a"))
        assert await forwarder.reaches(), "one that is being started again is not out of reach"
        await asyncio.sleep(0)
        assert not asked.done()
        lighthouse = await Lighthouse("it").start()
        file.write_text(lighthouse.address)
        assert await asked == ["it a"]
        await forwarder.close()
        await lighthouse.close()

    run(story())


def test_a_fenced_host_carries_nothing_old_or_new_until_it_is_opened(tmp_path: Path) -> None:
    """A host that was cut off must not bring its ranks back to the Lighthouse with the network."""

    async def story() -> None:
        lighthouse = await Lighthouse("it").start()
        (tmp_path / "lighthouse").write_text(lighthouse.address)
        forwarder = Forwarder(tmp_path / "lighthouse")
        address = await forwarder.start()
        host, port = address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"a\n")
        assert await reader.readline() == b"it a\n"
        forwarder.fence()
        assert await reader.read() == b"", "what was open is closed"
        await until(lambda: lighthouse.open == 0)
        new, end = await asyncio.open_connection(host, int(port))
        assert await new.read() == b"", "what is new is closed at once"
        end.close()
        assert lighthouse.open == 0
        forwarder.open()
        assert await ask(address, "c") == ["it c"]
        writer.close()
        await forwarder.close()
        await lighthouse.close()

    run(story())


def test_a_lighthouse_that_is_down_is_within_reach_and_one_behind_a_cut_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        lighthouse = await Lighthouse("it").start()
        file = tmp_path / "lighthouse"
        file.write_text(lighthouse.address)
        forwarder = Forwarder(file)
        assert await forwarder.reaches()
        await lighthouse.close()
        assert await forwarder.reaches()

        async def nowhere(*_: object) -> None:
            await asyncio.sleep(60)

        monkeypatch.setattr("slurm_ft.agent.listen.REACH", 0.01)
        monkeypatch.setattr("asyncio.open_connection", nowhere)
        assert not await forwarder.reaches()

    run(story())


def test_many_ranks_at_once_and_nothing_stays_open_when_they_have_gone(tmp_path: Path) -> None:
    async def story() -> None:
        lighthouse = await Lighthouse("it").start()
        (tmp_path / "lighthouse").write_text(lighthouse.address)
        forwarder = Forwarder(tmp_path / "lighthouse")
        address = await forwarder.start()
        before = len(os.listdir("/proc/self/fd"))
        answers = await asyncio.gather(*(ask(address, str(number)) for number in range(50)))
        assert answers == [[f"it {number}"] for number in range(50)]
        await until(lambda: lighthouse.open == 0)
        gc.disable()  # nor may it take the garbage collector to close them
        try:
            await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
        finally:
            gc.enable()
        await forwarder.close()
        await lighthouse.close()

    run(story())


def test_a_rank_that_is_killed_leaves_no_connection_to_the_lighthouse(tmp_path: Path) -> None:
    async def story() -> None:
        lighthouse = await Lighthouse("it").start()
        (tmp_path / "lighthouse").write_text(lighthouse.address)
        forwarder = Forwarder(tmp_path / "lighthouse")
        host, port = (await forwarder.start()).removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as rank:
            await until(lambda: lighthouse.open == 1)
            rank.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # RST, as after SIGKILL
        await until(lambda: lighthouse.open == 0)
        await forwarder.close()
        await lighthouse.close()

    run(story())


def test_a_run_without_a_lighthouse_gives_its_ranks_no_address(tmp_path: Path) -> None:
    async def story() -> None:
        forwarder = Forwarder(tmp_path / "none")
        assert await forwarder.start() == ""
        await forwarder.close()

    run(story())
