"""The Lighthouse dies under a training, again and again. Real runs on this machine, with a torchft script that knows
nothing of slurm-ft."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from slurm_ft.controller import lighthouse, quorum_ids
from slurm_ft.events import Event, Kind
from slurm_ft.spec import Lighthouse
from tests.local.running import PYTHON, Run, a_run
from tests.waiting import wait_until

PROGRAM = Path(__file__).parents[1] / "cluster" / "programs" / "user_localsgd.py"
REPLICAS = 3
RESTARTS = 10
SECONDS = 60.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with a_run(tmp_path) as found:
        yield found
        found.call("stop", str(found.paths.root))
        found.head.wait(SECONDS)


def lighthouse_pid(run: Run) -> int:
    """The Lighthouse's process, once it has given its address out."""
    wait_until(lambda: run.paths.lighthouse.read_text(), SECONDS, "the Lighthouse's address")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"slurm_ft.controller.lighthouse" in command and os.fsencode(run.paths.root) in command:
                return int(entry.name)
    raise AssertionError("there is no Lighthouse")


def commits(run: Run, replica: int) -> list[Event]:
    return [event for event in run.events(Kind.COMMIT, replica) if event.data["committed"]]


def newest_quorum(run: Run, replica: int) -> int:
    return max((event.data["quorum_id"] for event in commits(run, replica)), default=0)


def test_ten_restarts_of_the_lighthouse_cost_no_replica_and_no_quorum_id_comes_twice(run: Run) -> None:
    run.start("--replicas", str(REPLICAS), command=(PYTHON, str(PROGRAM), "100000"))
    wait_until(lambda: all(newest_quorum(run, r) for r in range(REPLICAS)), SECONDS, "all train")
    address = run.paths.lighthouse.read_text()
    for number in range(RESTARTS):
        before = max(newest_quorum(run, replica) for replica in range(REPLICAS))
        os.kill(lighthouse_pid(run), signal.SIGKILL)
        wait_until(
            lambda before=before: all(newest_quorum(run, r) > before for r in range(REPLICAS)),
            SECONDS, f"all commit in a new quorum after restart {number + 1}",
        )  # fmt: skip
    assert run.paths.lighthouse.read_text() == address
    assert not run.events(Kind.RANK_FAILED)
    assert {event.data["attempt"] for event in run.events(Kind.RANKS_STARTED)} == {1}
    for replica in range(REPLICAS):
        steps = [event.data["step"] for event in commits(run, replica)]
        assert steps == sorted(set(steps)), "the steps go on, and none is done twice"
        ids = [event.data["quorum_id"] for event in run.events(Kind.QUORUM, replica)]
        assert ids == sorted(set(ids)), "a quorum id comes once"
    # Nobody was left behind: every quorum after a restart has all members.
    shared = Counter(event.data["quorum_id"] for event in run.events(Kind.QUORUM))
    assert [count for number, count in shared.items() if number > quorum_ids.MARGIN] == [REPLICAS] * RESTARTS

    # RW-40: a replica that is back at once is a new member, and its former self does not hold it up until the
    # join time-out, as it would if it counted as alive.
    run.inject(2, "kill")
    wait_until(lambda: any(e.data["attempt"] == 2 for e in commits(run, 2)), SECONDS, "replica 2 is back")
    first, second = run.events(Kind.MEMBER, 2)
    assert first.data["id"].split(":")[0] == second.data["id"].split(":")[0] == "user_2"
    assert first.data["id"] != second.data["id"]
    joined = next(e for e in run.events(Kind.QUORUM, 2) if e.data["attempt"] == 2)
    assert joined.t - second.t < Lighthouse().join_timeout_ms / 1000
    assert run.events(Kind.SURVIVORS_TOLD, 2)[-1].data == {"member": first.data["id"], "told": [0, 1]}


@pytest.mark.parametrize("members", [1, 3])
def test_a_fresh_lighthouse_is_brought_beyond_the_ids_that_were_seen_and_forgets_our_members(members: int) -> None:
    path = lighthouse.extension_path()
    assert path is not None
    torchft = lighthouse._load(path)
    server = torchft.LighthouseServer(
        bind="127.0.0.1:0", min_replicas=members, join_timeout_ms=100, quorum_tick_ms=10, heartbeat_timeout_ms=3000
    )
    try:
        address = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
        assert quorum_ids.push(torchft, address, 250, members) == 250
        if members > 1:
            return
        manager = torchft.ManagerServer(
            replica_id="r", lighthouse_addr=address, hostname="127.0.0.1", bind="127.0.0.1:0", store_addr="",
            world_size=1, heartbeat_interval=timedelta(milliseconds=50), connect_timeout=quorum_ids.ANSWER_WITHIN,
            quorum_retries=0,
        )  # fmt: skip
        client = torchft.ManagerClient(manager.address(), connect_timeout=quorum_ids.ANSWER_WITHIN)
        quorum = client._quorum(
            group_rank=0, step=0, checkpoint_metadata="", shrink_only=False, timeout=quorum_ids.ANSWER_WITHIN,
            commit_failures=0, init_sync=False,
        )  # fmt: skip
        manager.shutdown()
        assert (quorum.quorum_id, quorum.replica_ids) == (251, ["r"])
    finally:
        server.shutdown()


@pytest.mark.parametrize("taken", [False, True], ids=["free", "taken"])
def test_a_lighthouse_comes_back_on_its_port_or_on_another_where_that_is_taken(tmp_path: Path, taken: bool) -> None:
    address, events = tmp_path / "lighthouse", tmp_path / "events.jsonl"
    events.write_text(Event(1.0, Kind.QUORUM, 0, {"quorum_id": 7}).to_line())
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        address.write_text("")
        if not taken:
            other.close()
        argv = [PYTHON, "-m", "slurm_ft.controller.lighthouse", "--host=127.0.0.1", f"--port={port}",
                f"--address-file={address}", f"--events={events}", "--min-replicas=1", "--join-timeout-ms=5000",
                "--quorum-tick-ms=10", "--heartbeat-timeout-ms=1000"]  # fmt: skip
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert "counts its quorums on from 107; 7 had been seen" in process.stdout.readline()
                wait_until(lambda: address.read_text(), SECONDS)
                assert (address.read_text() == f"http://127.0.0.1:{port}\n") == (not taken)
            finally:
                process.terminate()
        assert process.returncode == 0
