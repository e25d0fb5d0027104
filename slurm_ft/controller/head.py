"""The head: a small loop that keeps the Lighthouse and the controller alive, and nothing else.

  1. hold the run's lease: one head at a time looks after a run;
  2. make the keys of the control channel;
  3. start the Lighthouse, where torchft is installed, and wait for its address;
  4. start the controller; start it again in the same session if it ends before the run does;
  5. hand signals on to the controller, and leave with its exit code, which is the run's;
  6. whatever happens, leave no process of the run on this machine.

Both children get TERM when the head dies, so a killed head ends its run in order instead of leaving it
without anybody to look after it.

When the head's host dies with all of this, an agent starts a head on its own host (slurm_ft/agent/successor.py,
slurm_ft/submit/takeover.py). A head that finds itself deposed, because it was only stopped or cut off, ends its
children, which leave the steps alone. It does not leave by itself: it is the job's batch script, whose end is
the end of the job. It waits for the end of the run and leaves with the run's exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from slurm_ft import lease as leases
from slurm_ft.agent.process import die_with_parent
from slurm_ft.channel import make_keys
from slurm_ft.controller import lighthouse
from slurm_ft.controller.comeback import come_back
from slurm_ft.controller.controller import EXIT_CRASHED, EXIT_DEPOSED, SIGNALS
from slurm_ft.errors import (
    EXIT_FAILED,
    EXIT_TRY_AGAIN,
    LaunchError,
    RunFailed,
    RunFolderError,
    SlurmFTError,
    TryAgain,
    UsageError,
)
from slurm_ft.launch import local
from slurm_ft.launch.base import Watched
from slurm_ft.launch.helper import Allocation
from slurm_ft.launch.session import Session
from slurm_ft.launch.srun import allocation_from
from slurm_ft.lease import RENEW, Deposed, Lease, Watch
from slurm_ft.paths import RunPaths, read_json, write_atomic, write_json
from slurm_ft.slurm.client import JobView, SlurmClient
from slurm_ft.spec import RunSpec

LIGHTHOUSE_WITHIN = 30.0
LIGHTHOUSE_PAUSE = 30.0
"""Seconds before a Lighthouse that dies again and again is started once more."""
LEAVES_WITHIN = 5.0
"""Seconds that a deposed head gives its controller to find out by itself."""
MOST_CRASHES = 5
CRASH_WINDOW = 300.0
LONGEST_PAUSE = 4.0
"""Seconds before a controller that crashes again and again is started once more, at most: in a longer pause another
host would take the run over, which after `head_timeout` it does in any case."""
COMES_WITHIN = 30.0
"""Seconds that a controller has to start and to renew the lease itself; until then the head does."""
ASK_AGAIN = 30.0
"""Seconds until Slurm is asked once more how much time the job has."""
WarnIn = Callable[[], float | None]
"""Gives seconds; None for never. Raises TryAgain when Slurm does not answer."""


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

    def __init__(self, argv: Callable[[], Sequence[str]], log: Path) -> None:
        self._argv, self._log = argv, log
        self._crashes: list[float] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._handed_on: tuple[int, ...] = ()
        self.started = 0.0
        self.watched: Watched | None = None

    def start(self) -> None:
        with open(self._log, "ab") as log, _blocked(SIGNALS):
            self._process = subprocess.Popen(
                self._argv(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                pass_fds=self._handed_on,
                preexec_fn=die_with_parent(os.getpid(), signal.SIGTERM),
            )
        self.started = time.monotonic()
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

    @property
    def pause(self) -> float:
        """Seconds before it is started again: none after the first crash, since ranks wait for it, then more."""
        return min(LONGEST_PAUSE, 2.0 ** (len(self._crashes) - 2)) if len(self._crashes) > 1 else 0.0


class ControllerChild(Child):
    """The controller. It tells the end of the run through a pipe, which needs no file system. Its exit code alone does
    not tell it: Python ends with 1 or 2 when it cannot read a module, as runs do."""

    def __init__(self, paths: RunPaths, place: Place, epoch: int) -> None:
        super().__init__(lambda: _controller_argv(paths, place, epoch, *self._handed_on), paths.controller_log)
        self._last_word = -1

    def start(self) -> None:
        if self._last_word >= 0:
            os.close(self._last_word)
        self._last_word, end = os.pipe()
        os.set_blocking(self._last_word, False)
        self._handed_on = (end,)
        try:
            super().start()
        finally:
            os.close(end)

    def run_ended(self) -> int | None:
        """The exit code of the run, if the controller has said that it is over."""
        with contextlib.suppress(BlockingIOError, ValueError):
            return int(os.read(self._last_word, 16))
        return None


class Head:
    """Keeps the children of one run alive. `warn_in` asks for the seconds until the warning before the time
    limit, for a head that Slurm does not warn."""

    def __init__(self, paths: RunPaths, spec: RunSpec, place: Place, lease: Lease, warn_in: WarnIn) -> None:
        self._paths, self._lease, self._warn_in = paths, lease, warn_in
        self._controller = ControllerChild(paths, place, lease.epoch)
        self._handed_over = False
        """Is the lease renewed by our controller, as long as there is one?"""
        self._lighthouse = Child(lambda: _lighthouse_argv(paths, spec, place, self._last_port), paths.head_log)
        self._with_lighthouse = lighthouse.extension_path() is not None
        self._lighthouse_address = ""
        self._last_port = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._asked = 0

    async def run(self) -> int:
        """Look after the run; gives its exit code. Raises Deposed."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._pass_on, number)
        try:
            self._tasks += [asyncio.ensure_future(work) for work in (self._keep_office(), self._set_alarm())]
            if self._with_lighthouse:
                self._start_lighthouse()
                await self._address()
                self._tasks.append(asyncio.ensure_future(self._keep_lighthouse()))
            else:
                self._paths.lighthouse.unlink(missing_ok=True)
            return await self._keep_controller()
        finally:
            for task in self._tasks:
                task.cancel()
            self._lighthouse.signal(signal.SIGTERM)
            if self._lighthouse.watched is not None:
                await self._lighthouse.wait()

    async def _set_alarm(self) -> None:
        while True:
            try:
                seconds = await asyncio.to_thread(self._warn_in)
                break
            except TryAgain:
                await asyncio.sleep(ASK_AGAIN)
        if seconds is not None:
            await asyncio.sleep(seconds)
            self._pass_on(signal.SIGUSR2)

    def _pass_on(self, number: int) -> None:
        self._asked = number
        self._controller.signal(number)

    def _start(self, child: Child) -> None:
        """Start a child, if we still are who looks after the run."""
        self._check_lease()
        child.start()

    def _check_lease(self) -> None:
        with contextlib.suppress(OSError):
            if self._lease.deposed_by():
                raise Deposed

    def _start_lighthouse(self) -> None:
        """Nobody finds a Lighthouse until this one says where it is: not the last one's address, which may be
        somebody else's by now, and not that of a head whose end has come."""
        self._check_lease()
        self._last_port = urlsplit(self._lighthouse_address).port or 0
        self._lighthouse_address = ""
        write_atomic(self._paths.lighthouse, "", 0o600)
        self._lighthouse.start()

    async def _keep_office(self) -> None:
        """Renew the lease until the controller does so itself; end the controller when we are deposed and it does not
        find out; put our addresses right if a deposed head has written its own."""
        deposed = False
        while not deposed:
            with contextlib.suppress(OSError):
                deposed = await asyncio.to_thread(self._office)
            await asyncio.sleep(LEAVES_WITHIN if deposed else RENEW)
        self._lighthouse.signal(signal.SIGTERM)
        self._controller.signal(signal.SIGKILL)

    def _office(self) -> bool:
        """Look once; are we deposed?"""
        if self._lease.deposed_by():
            return True
        self._handed_over = self._handed_over or self._controller_renews()
        if not self._handed_over and not self._controller_is_late():
            self._lease.renew()
        address = self._lighthouse_address
        if address and _read(self._paths.lighthouse) not in ("", address):
            write_atomic(self._paths.lighthouse, address, 0o600)
        return False

    def _controller_renews(self) -> bool:
        """Has our controller renewed the lease? Raises OSError."""
        return leases.read(self._lease.folder, self._lease.epoch).beat > self._lease.claim.beat

    def _controller_is_late(self) -> bool:
        """Did our controller have its time to come? Then another host may do better."""
        child = self._controller
        return child.watched is not None and time.monotonic() - child.started > COMES_WITHIN

    async def _address(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LIGHTHOUSE_WITHIN):
                await self._learn_address()
        if not self._lighthouse_address:
            raise LaunchError("torchft's Lighthouse did not start", f"see {self._paths.head_log}")

    async def _learn_address(self) -> None:
        """Wait until our Lighthouse says where it is, or has ended. It may be elsewhere each time."""
        while not self._lighthouse.ended and not self._lighthouse_address:
            with contextlib.suppress(OSError):
                self._lighthouse_address = self._paths.lighthouse.read_text()
            await asyncio.sleep(0.02)

    async def _keep_lighthouse(self) -> None:
        """Start it again when it dies: at once if it had served, else after a pause if that goes on."""
        while True:
            await self._lighthouse.wait()
            served = self._lighthouse_address != ""
            if not served and not self._lighthouse.may_start_again():
                _say("the Lighthouse dies again and again")
                await asyncio.sleep(LIGHTHOUSE_PAUSE)
            try:
                self._start_lighthouse()
            except Deposed:
                return
            except OSError as error:  # the run folder is away
                _say(f"the Lighthouse cannot be started yet: {error}")
                await asyncio.sleep(RENEW)
                continue
            await self._learn_address()

    async def _keep_controller(self) -> int:
        """Start it, again and again until the run has ended. One that cannot even begin a run ends it, since ranks do
        not train yet; one that we cannot start in the place of another, or that leaves before the end, has crashed."""
        begun = self._lease.claim.silence > 0  # by a head whose host was lost
        while True:
            await self._start_controller(begun)
            if self._asked:  # before there was a controller, or of one that has died since
                self._controller.signal(self._asked)
            code = await self._controller.wait()
            ended = self._controller.run_ended()
            if ended is not None:
                return ended
            if code == EXIT_DEPOSED:
                raise Deposed
            begun = begun or code < 0 or code == EXIT_CRASHED or await asyncio.to_thread(self._was_in_office)
            if not begun:
                return code
            self._handed_over = True  # a host on which none comes into office loses the run to another
            if not self._controller.may_start_again():
                raise RunFailed("the controller crashed again and again", f"see {self._paths.controller_log}")
            await asyncio.sleep(self._controller.pause)

    async def _start_controller(self, again: bool) -> None:
        """Start it. In the place of another it must come, however long the run folder is away."""
        while True:
            try:
                self._start(self._controller)
                return
            except OSError as error:
                if not again or self._asked not in (0, signal.SIGUSR2):
                    raise LaunchError(f"the controller could not be started: {error}", "see `slurm-ft check`") from None
                _say(f"the controller cannot be started yet: {error}")
            await asyncio.sleep(RENEW)

    def _was_in_office(self) -> bool:
        """Did our controller, which has ended, look after the run? Where that cannot be told, it may have."""
        try:
            return self._handed_over or self._controller_renews()
        except OSError:
            return True


def _say(words: str) -> None:
    """Say it, if that is possible: our words may go into the run folder, which may be away."""
    with contextlib.suppress(OSError):
        print(f"slurm-ft: {words}", file=sys.stderr, flush=True)


def _controller_argv(paths: RunPaths, place: Place, epoch: int, last_word: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "slurm_ft.controller.main",
        f"--run-dir={paths.root}",
        f"--epoch={epoch}",
        f"--host={place.host}",
        f"--address={place.address}",
        f"--last-word={last_word}",
    ]


def _read(file: Path) -> str | None:
    """The text of a file; None where there is none. Raises OSError."""
    try:
        return file.read_text()
    except FileNotFoundError:
        return None


def _lighthouse_argv(paths: RunPaths, spec: RunSpec, place: Place, last_port: int) -> list[str]:
    options = spec.policy.lighthouse
    address = f"[{place.address}]" if ":" in place.address else place.address
    return [
        sys.executable,
        "-m",
        "slurm_ft.controller.lighthouse",
        f"--host={address}",
        f"--port={last_port}",
        f"--address-file={paths.lighthouse}",
        f"--events={paths.events}",
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
    try:
        lease = leases.acquire(paths.lease, place.host, place.job_id)
    except OSError as error:
        raise RunFolderError(
            f"the run folder `{paths.root}` cannot be written: {error.strerror}", "choose another with --run-dir"
        ) from None
    session = _begin_session(spec, place)
    session.write(paths)
    paths.again.unlink(missing_ok=True)
    code = EXIT_FAILED
    try:
        code = govern(paths, spec, place, lease)
        if spec.cluster == "slurm":
            words = come_back(paths, session, code, spec.policy.requeue).words
            if words:
                print(f"slurm-ft: {words}", file=sys.stderr, flush=True)
        return code
    except Deposed:
        return await_the_end(paths, spec, lease)
    except SlurmFTError as error:
        code = error.exit_code
        raise
    finally:
        give_back(paths, spec, lease, code)


def govern(paths: RunPaths, spec: RunSpec, place: Place, lease: Lease, warn_in: WarnIn = lambda: None) -> int:
    """Be the run's head until it is over; gives its exit code. Raises Deposed when another head took over."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited "ignore" would hide how children end
    make_keys(paths)
    return asyncio.run(Head(paths, spec, place, lease, warn_in).run())


def _begin_session(spec: RunSpec, place: Place) -> Session:
    session = Session(secrets.token_hex(8), place.job_id, place.hosts)
    if spec.cluster == "local":
        return session
    found = allocation_from(os.environ)
    return replace(session, cpus_per_host=found.cpus_per_host, gpus_per_host=found.gpus_per_host, task=_task(found))


def _task(found: Allocation) -> str:
    """What Slurm calls our job where it is a task of an array. A job that was submitted from within such a task may
    have inherited that one's variables, so Slurm is asked."""
    if not found.task:
        return ""
    view = SlurmClient().job(found.job_id)
    return "" if isinstance(view, JobView) and view.array_id != found.task else found.task


def give_back(paths: RunPaths, spec: RunSpec, lease: Lease, code: int) -> None:
    """The run is over: nobody need take over, and nothing of it is left on this machine. A deposed head has
    nothing to give back."""
    with contextlib.suppress(OSError):
        if lease.deposed_by():
            return
        lease.release(code)
    lease.close()
    if spec.cluster == "local":
        local.sweep(paths.root)


def await_the_end(paths: RunPaths, spec: RunSpec, lease: Lease) -> int:
    """Wait until the head that has deposed us, or the one after it, ends the run; gives the run's exit code.

    EXIT_TRY_AGAIN when nobody has renewed the lease for the policy's `orphan_timeout`. A signal that asks us
    to stop the run is passed on as a stop file. The warning before the time limit is not: the new head has set
    its own alarm.
    """
    print("slurm-ft: another host looks after this run now; waiting for its end", file=sys.stderr)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN if number == signal.SIGUSR2 else partial(_ask_to_stop, paths))
    watch = Watch()
    while True:
        claim = None
        with contextlib.suppress(OSError):
            claim = leases.newest(paths.lease)
        if claim is not None and claim.ended is not None:
            return claim.ended
        if watch.unchanged(time.monotonic(), claim) > spec.policy.orphan_timeout:
            print("slurm-ft: nobody looks after this run any more", file=sys.stderr)
            return EXIT_TRY_AGAIN
        time.sleep(RENEW)


def _ask_to_stop(paths: RunPaths, number: int, frame: object) -> None:
    with contextlib.suppress(OSError):
        paths.stop.touch()
