"""Losses: processes, hosts and clients killed for real. A call always returns, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slurm_ft.launch.local import members
from slurm_ft.mesh import (
    Action,
    Actor,
    MeshFailure,
    ProcessMesh,
    SupervisionError,
    ValueMesh,
    context,
    endpoint,
)
from slurm_ft.spec import Budget, Policy
from tests.mesh.conftest import MakeMesh
from tests.processes import parent
from tests.waiting import wait_until

SOON = 30.0
NO_RESTARTS = Policy(in_place=Budget(0, 600.0), step=Budget(0, 600.0))


class Holder(Actor):
    def __init__(self, kept: list[int]) -> None:
        self.kept = kept

    @endpoint
    def keep(self, value: int) -> list[int]:
        self.kept.append(value)
        return self.kept

    @endpoint
    async def show(self) -> list[int]:
        return self.kept


def wait_for(file: str) -> int:
    while not os.path.exists(file):
        time.sleep(0.01)
    return context().rank.index


def pids(mesh: ProcessMesh) -> list[int]:
    return list(mesh.call(os.getpid).get(SOON).values())


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def host_process(pid: int) -> int:
    """The host process of a worker: the zygote's parent."""
    return parent(parent(pid))


def failed(values: ValueMesh[object]) -> list[int]:
    return [point.rank for point, _ in values.failed()]


def test_a_call_that_loses_a_process_gives_its_error_and_the_others_values(make_mesh: MakeMesh, tmp_path: Path) -> None:
    mesh = make_mesh(2, 2)
    victim = pids(mesh)[1]
    future = mesh.call(wait_for, str(tmp_path / "go"))
    kill(victim)
    (tmp_path / "go").touch()
    values = future.get(SOON)
    assert [value for _, value in values.ok()] == [0, 2, 3]
    ((point, error),) = values.failed()
    assert point.rank == 1 and isinstance(error, SupervisionError)
    failure = error.failure
    assert failure.signal == signal.SIGKILL and failure.host == "local0" and failure.point == mesh.point(1)
    assert "killed by SIGKILL" in str(error)


def test_a_process_that_was_killed_is_back_with_its_actors_and_its_coordinates(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(1, 3)
    holder = mesh.spawn("holder", Holder, [7])
    holder.keep.call(8).get(SOON).check()
    before = pids(mesh)
    kill(before[2])
    wait_until(lambda: mesh.generation == 1 and mesh.states().flatten("rank").item(rank=2) == "up")
    assert list(holder.show.call().get(SOON).values()) == [[7, 8], [7, 8], [7]]
    after = pids(mesh)
    assert after[:2] == before[:2] and after[2] != before[2]
    assert mesh.slice(replica=0, host=0, gpu=2).call_one(lambda: context().incarnation).get(SOON) == 1


def test_a_call_during_a_repair_waits_for_it_or_fails_at_once_as_asked(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(1, 2)
    asked, decide = threading.Event(), threading.Event()

    @mesh.on_failure
    def slow(failure: MeshFailure) -> Action:
        asked.set()
        decide.wait(SOON)
        return Action.RESTART

    kill(pids(mesh)[0])
    assert asked.wait(SOON)
    waiting = mesh.call(lambda: context().incarnation)
    at_once = mesh.options(wait=False).call(os.getpid).get(SOON)
    assert failed(at_once) == [0] and isinstance(at_once.failed()[0][1], SupervisionError)
    bounded = mesh.options(timeout=2).call(os.getpid).get(SOON)
    assert failed(bounded) == [0] and isinstance(bounded.failed()[0][1], TimeoutError)
    cancelled = mesh.call(os.getpid)
    assert not waiting.done() and cancelled.cancel()
    decide.set()
    assert list(waiting.get(SOON).values()) == [1, 0]


def test_every_process_killed_in_the_middle_of_calls_and_not_one_call_hangs(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(2, 2, policy=Policy(backoff=0.05, backoff_max=0.05, in_place=Budget(50, 600.0)))
    answered = 0
    for victim in (0, 1, 2, 3) * 2:
        before = mesh.call(os.getpid).get(SOON)
        calls = [mesh.call(time.sleep, 0.002) for _ in range(10)]
        for point, pid in before.ok():
            if point.rank == victim:
                kill(pid)
        for values in [call.get(SOON) for call in calls]:
            assert set(failed(values)) <= {victim}
            answered += len(values.ok())
    assert answered >= 8 * 10 * 3
    assert mesh.call(os.getpid).get(SOON).check()


def test_a_function_that_leaves_python_tells_with_which_code(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(1, 1)
    ((_, error),) = mesh.call(sys.exit, 5).get(SOON).failed()
    assert isinstance(error, SupervisionError) and error.failure.code == 5
    assert pids(mesh)


def test_a_truthy_answer_means_handled_the_others_go_on_and_restart_brings_it_back(make_mesh: MakeMesh) -> None:
    seen: list[MeshFailure] = []

    class Owner:
        def __supervise__(self, failure: MeshFailure) -> bool:
            seen.append(failure)
            return True

    mesh = make_mesh(1, 2, owner=Owner())
    kill(pids(mesh)[1])
    wait_until(lambda: mesh.states().item(gpu=1) == "lost, handled")
    assert [failure.point.rank for failure in seen] == [1] and "killed by SIGKILL" in seen[0].report()
    values = mesh.call(os.getpid).get(SOON)
    assert failed(values) == [1] and len(values.ok()) == 1
    assert {mesh.choose(os.getpid).get(SOON) for _ in range(8)} == {values.item(gpu=0)}
    mesh.slice(gpu=1).restart().get(SOON).check()
    assert len(pids(mesh)) == 2


def test_a_propagated_failure_is_raised_on_next_use_and_slices_without_it_work(make_mesh: MakeMesh) -> None:
    heard: list[MeshFailure] = []
    mesh = make_mesh(2, 1, fault_hook=heard.append)
    holder = mesh.spawn("holder", Holder, [1])
    mesh.on_failure(lambda failure: Action.PROPAGATE)
    kill(pids(mesh)[1])
    wait_until(lambda: heard)
    with pytest.raises(MeshFailure, match="killed by SIGKILL"):
        mesh.call(os.getpid)
    with pytest.raises(MeshFailure):
        holder.show.call()
    with pytest.raises(MeshFailure):
        mesh.spawn("more", Holder, [2])
    assert holder.slice(host=0).show.call().get(SOON).item() == [1]
    assert len(pids(mesh.slice(host=slice(0, 1)))) == 1
    mesh.slice(host=1).restart().get(SOON).check()
    assert list(holder.show.call().get(SOON).values()) == [[1], [1]]


@pytest.mark.parametrize("lost", [2, 3])
def test_shrinking_goes_on_without_the_replica(make_mesh: MakeMesh, lost: int) -> None:
    mesh = make_mesh(3, 2, replicas=3)
    mesh.on_failure(lambda failure: Action.SHRINK)
    kill(pids(mesh)[lost])
    wait_until(lambda: list(mesh.slice(replica=1).states().values()) == ["taken out"] * 2)
    values = mesh.call(lambda: context().rank["replica"]).get(SOON).check()
    assert list(values.values()) == [0, 0, 2, 2]
    assert [point["replica"] for point, _ in values.items()] == [0, 0, 2, 2]
    with pytest.raises(KeyError):
        values.item(replica=1, gpu=0)
    assert len(list(mesh.stream(os.getpid))) == 4
    mesh.slice(replica=1).restart().get(SOON).check()
    assert len(pids(mesh)) == 6


def test_a_killed_host_is_started_again_and_its_neighbours_answer_meanwhile(
    make_mesh: MakeMesh, tmp_path: Path
) -> None:
    mesh = make_mesh(2, 2)
    holder = mesh.spawn("holder", Holder, [5])
    before = pids(mesh)
    future = mesh.call(wait_for, str(tmp_path / "go"))
    kill(host_process(before[0]))
    (tmp_path / "go").touch()
    values = future.get(SOON)
    assert failed(values) == [0, 1] and [value for _, value in values.ok()] == [2, 3]
    assert all("the host local0" in str(error) for _, error in values.failed())
    after = pids(mesh)
    assert after[2:] == before[2:] and not set(after[:2]) & set(before)
    assert list(holder.show.call().get(SOON).values()) == [[5]] * 4


def test_a_spare_takes_the_place_of_a_host_that_cannot_be_kept(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(3, 1, spares=1, policy=NO_RESTARTS)
    assert mesh.hosts() == ["local0", "local1"] and mesh.size == 2
    kill(pids(mesh)[1])
    wait_until(lambda: mesh.generation)
    assert list(mesh.call(lambda: context().host).get(SOON).values()) == ["local0", "local2"]
    assert mesh.hosts() == ["local0", "local2"]
    heard = threading.Event()
    mesh.on_failure(lambda failure: heard.set())  # a falsy answer: the ladder goes on
    kill(pids(mesh)[0])
    assert heard.wait(SOON)
    wait_until(lambda: mesh.states().item(host=0) == "failed")
    with pytest.raises(MeshFailure, match="no spare"):
        mesh.call(os.getpid)


def test_a_silent_host_is_a_lost_one(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(2, 1, spares=1, policy=Policy(agent_timeout=3.0))
    stopped = host_process(pids(mesh)[0])
    os.kill(stopped, signal.SIGSTOP)
    values = mesh.call(os.getpid).get(SOON)
    assert isinstance(values.failed()[0][1], SupervisionError) and "nothing was heard" in str(values.failed()[0][1])
    assert mesh.call(lambda: context().host).get(SOON).item() == "local1"


def test_a_handler_that_fails_itself_leaves_the_failure_to_the_ladder(
    make_mesh: MakeMesh, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = make_mesh(1, 1)
    mesh.on_failure(lambda failure: 1 / 0)
    kill(pids(mesh)[0])
    wait_until(lambda: mesh.generation == 1)
    assert pids(mesh)
    assert "a handler of failures failed itself" in caplog.text


def test_processes_that_never_come_up_are_a_failure_that_says_why(make_mesh: MakeMesh) -> None:
    environment = {"PYTHONHOME": "/nowhere"}
    mesh = make_mesh(1, 1, environment=environment, policy=Policy(step=Budget(1, 600.0)))
    values = mesh.call(os.getpid).get(SOON)
    assert isinstance(values.failed()[0][1], SupervisionError)
    with pytest.raises(MeshFailure, match="the zygote is gone"):
        mesh.call(os.getpid)
    assert len(mesh.initialized.get(SOON).failed()) == 1


def test_calls_that_are_under_way_when_the_mesh_is_stopped_end_with_it(make_mesh: MakeMesh, tmp_path: Path) -> None:
    mesh = make_mesh(1, 2)
    pids(mesh)
    calls = [mesh.call(wait_for, str(tmp_path / "never")) for _ in range(3)]
    mesh.stop(grace=0.1)
    for call in calls:
        assert all("was stopped" in str(error) or "killed" in str(error) for _, error in call.get(SOON).failed())


CLIENT = """
import os, sys, time
from slurm_ft import Allocation
mesh = Allocation.local(hosts=2).processes(per_host={"gpu": 2})
mesh.broadcast(time.sleep, 600)
mesh.slice(host=0).call(os.getpid)
mesh.initialized.get(30).check()
print(mesh.folder, flush=True)
"""


@pytest.mark.parametrize("end", ["time.sleep(600)", "raise SystemExit(3)"])
def test_nothing_is_left_of_a_client_that_is_killed_or_just_ends(end: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT + end], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as client:
        assert client.stdout is not None
        folder = client.stdout.readline().strip()
        assert folder
        if "sleep" in end:
            assert len(members(f"{folder}#")) >= 8
            client.kill()
        client.wait(SOON)
    wait_until(lambda: not members(f"{folder}#"), SOON)
    wait_until(lambda: not Path(folder).exists(), SOON)


FORGETFUL = """
import gc, sys
from slurm_ft import Allocation
mesh = Allocation.local(hosts=1).processes(folder=sys.argv[1])
mesh.initialized.get(30).check()
print(mesh.folder)
del mesh
gc.collect()
"""


def test_a_mesh_that_nobody_holds_any_more_is_stopped_with_its_client(tmp_path: Path) -> None:
    out = subprocess.run(
        [sys.executable, "-c", FORGETFUL, str(tmp_path)], stdout=subprocess.PIPE, text=True, timeout=60, check=True
    ).stdout
    (folder,) = tmp_path.iterdir()
    assert out == f"{folder}\n"
    assert not (folder / "secret").exists() and members(f"{folder}#") == []


def test_a_client_that_was_only_stopped_has_its_mesh_again(tmp_path: Path) -> None:
    """Its hosts took it for dead and have left. Calls that were on their way to them fail; the next ones wait."""
    then = """
sys.stdin.readline()
while (values := mesh.call(os.getpid).get(60)).failed():
    print(values.failed()[0][1], file=sys.stderr)
print(values.size, flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT + then],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as client:
        assert client.stdin is not None and client.stdout is not None
        folder = client.stdout.readline().strip()
        client.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: not members(f"{folder}#"), 2 * SOON)
            assert Path(folder).exists()
        finally:
            client.send_signal(signal.SIGCONT)
        client.stdin.write("\n")
        client.stdin.flush()
        assert client.stdout.readline() == "4\n"
        client.wait(SOON)
    wait_until(lambda: not members(f"{folder}#"), SOON)
    wait_until(lambda: not Path(folder).exists(), SOON)


def test_the_keys_are_the_owners_alone_and_nobody_gets_in_without_them(make_mesh: MakeMesh, tmp_path: Path) -> None:
    import zmq

    mesh = make_mesh(1, 1)
    pids(mesh)
    secret = mesh.folder / "secret"
    assert secret.stat().st_mode & 0o077 == 0
    endpoint_of_mesh = (secret / "endpoint").read_text()
    marker = tmp_path / "came-through"

    class Evil:
        def __reduce__(self) -> object:
            return marker.touch, ()

    import pickle

    with zmq.Context() as ctx, ctx.socket(zmq.DEALER) as plain, ctx.socket(zmq.DEALER) as stranger:
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.curve_serverkey = next(
            line.split('"')[1].encode()
            for line in (secret / "controller.key").read_text().splitlines()
            if "public-key" in line
        )
        for socket in (plain, stranger):
            socket.setsockopt(zmq.LINGER, 0)
            monitor = socket.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
                | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED
            )  # fmt: skip
            socket.connect(endpoint_of_mesh)
            socket.send_multipart([b'{"k": "rs", "rs": [{"i": 1, "local": 0}]}', pickle.dumps(Evil())])
            assert monitor.poll(10_000)
            assert int.from_bytes(monitor.recv_multipart()[0][:2], sys.byteorder) != zmq.EVENT_HANDSHAKE_SUCCEEDED
            socket.disable_monitor()
            monitor.close()
    assert pids(mesh) and not marker.exists()


def test_two_hosts_lost_at_once_and_one_spare_is_one_repair_and_one_failure(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(3, 2, spares=1, policy=NO_RESTARTS)
    before = pids(mesh)
    for victim in {host_process(pid) for pid in before}:
        kill(victim)
    wait_until(lambda: mesh.generation and "failed" in list(mesh.states().values()), SOON)
    wait_until(lambda: sorted(set(mesh.states().values())) == ["failed", "up"], SOON)
    states = [mesh.slice(host=host).states() for host in (0, 1)]
    good = next(host for host, state in enumerate(states) if set(state.values()) == {"up"})
    assert list(mesh.slice(host=good).call(lambda: context().host).get(SOON).values()) == ["local2"] * 2
    with pytest.raises(MeshFailure):
        mesh.call(os.getpid)


def test_a_restart_that_was_asked_for_uses_up_no_budget(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(1, 2, policy=Policy(in_place=Budget(1, 600.0), step=Budget(0, 600.0)))
    pids(mesh)
    for _ in range(3):
        mesh.slice(gpu=0).restart().get(SOON).check()
    before = pids(mesh)
    kill(before[0])
    wait_until(lambda: mesh.states().flatten("rank").item(rank=0) == "up" and mesh.generation == 4, SOON)
    assert pids(mesh)[1] == before[1]


def test_a_slice_restarted_again_and_again_while_it_comes_up_is_up_in_the_end(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(1, 3)
    before = pids(mesh)
    futures = [mesh.slice(gpu=slice(0, 2)).restart() for _ in range(3)]
    for future in futures:
        future.get(SOON).check()
    after = pids(mesh)
    assert after[2] == before[2] and not set(after[:2]) & set(before)
    assert mesh.call(os.getpid).get(SOON).check()
