"""Steps by `srun` inside an allocation.

Every option that Slurm would otherwise take from the environment or from slurm.conf is written out: CPUs
per task are not inherited in 22.05, and the time srun waits after the first task has ended, or whether it
kills a step at a bad exit, are a site's choice. For the same reason no SLURM_* option variable of the batch
step is handed on.

The step dies with its host (no `--no-kill` here; that belongs to the job). `SLURM_EXIT_ERROR` tells srun's
own failure from the program's. The srun client runs in a session of its own, so it outlives the controller.

A step needs its client less than one would think. When the client is gone, because somebody killed it, or its
host died, or another head has started it, the step goes on without it (it is *detached*): nothing is lost but
what its agents would print, and that nobody ends it when one of its agents fails. Its agents are heard by the
controller as before, so it is left alone. It has ended when its agents have said that they leave, when we have
ended it, or when Slurm no longer lists it, which all detached steps are asked about together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_ft import env
from slurm_ft.agent import fitness
from slurm_ft.agent.process import open_log
from slurm_ft.aside import Aside
from slurm_ft.errors import EXIT_LAUNCH, LaunchError, SlurmFTError
from slurm_ft.launch.base import Ended, Request, Watched, exit_words
from slurm_ft.launch.helper import Allocation, helper_argv
from slurm_ft.slurm.client import SlurmClient, Unknown, Unreachable
from slurm_ft.slurm.hostlist import compress

log = logging.getLogger("slurm_ft.controller")

GONE_WITHIN = 5.0
"""Seconds for which a cancelled step is awaited. Slurm lists a dead host's steps for longer: that list is
not to be believed, and a step that does not go is left to Slurm."""

LOOKS = (0.0, 2.0, 5.0)
"""Seconds after which a step that has just lost its client is looked up: whoever killed the client may have
ended the step too. srun's own guard, its second process, does."""
WORDS_WITHIN = 2.0
ANSWER_SECONDS = 20.0
"""For one question to Slurm about a step."""
LOOK_INTERVAL = 60.0
"""Seconds between two questions to Slurm about all detached steps."""
UNANSWERED = re.compile(r"[Uu]nable to contact slurm controller|Socket timed out|[Cc]onnection (refused|timed out)"
                        r"|Communication connection failure|Zero Bytes were transmitted")  # fmt: skip
"""In the words of an srun that has found no slurmctld. It says so with its own exit code, EXIT_LAUNCH."""

KEPT = frozenset({"SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CLUSTERS", "SLURM_CLUSTER_NAME"})
"""The only variables of Slurm's that a step's srun sees: where Slurm is, and in which job."""


def step_argv(request: Request, allocation: Allocation) -> list[str]:
    """The complete srun command line of a step. Pure."""
    hosts = len(request.hosts)
    options = [
        f"--jobid={allocation.job_id}",
        f"--job-name={request.name}",
        f"--nodelist={compress(request.hosts)}",
        f"--nodes={hosts}",
        f"--ntasks={hosts}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={allocation.cpus_per_host}",
        "--mem=0",
        *([f"--gres=gpu:{allocation.gpus_per_host}"] if allocation.gpus_per_host else []),
        "--overlap",
        "--exact",
        "--cpu-bind=none",
        "--mpi=none",
        "--kill-on-bad-exit=1",
        "--wait=60",
        "--unbuffered",
        "--input=none",
        "--export=ALL",
        *allocation.options,
    ]
    return ["srun", *options, *request.agent_argv()]


def head_argv(host: str, epoch: int, allocation: Allocation, argv: Sequence[str]) -> list[str]:
    """The complete srun command line that starts a head in a step of its own. Pure.

    It may use all of the host's CPUs, as the agent beside it may, and none of its GPUs.
    """
    options = [
        f"--jobid={allocation.job_id}",
        f"--job-name=sft-head-{epoch}",
        f"--nodelist={host}",
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
        f"--cpus-per-task={allocation.cpus_per_host}",
        "--mem=0",
        "--gres=none",
        "--overlap",
        "--exact",
        "--cpu-bind=none",
        "--mpi=none",
        "--kill-on-bad-exit=1",
        "--wait=60",
        "--unbuffered",
        "--input=none",
        "--export=ALL",
    ]
    return ["srun", *options, *argv]


def let_go(pid: int) -> None:
    """End an srun client and leave its step alone.

    srun's second process, a child of the first, ends the step when it sees the first one die: it goes first.
    """
    with contextlib.suppress(OSError, ValueError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def step_environment(surroundings: Mapping[str, str], run: str) -> dict[str, str]:
    """The environment of a step's srun. Pure."""
    inherited = {
        name: value
        for name, value in surroundings.items()
        if name in KEPT or name.startswith("SLURM_FT_") or not name.startswith(("SLURM_", "SRUN_", "SBATCH_"))
    }
    return {**inherited, env.RUN: run, "SLURM_EXIT_ERROR": str(EXIT_LAUNCH)}


class SrunLauncher:
    """Starts steps in one allocation."""

    def __init__(self, allocation: Allocation) -> None:
        self.allocation: Allocation | None = allocation
        self._allocation = allocation
        self._listing = Listing(allocation.ordered)

    def launch(self, request: Request) -> SrunStep:
        argv = step_argv(request, self._allocation)
        try:
            with open_log(request.log) as log:
                process = subprocess.Popen(
                    argv,
                    env=step_environment(os.environ, str(request.paths.root)),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(f"srun cannot be started: {error.strerror}", "is Slurm's client on the PATH?") from None
        return SrunStep(request, self._listing, Watched(process.pid, process))

    def look(self, host: str, command: str) -> tuple[list[str], dict[str, str]]:
        name = f"sft-check-{host}"
        argv = helper_argv(self._allocation, [host], name, fitness.shell(command))
        return argv, fitness.check_environment(step_environment(os.environ, os.environ.get(env.RUN, "")))

    def adopt(self, request: Request, pid: int) -> SrunStep:
        return SrunStep(request, self._listing, Watched(pid if _is_client_of(pid, request) else 0))


def _is_client_of(pid: int, request: Request) -> bool:
    """Is this process, known by a number from the log, really the srun of this step?"""
    try:
        return f"--job-name={request.name}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


class Listing:
    """The steps of a job as Slurm lists them, asked for all at once and not more often than need be.

    Slurm goes on listing a dead host's steps: that a step is listed says little, that it is not says that it
    has ended.
    """

    def __init__(self, job_id: str, slurm: SlurmClient | None = None) -> None:
        self._job_id = job_id
        self._slurm = slurm or SlurmClient(timeout=ANSWER_SECONDS)
        self._at = float("-inf")
        self._ids: dict[str, list[str]] | None = None
        self._asking = asyncio.Lock()

    async def ids(self, name: str, max_age: float) -> list[str] | None:
        """The ids of the steps of this name, as they were at most `max_age` seconds ago; None when Slurm does
        not answer, which is no answer."""
        async with self._asking:
            if time.monotonic() - self._at > max_age:
                self._ids, self._at = await asyncio.to_thread(self._by_name), time.monotonic()
        return None if self._ids is None else self._ids.get(name, [])

    def _by_name(self) -> dict[str, list[str]] | None:
        steps = self._slurm.steps(self._job_id)
        if isinstance(steps, Unreachable):
            return None
        found: dict[str, list[str]] = {}
        for step in () if isinstance(steps, Unknown) else steps:
            found.setdefault(step.name, []).append(step.step_id)
        return found

    async def signal(self, step_id: str, number: signal.Signals) -> None:
        """Send a signal to a step. It only helps: nothing depends on it."""
        job, _, step = step_id.rpartition(".")
        with contextlib.suppress(SlurmFTError, ValueError):
            await asyncio.to_thread(self._slurm.signal_step, job, int(step), number)


class SrunStep:
    """A step, and the srun client that stands for it as long as there is one."""

    def __init__(self, request: Request, listing: Listing, client: Watched) -> None:
        self.pid = client.pid
        self.request = request
        self._listing = listing
        self._client = client
        self._left, self._killed = asyncio.Event(), asyncio.Event()
        self._order: asyncio.Task[None] | None = None

    async def wait(self) -> Ended:
        code = await self._client.wait()
        if code is not None and code >= 0:
            words = ""
            # The log is in the run folder, whose file system may be away.
            with contextlib.suppress(TimeoutError), contextlib.closing(Aside("words")) as aside:
                words = await asyncio.wait_for(aside.do(self._last_words), WORDS_WITHIN)
            unanswered = code == EXIT_LAUNCH and UNANSWERED.search(words) is not None
            return Ended(code, f"srun {exit_words(code)}{words}", unanswered)
        log.info("%s goes on without its srun client, which %s", self.request.name, exit_words(code))
        looks = iter(LOOKS)
        while not self._left.is_set() and not self._killed.is_set():
            pause = next(looks, LOOK_INTERVAL)
            await _first_of(pause, self._left, self._killed)
            if await self._listing.ids(self.request.name, max(0.5, pause - 1.0)) == []:
                return Ended(None, f"Slurm no longer has the step, whose srun {exit_words(code)}")
        if self._killed.is_set():
            await self._make_sure_it_is_gone()
        return Ended(None, "its agents have left" if self._left.is_set() else "the step was ended")

    async def terminate(self) -> None:
        await self._cancel(signal.SIGTERM)

    async def kill(self) -> None:
        self._killed.set()
        self._order_kill()
        self._client.signal(signal.SIGKILL)

    def _order_kill(self) -> None:
        """Have Slurm kill the step, one order at a time. It is not waited for: to a host that does not answer it
        takes scancel many seconds."""
        if self._order is None or self._order.done():
            self._order = asyncio.ensure_future(self._cancel(signal.SIGKILL))

    def left(self) -> None:
        self._left.set()

    def let_go(self) -> None:
        if not self._client.over:
            let_go(self.pid)

    async def _make_sure_it_is_gone(self) -> None:
        """Cancel it until Slurm has forgotten it, for GONE_WITHIN; the time in which Slurm does not answer does
        not count, since a new step must wait for Slurm too."""
        left = GONE_WITHIN
        while left > 0:
            began = time.monotonic()
            ids = await self._step_ids()
            if ids == []:
                return
            self._order_kill()
            await asyncio.sleep(0.5)
            left -= 0.0 if ids is None else time.monotonic() - began

    async def _step_ids(self) -> list[str] | None:
        return await self._listing.ids(self.request.name, 0.2)

    async def _cancel(self, number: signal.Signals) -> None:
        for step_id in await self._step_ids() or ():
            await self._listing.signal(step_id, number)

    def _last_words(self) -> str:
        """srun's own error lines, since its exit code alone does not say what was wrong."""
        try:
            lines = self.request.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        words = [line for line in lines if line.startswith(("srun: error", "slurmstepd: error", "srun: fatal"))]
        return f": {words[-1]}" if words else ""


async def _first_of(seconds: float, *events: asyncio.Event) -> None:
    """Wait until one of the events has come, at most so many seconds."""
    waiters = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiters, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiter in waiters:
            waiter.cancel()


def allocation_from(surroundings: Mapping[str, str], options: Sequence[str] = ()) -> Allocation:
    """The allocation around us, from the batch step's environment.

    The smallest host decides the CPUs of a step: all hosts of a step must be able to give them.
    """
    cpus = surroundings.get("SLURM_JOB_CPUS_PER_NODE") or surroundings.get("SLURM_CPUS_ON_NODE") or "1"
    gpus = surroundings.get("SLURM_GPUS_ON_NODE", "")
    return Allocation(
        job_id=surroundings["SLURM_JOB_ID"],
        cpus_per_host=min(_counts(cpus)),
        gpus_per_host=int(gpus) if gpus.isdigit() else 0,
        options=tuple(options),
        task=array_task(surroundings),
    )


def array_task(surroundings: Mapping[str, str]) -> str:
    """`100_1` in a task of a job array, else ''."""
    array, task = surroundings.get("SLURM_ARRAY_JOB_ID"), surroundings.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else ""


def _counts(text: str) -> Sequence[int]:
    """The numbers in Slurm's `72(x2),36`."""
    return [int(part.partition("(")[0]) for part in text.split(",")]
