"""The head: a small loop that keeps the Lighthouse and the controller alive, and nothing else.

  1. take the run's lock: one head at a time looks after a run;
  2. make the keys of the control channel;
  3. start the Lighthouse, where torchft is installed, and wait for its address;
  4. start the controller; start it again in the same session if it crashes;
  5. hand signals on to the controller, and leave with its exit code, which is the run's;
  6. whatever happens, leave no process of the run on this machine.

Both children get TERM when the head dies, so a killed head ends its run in order instead of leaving it
without anybody to look after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slurm_ft.agent.process import die_with_parent
from slurm_ft.channel import make_keys
from slurm_ft.controller import lighthouse
from slurm_ft.controller.controller import EXIT_CRASHED, SIGNALS
from slurm_ft.errors import LaunchError, RunFailed, RunFolderError, UsageError
from slurm_ft.launch import local
from slurm_ft.launch.base import Watched
from slurm_ft.paths import RunPaths, read_json, write_json
from slurm_ft.slurm.hostlist import compress
from slurm_ft.spec import RunSpec

LIGHTHOUSE_WITHIN = 30.0
LIGHTHOUSE_PAUSE = 30.0
"""Seconds before a Lighthouse that dies again and again is started once more."""
LOCK_WITHIN = 1.0
MOST_CRASHES = 5
CRASH_WINDOW = 300.0


@dataclass(frozen=True)
class Place:
    """Where a run happens: the job, its hosts, this host's name, and the address it is reached by."""

    job_id: str
    hosts: tuple[str, ...]
    host: str
    address: str


def open_run(paths: RunPaths, spec: RunSpec) -> None:
    """Make the run folder, or go on in one that holds the same run.

    Raises RunFolderError when it holds another run: nothing is overwritten.
    """
    paths.create()
    if paths.spec.exists():
        if RunSpec.from_json(read_json(paths.spec)) != spec:
            raise RunFolderError(
                f"the run folder `{paths.root}` holds another run",
                "choose another folder with --run-dir, or repeat that run's options to go on with it",
            )
        return
    write_json(paths.spec, spec.to_json(), 0o600)  # --env may hold secrets


def take_lock(paths: RunPaths, place: Place) -> int:
    """Take the run's lock; gives the descriptor that holds it. Raises UsageError when it is held."""
    descriptor = os.open(paths.lock, os.O_RDWR | os.O_CREAT, 0o644)
    if not _locked(descriptor):
        holder = os.pread(descriptor, 4096, 0).decode(errors="replace")
        os.close(descriptor)
        raise UsageError(f"the run in `{paths.root}` is looked after already, by {_holder(holder)}",
                         "see it with `slurm-ft status`, end it with `slurm-ft stop`")  # fmt: skip
    me = json.dumps({"host": place.host, "pid": os.getpid(), "job_id": place.job_id})
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, me.encode(), 0)
    return descriptor


def _locked(descriptor: int) -> bool:
    """Lock, if that is possible within LOCK_WITHIN: a reader that tries the lock holds it for a moment."""
    give_up = time.monotonic() + LOCK_WITHIN
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > give_up:
                return False
            time.sleep(0.05)
        except OSError as error:
            raise RunFolderError(
                f"the run folder's file system cannot lock files: {error.strerror}",
                "choose a --run-dir on one that can (Lustre needs the mount option flock or localflock)",
            ) from None


def _holder(text: str) -> str:
    try:
        value = json.loads(text)
        return f"process {value['pid']} on {value['host']} (job {value['job_id']})"
    except (ValueError, KeyError, TypeError):
        return "another process"


@contextlib.contextmanager
def _blocked(signals: Iterable[int]) -> Iterator[None]:
    """A child that starts meanwhile gets these signals only once it unblocks them, when it has its handlers;
    one that comes too early waits instead of killing it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Child:
    """A process of the head's that must run: its command line (asked for at each start), its log, and
    when it crashed."""

    def __init__(self, argv: Callable[[], Sequence[str]], log: Path, lock: int) -> None:
        self._argv, self._log, self._lock = argv, log, lock
        self._crashes: list[float] = []
        self._process: subprocess.Popen[bytes] | None = None
        self.watched: Watched | None = None

    def start(self) -> None:
        with open(self._log, "ab") as log, _blocked(SIGNALS):
            # The lock goes with the children: it is held as long as one of them looks after the run.
            self._process = subprocess.Popen(
                self._argv(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                preexec_fn=die_with_parent(os.getpid(), signal.SIGTERM),
                pass_fds=(self._lock,),
            )
        self.watched = Watched(self._process.pid, self._process)

    async def wait(self) -> int:
        assert self.watched is not None
        code = await self.watched.wait()
        assert code is not None
        return code

    @property
    def ended(self) -> bool:
        return self.watched is not None and self.watched.over

    def signal(self, number: int) -> None:
        if self.watched is not None:
            self.watched.signal(number)

    def may_start_again(self) -> bool:
        now = time.monotonic()
        self._crashes = [*(t for t in self._crashes if now - t < CRASH_WINDOW), now]
        return len(self._crashes) <= MOST_CRASHES


class Head:
    """Keeps the children of one run alive."""

    def __init__(self, paths: RunPaths, spec: RunSpec, place: Place, lock: int) -> None:
        session = secrets.token_hex(8)
        self._paths = paths
        self._controller = Child(partial(_controller_argv, paths, place, session), paths.controller_log, lock)
        self._lighthouse = Child(partial(_lighthouse_argv, paths, spec, place), paths.head_log, lock)
        self._with_lighthouse = lighthouse.extension_path() is not None
        self._keeping: asyncio.Task[None] | None = None
        self._asked = 0

    async def run(self) -> int:
        """Look after the run; gives its exit code."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._pass_on, number)
        try:
            self._paths.lighthouse.unlink(missing_ok=True)
            if self._with_lighthouse:
                self._lighthouse.start()
                await self._address()
                self._keeping = asyncio.ensure_future(self._keep_lighthouse())
            return await self._keep_controller()
        finally:
            if self._keeping is not None:
                self._keeping.cancel()
            self._lighthouse.signal(signal.SIGTERM)
            if self._lighthouse.watched is not None:
                await self._lighthouse.wait()

    def _pass_on(self, number: int) -> None:
        self._asked = number
        self._controller.signal(number)

    async def _address(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LIGHTHOUSE_WITHIN):
                while not self._paths.lighthouse.exists() and not self._lighthouse.ended:
                    await asyncio.sleep(0.02)
                if self._paths.lighthouse.exists():
                    return
        raise LaunchError("torchft's Lighthouse did not start", f"see {self._paths.head_log}")

    async def _keep_lighthouse(self) -> None:
        """Start it again, on the same port, when it dies."""
        while True:
            await self._lighthouse.wait()
            if not self._lighthouse.may_start_again():
                print("slurm-ft: the Lighthouse dies again and again", file=sys.stderr)
                await asyncio.sleep(LIGHTHOUSE_PAUSE)
            self._lighthouse.start()

    async def _keep_controller(self) -> int:
        while True:
            self._controller.start()
            if self._asked:  # before there was a controller, or of one that has died since
                self._controller.signal(self._asked)
            code = await self._controller.wait()
            if code >= 0 and code != EXIT_CRASHED:
                return code
            if not self._controller.may_start_again():
                raise RunFailed("the controller crashed again and again", f"see {self._paths.controller_log}")


def _controller_argv(paths: RunPaths, place: Place, session: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "slurm_ft.controller.main",
        f"--run-dir={paths.root}",
        f"--session={session}",
        f"--hosts={compress(place.hosts)}",
        f"--job-id={place.job_id}",
        f"--host={place.host}",
        f"--address={place.address}",
    ]


def _lighthouse_argv(paths: RunPaths, spec: RunSpec, place: Place) -> list[str]:
    """On the port of the Lighthouse before it in this session, if there was one."""
    options = spec.policy.lighthouse
    port = paths.lighthouse.read_text().strip().rpartition(":")[2] if paths.lighthouse.exists() else "0"
    address = f"[{place.address}]" if ":" in place.address else place.address
    return [
        sys.executable,
        "-m",
        "slurm_ft.controller.lighthouse",
        f"--bind={address}:{port}",
        f"--advertise={address}",
        f"--address-file={paths.lighthouse}",
        f"--min-replicas={spec.policy.min_replicas}",
        f"--join-timeout-ms={options.join_timeout_ms}",
        f"--quorum-tick-ms={options.quorum_tick_ms}",
        f"--heartbeat-timeout-ms={options.heartbeat_timeout_ms}",
    ]


def look_after(paths: RunPaths, place: Place) -> int:
    """Look after the run in this folder until it is over; gives its exit code.

    Raises UsageError when somebody else looks after it, LaunchError when it cannot be started.
    """
    spec = RunSpec.from_json(read_json(paths.spec))
    if len(place.hosts) < spec.hosts:
        raise UsageError(
            f"the run needs {spec.hosts} hosts ({spec.replicas} replicas of {spec.replica.hosts}, "
            f"{spec.spares} spares) and the allocation has {len(place.hosts)}",
            "lower --replicas or --spares, or ask Slurm for more nodes",
        )
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited "ignore" would hide how children end
    lock = take_lock(paths, place)
    try:
        make_keys(paths)
        return asyncio.run(Head(paths, spec, place, lock).run())
    finally:
        if spec.cluster == "local":
            local.sweep(paths.root)
        os.close(lock)
