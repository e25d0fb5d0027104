"""An agent with real ranks, told what to do by a test in the controller's place."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_ft.agent.address import PORTS, address_towards, free_port
from slurm_ft.agent.ends import tail
from slurm_ft.channel import Message, Server, make_keys
from slurm_ft.hostspec import HostSpec
from slurm_ft.paths import RunPaths, write_json
from slurm_ft.spec import Policy, ReplicaSpec, RunSpec
from tests.waiting import until

SLEEP = ("sh", "-c", "echo runs; exec sleep 60")
POLICY = Policy(kill_grace=0.5, orphan_timeout=60.0)
PAUSE = 2.5


class Controller:
    """What a controller does, one message at a time, and the agent that obeys it."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.heard: list[Message] = []
        self.server = Server(paths, "127.0.0.1")
        self.answers = True
        argv = ["--run-dir", paths.root, "--replica=1", "--step=2", "--hosts=here", "--host=here"]
        self.agent = subprocess.Popen([sys.executable, "-m", "slurm_ft.agent.main", *argv])

    async def listen(self) -> None:
        async for peer, message in self.server.messages():
            self.peer = peer
            self.heard.append(message)
            if message["type"] == "alive" and self.answers:
                self.tell("alive")

    def tell(self, kind: str, /, **fields: Any) -> None:
        self.server.send(self.peer, {"type": kind, **fields})

    def start(self, attempt: int = 1) -> None:
        self.tell("start", attempt=attempt, first_host="127.0.0.1", port=23456)

    def clear(self, attempt: int = 1, stacks: bool = False) -> None:
        self.tell("clear", attempt=attempt, grace=0.5, stacks=stacks)

    def inject(self, kind: str, rank: int = 0) -> None:
        self.tell("inject", id="i", rank=rank, kind=kind)

    async def said(self, kind: str, count: int = 1) -> Message:
        await until(lambda: len(self.all(kind)) >= count, what=f"{count} {kind} of {self.heard}")
        return self.all(kind)[count - 1]

    def all(self, kind: str) -> list[Message]:
        return [message for message in self.heard if message["type"] == kind]

    async def runs(self, attempt: int = 1) -> None:
        """Return when the rank's program has said so in its log."""
        log = self.paths.rank_log(1, attempt, 0)
        await until(lambda: log.exists() and log.read_text().startswith("runs\n"))

    async def left(self) -> int:
        return int(await until(lambda: self.agent.poll() is not None and f"{self.agent.returncode}"))


def with_agent(
    folder: Path,
    story: Callable[[Controller], Awaitable[None]],
    command: tuple[str, ...] = SLEEP,
    ranks: int = 1,
    policy: Policy = POLICY,
    host: HostSpec | None = None,
    begins: str = "hello",
    keeper: str = "off",
) -> int:
    """The agent's exit code after the story; it is told to leave when it has not left by then."""
    paths = RunPaths(folder / "run")
    paths.create()
    make_keys(paths)
    replica = ReplicaSpec(command, 1, ranks, keeper=keeper)
    spec = RunSpec("x", replica, replicas=3, cluster="local", policy=policy, host=host or HostSpec())
    write_json(paths.spec, spec.to_json())

    async def within() -> int:
        async with asyncio.timeout(30):
            controller = Controller(paths)
            listening = asyncio.ensure_future(controller.listen())
            try:
                await controller.said(begins)
                await story(controller)
                controller.tell("shutdown", grace=0.1)
                return await controller.left()
            finally:
                controller.agent.kill()
                controller.agent.wait()
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)
                controller.server.close()

    return asyncio.run(within())


def test_it_says_who_and_where_it_is(tmp_path: Path) -> None:
    async def story(controller: Controller) -> None:
        hello = await controller.said("hello")
        names = ("replica", "index", "step", "host", "address", "attempt", "first", "agent_pid")
        assert [hello[name] for name in names] == [1, 0, 2, "here", "127.0.0.1", 0, 1, controller.agent.pid]
        assert hello["port"] in PORTS

    assert with_agent(tmp_path, story) == 0


def test_ranks_that_end_well_are_told_and_a_failure_with_all_that_is_known_of_it(tmp_path: Path) -> None:
    script = 'if [ $RANK = 0 ]; then exit 0; fi; echo "the last words"; sleep 0.01; exit 3'

    async def story(controller: Controller) -> None:
        controller.start()
        assert (await controller.said("rank_done"))["rank"] == 0
        failed = await controller.said("rank_failed")
        expected = {"attempt": 1, "rank": 1, "host": "here", "code": 3, "signal": None, "traceback": "the last words",
                    "what": "rank 1 exited with code 3", "log": str(controller.paths.rank_log(1, 1, 1))}  # fmt: skip
        assert failed.items() >= expected.items()
        assert 0 <= failed["age"] < 5

    with_agent(tmp_path, story, ("sh", "-c", script), ranks=2)


def test_a_traceback_comes_from_the_error_file_and_its_message_is_part_of_what_happened(tmp_path: Path) -> None:
    async def story(controller: Controller) -> None:
        controller.start()
        failed = await controller.said("rank_failed")
        assert failed["what"] == "rank 0 exited with code 1: ValueError: no such data"
        assert failed["traceback"].startswith("Traceback")
        assert failed["traceback"].rstrip().endswith("ValueError: no such data")

    with_agent(tmp_path, story, (sys.executable, "-c", "raise ValueError('no such data')"))


def test_an_attempt_that_is_started_twice_is_started_once(tmp_path: Path) -> None:
    async def story(controller: Controller) -> None:
        controller.start()
        controller.start()
        await controller.runs()
        controller.tell("who")
        assert (await controller.said("hello", 2))["attempt"] == 1

    with_agent(tmp_path, story)
    assert (tmp_path / "run/replicas/1/attempt_1/0.log").read_text() == "runs\n"


def test_cleared_ranks_are_not_failures_and_the_next_attempt_has_another_port(tmp_path: Path) -> None:
    async def story(controller: Controller) -> None:
        controller.start()
        await controller.runs()
        controller.clear()
        cleared = await controller.said("cleared")
        assert (cleared["attempt"], cleared["index"]) == (1, 0)
        assert cleared["port"] in PORTS
        controller.start(2)
        await controller.runs(2)
        assert not controller.all("rank_failed")

    with_agent(tmp_path, story)


@pytest.mark.parametrize("stacks", [False, True])
def test_a_late_word_to_clear_does_not_touch_the_next_attempt(tmp_path: Path, stacks: bool) -> None:
    """A restarted controller may say it twice, and the second one may come with the word to start."""

    async def story(controller: Controller) -> None:
        controller.start()
        await controller.runs()
        controller.clear()
        await controller.said("cleared")
        controller.clear(stacks=stacks)
        controller.start(2)
        controller.inject("term")  # what comes after both has been done
        assert (await controller.said("injected"))["error"] == ""
        assert (await controller.said("rank_failed"))["attempt"] == 2

    with_agent(tmp_path, story)


def test_a_controller_that_was_started_again_is_told_all_that_no_other_has_acknowledged(tmp_path: Path) -> None:
    async def story(controller: Controller) -> None:
        controller.start()
        end = await controller.said("rank_failed")
        controller.tell("who")
        assert (await controller.said("hello", 2))["first"] == 1
        again = await controller.said("rank_failed", 2)
        assert (again["n"], again["rank"], again["attempt"]) == (1, 0, 1) and again["age"] > end["age"]
        controller.tell("alive", got=1)
        controller.tell("who")
        assert (await controller.said("hello", 3))["first"] == 2
        assert len(controller.all("rank_failed")) == 2


def test_it_obeys_the_highest_epoch_alone_and_says_so(tmp_path: Path) -> None:
    async def story(controller: Controller) -> None:
        controller.tell("alive", epoch=3)
        controller.tell("shutdown", epoch=2, grace=0.1)
        assert (await controller.said("deposed"))["epoch"] == 3
        controller.start()  # from a controller that knows of no epochs at all
        await controller.said("deposed", 2)
        controller.tell("start", epoch=3, attempt=1, first_host="127.0.0.1", port=23456)
        await controller.runs()
        controller.server._stamp = {"epoch": 3}

    assert with_agent(tmp_path, story) == 0

    with_agent(tmp_path, story, ("false",))


@pytest.mark.parametrize(
    ("kind", "rank", "error", "what"),
    [
        ("kill", 0, "", "rank 0 was killed by SIGKILL"),
        ("segv", 0, "", "rank 0 was killed by SIGSEGV"),
        ("kill", 7, "rank 7 is not running", ""),
        ("poke", 0, "the kind `poke` is unknown", ""),
        ("exit:3", 0, "rank 0 is no observed Python program; use kill, term or segv", ""),
    ],
)
def test_a_rank_is_hurt_as_asked_or_it_is_said_why_not(
    tmp_path: Path, kind: str, rank: int, error: str, what: str
) -> None:
    async def story(controller: Controller) -> None:
        controller.start()
        await controller.runs()
        controller.inject(kind, rank)
        answer = await controller.said("injected")
        assert (answer["id"], answer["kind"], answer["rank"], answer["error"]) == ("i", kind, rank, error)
        if what:
            failed = await controller.said("rank_failed")
            assert (failed["what"], failed["injected"]) == (what, True)

    with_agent(tmp_path, story)


def test_an_attempt_that_is_cleared_before_its_logs_can_be_opened_does_not_start(tmp_path: Path) -> None:
    log = tmp_path / "run/replicas/1/attempt_1/0.log"
    log.parent.mkdir(parents=True)
    os.mkfifo(log)  # whoever opens it for writing waits

    async def story(controller: Controller) -> None:
        controller.start()
        controller.clear()
        await controller.said("cleared")
        reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
        controller.inject("kill")  # waits until it is known whether the ranks are to start
        assert (await controller.said("injected"))["error"] == "rank 0 is not running"
        os.close(reader)

    with_agent(tmp_path, story)


def test_told_to_leave_it_ends_its_ranks_first_and_says_so(tmp_path: Path) -> None:
    async def story(controller: Controller) -> None:
        controller.start()
        await controller.runs()
        controller.tell("shutdown", grace=5.0)
        await controller.said("leaving")
        assert not controller.all("rank_failed")

    script = "trap 'echo saved; exit 0' TERM; echo runs; while :; do sleep 0.01; done"
    assert with_agent(tmp_path, story, ("sh", "-c", script)) == 0
    assert (tmp_path / "run/replicas/1/attempt_1/0.log").read_text() == "runs\nsaved\n"


def test_a_signal_of_slurms_ends_the_ranks_in_order(tmp_path: Path) -> None:
    async def story(controller: Controller) -> None:
        controller.start()
        await controller.runs()
        controller.agent.terminate()
        assert (await controller.said("leaving"))["code"] == 143

    assert with_agent(tmp_path, story) == 143


def test_without_any_controller_it_leaves_after_orphan_timeout(tmp_path: Path) -> None:
    async def story(controller: Controller) -> None:
        controller.start()
        await controller.runs()
        controller.answers = False
        await controller.said("leaving")

    assert with_agent(tmp_path, story, policy=Policy(kill_grace=0.1, orphan_timeout=3.0)) == 1


def test_a_controller_that_is_heard_again_after_a_pause_of_the_whole_job_keeps_its_agents(tmp_path: Path) -> None:
    """As after scontrol suspend and resume: for the agent, its own silence and the controller's are alike."""

    async def story(controller: Controller) -> None:
        controller.start()
        await controller.runs()
        os.kill(controller.agent.pid, signal.SIGSTOP)
        at = time.monotonic()
        await until(lambda: time.monotonic() - at > PAUSE)  # longer than its orphan_timeout
        heard = len(controller.all("alive"))
        os.kill(controller.agent.pid, signal.SIGCONT)
        await controller.said("alive", heard + 5)
        assert not controller.all("leaving")

    assert with_agent(tmp_path, story, policy=Policy(kill_grace=0.1, orphan_timeout=PAUSE - 0.5)) == 0


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_warning_that_slurm_sends_to_all_steps_ends_no_agent(tmp_path: Path, number: signal.Signals) -> None:
    async def story(controller: Controller) -> None:
        controller.start()
        await controller.runs()
        os.kill(controller.agent.pid, number)
        controller.clear()
        await controller.said("cleared")

    assert with_agent(tmp_path, story) == 0


def test_a_rank_whose_zygote_still_imports_is_hurt_once_it_is_there(tmp_path: Path) -> None:
    packages, gate = tmp_path / "packages", tmp_path / "gate"
    packages.mkdir()
    os.mkfifo(gate)
    (packages / "tokenizers.py").write_text(f"open({str(gate)!r}).read()")
    program = tmp_path / "program.py"
    program.write_text("import tokenizers, time\nprint('runs', flush=True)\ntime.sleep(60)\n")

    async def story(controller: Controller) -> None:
        controller.start()
        controller.inject("kill")
        await controller.said("alive", len(controller.all("alive")) + 2)
        assert not controller.all("injected")
        with open(os.open(gate, os.O_WRONLY), "w"):
            pass
        assert (await controller.said("injected"))["error"] == ""
        assert (await controller.said("rank_failed"))["injected"] is True

    with_environment = pytest.MonkeyPatch()
    with_environment.setenv("PYTHONPATH", f"{packages}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"))
    try:
        with_agent(tmp_path, story, (sys.executable, str(program)))
    finally:
        with_environment.undo()


def sick(folder: Path) -> HostSpec:
    """A check that fails while the folder holds a file `sick`."""
    return HostSpec(health_check=f"test ! -e {folder}/sick || {{ echo ERROR: $SLURM_FT_HOST is sick; exit 1; }}")


def test_an_agent_on_an_unfit_host_says_so_starts_nothing_and_leaves_as_a_failed_launch(tmp_path: Path) -> None:
    (tmp_path / "sick").touch()

    async def story(controller: Controller) -> None:
        unfit = await controller.said("unfit")
        names = ("replica", "step", "index", "host", "what")
        assert [unfit[name] for name in names] == [1, 2, 0, "here", "here is sick"]
        await controller.said("leaving")
        assert not controller.all("hello")

    policy = Policy(agent_timeout=2.0)
    assert with_agent(tmp_path, story, policy=policy, host=sick(tmp_path), begins="unfit") == 97


def test_a_health_check_knows_what_the_hosts_keeper_may_hold(tmp_path: Path) -> None:
    async def story(controller: Controller) -> None:
        await controller.said("hello")

    check = HostSpec(health_check='test "$SLURM_FT_KEEPER_MODE" = live')
    policy = Policy(kill_grace=0.5, agent_timeout=10.0)
    assert with_agent(tmp_path, story, policy=policy, host=check, keeper="live") == 0


def test_a_host_is_checked_again_before_a_broken_replica_starts_there(tmp_path: Path) -> None:
    async def story(controller: Controller) -> None:
        controller.start()
        await controller.runs()
        controller.clear()
        await controller.said("cleared")
        controller.start(2)
        await controller.runs(2)
        (tmp_path / "sick").touch()
        controller.clear(2)
        await controller.said("unfit")
        await controller.said("leaving")
        assert len(controller.all("cleared")) == 1

    assert with_agent(tmp_path, story, policy=Policy(kill_grace=0.5, agent_timeout=2.0), host=sick(tmp_path)) == 97


def test_ranks_run_on_the_cpus_next_to_their_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for nvidia-smi; the CPUs and the ranks are real."""
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        pytest.skip("this machine has one CPU")
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 00000000:C1:00.0, GPU, 100, 0\necho 00000000:C2:00.0, GPU, 100, 0\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    async def story(controller: Controller) -> None:
        controller.start()
        await controller.said("rank_done", 2)

    show = ("sh", "-c", "grep Cpus_allowed_list /proc/self/status | cut -f2")
    with_agent(tmp_path, story, show, ranks=2, host=HostSpec(gpu_cpus=f"{cpus[1]} {cpus[0]}"))
    logs = [(tmp_path / f"run/replicas/1/attempt_1/{rank}.log").read_text() for rank in (0, 1)]
    assert logs == [f"{cpus[1]}\n", f"{cpus[0]}\n"]


def test_an_agent_on_a_host_that_is_not_its_replicas_says_so() -> None:
    argv = [sys.executable, "-m", "slurm_ft.agent.main", "--run-dir=/x", "--replica=0", "--step=1", "--hosts=node[1-2]"]
    out = subprocess.run([*argv, "--host=node9"], capture_output=True, text=True, timeout=20)
    assert out.returncode == 2
    assert "this host is node9, which is not in node[1-2]" in out.stderr


# --- small parts -------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr("slurm_ft.agent.address.PORTS", range(port, port + 1))
        with pytest.raises(OSError, match="no port"):
            free_port()


def test_ports_lie_below_those_that_the_kernel_gives_away_by_itself() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(PORTS) < max(low, 32_768)
    assert free_port() in PORTS


def test_our_address_is_the_one_on_the_way_to_the_controller() -> None:
    assert address_towards("tcp://127.0.0.1:4711") == "127.0.0.1"


def test_the_tail_of_a_log_is_its_last_lines_whatever_is_in_it(tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    log.write_bytes(b"x" * 100_000 + b"\xff\n" + b"".join(b"line %d\n" % number for number in range(100)))
    assert tail(log).splitlines() == [f"line {number}" for number in range(80, 100)]
    assert tail(tmp_path / "none") == ""
