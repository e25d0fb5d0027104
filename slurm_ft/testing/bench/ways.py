"""The ways to keep the benchmark's trainer alive: slurm-ft's own, and those of others.

Each way says why it cannot run here (`missing`), or starts a run. A run can be asked for the process of a
replica, and can be ended. Rivals get the settings that were best for them: the same Lighthouse as slurm-ft's
where they use torchft, a monitor interval of 0.1 s, polling every 0.2 s, no check of names on loopback.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_ft import events
from slurm_ft.events import Event, Kind
from slurm_ft.spec import Lighthouse
from slurm_ft.testing.bench import log
from slurm_ft.testing.devcluster import DevCluster

HERE = Path(__file__).parent
TRAINER = str(HERE / "trainer.py")
BIN = Path(sys.executable).parent
LIGHTHOUSE_SECONDS = 30.0
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{BIN}:{os.environ['PATH']}",
    "PYTHONPATH": f"{HERE.parents[2]}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "RUST_LOG": "error",
    "PYTHONUNBUFFERED": "1",
    # torch asks for the name of each address that it connects to; a nameserver that loses one question in 30,
    # as this machine's does, would cost 5 s whomever it hits.
    "RES_OPTIONS": "timeout:1 attempts:1",
    # Faster steps and faster ends for everybody; slurm-ft sets it by itself.
    "THP_MEM_ALLOC_ENABLE": "1",
    # torch 2.13 keeps one store over all restarts of torchrun, and a restarted gloo reads the addresses of the
    # dead group there (pytorch #135712): without this switch no restart ever comes up.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


@dataclass(frozen=True)
class Setting:
    """What is trained. `steps` ends the run; `pace` is the least duration of a step in seconds; `slow_files` are
    milliseconds (see below)."""

    size: str
    algorithm: str
    steps: int
    sync: int
    pace: float
    replicas: int
    slow_files: float = 0.0

    def arguments(self, kind: str, out: Path) -> list[str]:
        return [
            kind, "--out", str(out), "--size", self.size, "--algorithm", self.algorithm,
            "--steps", str(self.steps), "--sync", str(self.sync), "--pace", str(self.pace),
        ]  # fmt: skip


def slow_files(milliseconds: float) -> list[str]:
    """What to put before a command so that each `open` and `stat` in it and its children takes so much longer, as
    in a folder that comes over a network and is asked about each file: strace, which can delay system calls."""
    if not milliseconds:
        return []
    calls = "openat,newfstatat"
    delay = f"inject={calls}:delay_enter={int(milliseconds * 1000)}"
    return ["strace", "-D", "-f", "--seccomp-bpf", "-qqq", "-o", "/dev/null", "-e", f"trace={calls}", "-e", delay]


class Run:
    """A run under way: a process that looks after it, its words with the time they came, its log."""

    def __init__(self, folder: Path, setting: Setting, command: list[str], **environment: str) -> None:
        self.folder, self.setting, self.out = folder, setting, folder / "log"
        self.words: list[tuple[float, str]] = []
        self._process = subprocess.Popen(
            [*slow_files(setting.slow_files), *command],
            env={**ENVIRONMENT, **environment}, cwd=folder, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._others: list[subprocess.Popen[Any]] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.words.append((time.monotonic(), line.rstrip()))

    def lines(self) -> list[log.Line]:
        return log.read(self.out)

    @property
    def over(self) -> bool:
        return self._process.poll() is not None

    def tail(self) -> str:
        return "\n".join(words for _, words in self.words[-15:])

    def victim(self, replica: int) -> int:
        """The process that trains this replica now. Raises LookupError when none does."""
        pids = [line.pid for line in self.lines() if line.replica == replica]
        if not pids or not Path(f"/proc/{pids[-1]}").exists():
            raise LookupError(f"replica {replica} has no process")
        return pids[-1]

    def kill(self, replica: int) -> None:
        os.kill(self.victim(replica), signal.SIGKILL)

    def detected(self, replica: int, killed: float) -> float | None:
        """Seconds from the kill to the first word of it; None when this way says nothing."""
        words = re.compile(r"failed \(exitcode|detected replica")
        return next((t - killed for t, line in self.words if t >= killed and words.search(line)), None)

    def end(self) -> None:
        for process in [self._process, *self._others]:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        for pid in {line.pid for line in self.lines()}:
            _kill_if_ours(pid)


def _kill_if_ours(pid: int) -> None:
    try:
        if b"trainer.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    except OSError:
        pass


# --- slurm-ft ----------------------------------------------------------------------------------------------


class OwnRun(Run):
    """A run of slurm-ft; `hurt` breaks a replica in the way that leads to the rung that is measured."""

    hurt: Callable[[OwnRun, int], None] | None = None
    cluster: DevCluster | None = None

    def end(self) -> None:
        if self.cluster is not None and not self.over:  # the end of `submit` is not the end of its job
            environ = self.cluster.environ
            subprocess.run(["scancel", "--full", f"--user={os.getuid()}"], env=environ, check=False)
            give_up = time.monotonic() + 30
            while subprocess.run(["squeue", "-h"], env=environ, capture_output=True).stdout.strip():
                if time.monotonic() > give_up:
                    break
                time.sleep(0.1)
        super().end()

    def events(self, kind: Kind, replica: int) -> list[Event]:
        found = events.read(self.folder / "run" / "events.jsonl")
        return [event for event in found if event.kind is kind and event.replica == replica]

    def kill(self, replica: int) -> None:
        if self.hurt is None:
            super().kill(replica)
        else:
            self.hurt(self, replica)

    def detected(self, replica: int, killed: float) -> float | None:
        at = time.time() - time.monotonic() + killed
        kinds = (Kind.RANK_FAILED, Kind.STEP_EXITED, Kind.AGENT_LOST)
        times = [event.t - at for kind in kinds for event in self.events(kind, replica) if event.t > at - 0.05]
        return max(min(times), 0.0) if times else None


@dataclass
class World:
    """What the ways stand on: a folder, and the devcluster where Slurm is installed. `spares`: its hosts beyond
    one for each replica."""

    folder: Path
    spares: int = 1
    cluster: DevCluster | None = None
    why_no_cluster: str = ""
    count: int = 0

    def place(self) -> Path:
        self.count += 1
        place = self.folder / f"r{self.count}"
        place.mkdir()
        return place


def torchft_missing() -> str:
    """'' when this Python has torchft, which the trainer imports for every way."""
    return "" if importlib.util.find_spec("torchft") else "no torchft: pip install '/path/to/slurm-ft[train]'"


@dataclass(frozen=True)
class Way:
    """One way. `start` begins a run; `missing` gives the reason why it cannot, or ''. `needs_slurm`: not
    without a cluster. A way that is `own` is one of slurm-ft's."""

    name: str
    start: Callable[[World, Setting], Run]
    missing: Callable[[], str] = torchft_missing
    needs_slurm: bool = False
    own: bool = False


def _own(*options: str, hurt: Callable[[OwnRun, int], None] | None = None) -> Callable[[World, Setting], Run]:
    def start(world: World, setting: Setting) -> Run:
        folder = world.place()
        common = ["--replicas", str(setting.replicas), "--run-dir", str(folder / "run"), *options]
        # Benchmarks break a replica more often than a budget allows for.
        common += ["--restarts-in-place", "1000", "--restarts-by-step", "1000"]
        program = ["--", "python", TRAINER, *setting.arguments("torchft", folder / "log"), "--ours"]
        if world.cluster is None:
            run = OwnRun(folder, setting, ["slurm-ft", "run", "--cluster", "local", *common, *program])
        else:
            submit = ["slurm-ft", "submit", "--local-run-dir", "--runs", str(folder / "runs"), "--time", "30"]
            run = OwnRun(folder, setting, [*submit, *common, *program], **_cluster_only(world.cluster))
        run.hurt, run.cluster = hurt, world.cluster
        return run

    return start


def _cluster_only(cluster: DevCluster) -> dict[str, str]:
    return {name: value for name, value in cluster.environ.items() if os.environ.get(name) != value and name != "PATH"}


def _kill_agent(run: OwnRun, replica: int) -> None:
    os.kill(int(run.events(Kind.AGENT_JOINED, replica)[-1].data["agent_pid"]), signal.SIGKILL)


def _kill_host(run: OwnRun, replica: int) -> None:
    assert run.cluster is not None
    run.cluster.kill_host(str(run.events(Kind.AGENT_JOINED, replica)[-1].data["host"]))


def _start_with_spares(world: World, setting: Setting) -> Run:
    return _own("--spares", str(world.spares), hurt=_kill_host)(world, setting)


def keeper_missing() -> str:
    """'' when this slurm-ft has a keeper to choose."""
    if why := torchft_missing():
        return why
    words = subprocess.run(["slurm-ft", "run", "--help"], env=ENVIRONMENT, capture_output=True, text=True).stdout
    return "" if "--keeper" in words else "this slurm-ft has no keeper (`slurm-ft run --help` has no --keeper)"


# --- rivals ------------------------------------------------------------------------------------------------


def start_lighthouse(folder: Path) -> tuple[subprocess.Popen[Any], str]:
    """A Lighthouse with slurm-ft's settings; its process and address. Raises RuntimeError, and leaves no process, when
    it does not come up."""
    file, settings = folder / "lighthouse", Lighthouse()
    command = [
        sys.executable, "-m", "slurm_ft.controller.lighthouse", "--host", "127.0.0.1", "--address-file", str(file),
        "--events", str(folder / "events.jsonl"), "--min-replicas", "1",
        "--join-timeout-ms", str(settings.join_timeout_ms),
        "--quorum-tick-ms", str(settings.quorum_tick_ms),
        "--heartbeat-timeout-ms", str(settings.heartbeat_timeout_ms),
    ]  # fmt: skip
    process = subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True)
    with _killed_on_error(process):
        give_up = time.monotonic() + LIGHTHOUSE_SECONDS
        while not (file.exists() and file.read_text()):
            if time.monotonic() > give_up or process.poll() is not None:
                raise RuntimeError("the Lighthouse did not come up")
            time.sleep(0.02)
        return process, file.read_text().strip()


@contextmanager
def _killed_on_error(process: subprocess.Popen[Any]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        process.kill()
        process.wait()
        raise


def run_beside_lighthouse(folder: Path, setting: Setting, command: list[str], **environment: str) -> Run:
    """A run with a Lighthouse of its own, which ends with it."""
    lighthouse, address = start_lighthouse(folder)
    with _killed_on_error(lighthouse):
        run = Run(folder, setting, command, TORCHFT_LIGHTHOUSE=address, **environment)
    run._others.append(lighthouse)
    return run


def start_torchft_on_slurm(world: World, setting: Setting) -> Run:
    assert world.cluster is not None
    folder = world.place()
    task = {"replicas": setting.replicas, "trainer": [TRAINER, *setting.arguments("torchft", folder / "log")]}
    (folder / "task.json").write_text(json.dumps(task))
    command = [sys.executable, str(HERE / "slurm_runner.py"), str(folder)]
    return run_beside_lighthouse(folder, setting, command, **_cluster_only(world.cluster))


def start_torchrun(world: World, setting: Setting) -> Run:
    folder = world.place()
    options = ["--standalone", "--nproc-per-node", str(setting.replicas), "--max-restarts", "1000"]
    program = [TRAINER, *setting.arguments("static", folder / "log"), "--checkpoint", str(folder / "checkpoint")]
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    return Run(folder, setting, [*torchrun, *options, "--monitor-interval", "0.1", *program])


def ft_launcher() -> str | None:
    """nvidia-resiliency-ext's launcher: NVRX_PYTHON names the Python of its environment, else this one's."""
    python = os.environ.get("NVRX_PYTHON")
    return shutil.which(str(Path(python).with_name("ft_launcher"))) if python else shutil.which("ft_launcher")


def nvrx_missing() -> str:
    if not ft_launcher():
        return "no ft_launcher: pip install nvidia-resiliency-ext, or set NVRX_PYTHON"
    return "" if "NVRX_PYTHON" in os.environ else torchft_missing()


def start_nvrx(world: World, setting: Setting) -> Run:
    folder = world.place()
    (folder / "ft.yaml").write_text("fault_tolerance:\n  initial_rank_heartbeat_timeout: null\n")
    options = ["--nnodes", "1", "--nproc-per-node", str(setting.replicas), "--max-restarts", "1000"]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--monitor-interval", "0.1"]
    program = [TRAINER, *setting.arguments("static", folder / "log"), "--checkpoint", str(folder / "checkpoint")]
    return Run(folder, setting, [str(ft_launcher()), *options, "--ignore-missing-fault-tol-cfg", *program])


def monarch_python() -> str:
    return os.environ.get("MONARCH_PYTHON", sys.executable)


def monarch_missing() -> str:
    if "MONARCH_PYTHON" in os.environ:
        return "" if Path(monarch_python()).exists() else "MONARCH_PYTHON is no file"
    found = importlib.util.find_spec("monarch")
    if not found:
        return "no Monarch: pip install torchmonarch==0.7.0, or set MONARCH_PYTHON to its Python"
    return torchft_missing()


def start_monarch(world: World, setting: Setting) -> Run:
    folder = world.place()
    task = {"replicas": setting.replicas, "trainer": setting.arguments("torchft", folder / "log")}
    (folder / "task.json").write_text(json.dumps(task))
    command = [monarch_python(), str(HERE / "monarch_runner.py"), str(folder)]
    # Its default asks every 10 s whether a process lives; 0.1 s is the best that was seen to work.
    tuned = {"HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "100ms"}
    return run_beside_lighthouse(folder, setting, command, **tuned)


WAYS = (
    Way("slurm-ft in place, keeper live", _own("--keeper", "live"), keeper_missing, own=True),
    Way("slurm-ft in place, keeper snapshot", _own("--keeper", "snapshot"), keeper_missing, own=True),
    Way("slurm-ft in place, peer", _own(), own=True),
    Way("slurm-ft in place, peer, --no-zygote", _own("--no-zygote"), own=True),
    Way("slurm-ft by step (agent killed)", _own(hurt=_kill_agent), own=True),
    Way("slurm-ft spare (host killed)", _start_with_spares, needs_slurm=True, own=True),
    Way("torchft, a Slurm job per replica", start_torchft_on_slurm, needs_slurm=True),
    Way("torchrun --max-restarts", start_torchrun),
    Way("nvidia-resiliency-ext ft_launcher", start_nvrx, nvrx_missing),
    Way("Monarch respawns a mesh", start_monarch, monarch_missing),
)
