"""An agent's way to start a head on its own host, when the run has lost the one it had.

The head gets a step of its own in the job (`srun --jobid`), or in a run without Slurm a process of its own. The
srun client that starts it is ended as soon as the head is up: it runs inside our replica's step, and the head
must not end with that. When nobody brings up a head and nobody renews the lease, the run is given up, and the
allocation is released: idle hosts help nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable

from slurm_ft import env
from slurm_ft import lease as leases
from slurm_ft.agent.election import MOST_TRIES, Election, stale_after
from slurm_ft.agent.process import open_log
from slurm_ft.errors import EXIT_TRY_AGAIN, SlurmFTError
from slurm_ft.events import Clock, Event, EventLog, Kind
from slurm_ft.launch.session import Session
from slurm_ft.launch.srun import head_argv, let_go, step_environment
from slurm_ft.lease import Claim
from slurm_ft.paths import RunPaths
from slurm_ft.slurm.client import SlurmClient, Unreachable
from slurm_ft.spec import RunSpec

LOOK_INTERVAL = 0.5
LOOK_AFTER = 2.0
"""Seconds of silence after which the lease is looked at: two of the controller's answers are missing."""
LOOK_AGAIN = 0.1
STARTS_WITHIN = 30.0
"""Seconds for a new head to take over the claim that was made for it."""


class Successor:
    """Watches over the head of a run for one agent.

    `silence` gives the seconds since a controller was heard, `address` what other hosts reach this one by;
    `learnt` hears of the newest epoch in the lease.
    """

    def __init__(
        self,
        paths: RunPaths,
        spec: RunSpec,
        place: int,
        host: str,
        silence: Callable[[], float],
        address: Callable[[], str],
        learnt: Callable[[int], None],
    ) -> None:
        self._address = address
        self._paths, self._spec, self._host = paths, spec, host
        self._silence, self._learnt = silence, learnt
        self._resigned = False
        self._election = Election(place, host, spec.policy.head_timeout)

    async def watch(self) -> None:
        """Look after the head for as long as the agent lives, and has not given the run up."""
        while not self._resigned:
            await asyncio.sleep(LOOK_INTERVAL)
            if self._silence() < LOOK_AFTER:
                continue
            seen = await asyncio.to_thread(self._newest)
            if seen is not None:
                self._learnt(seen.epoch)
            if self._election.stands(time.monotonic(), self._silence(), seen) and not self._resigned:
                assert seen is not None
                await self._take_over(seen)

    def _newest(self) -> Claim | None:
        try:
            return leases.newest(self._paths.lease)
        except OSError:
            return None

    async def _take_over(self, seen: Claim) -> None:
        silence = self._silence()
        claim = self._claim(seen, silence)
        if not await asyncio.to_thread(self._taken, claim):
            return
        self._election.tries += 1
        self._learnt(claim.epoch)
        _say(f"no head for {silence:.0f} s; starting one on {self._host} (epoch {claim.epoch})")
        try:
            argv, environment = self._command(claim.epoch)
            with open_log(self._paths.head_log) as log:
                process = subprocess.Popen(
                    argv, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
        except (OSError, SlurmFTError) as error:
            _say(f"a head cannot be started here: {error} (try {self._election.tries} of {MOST_TRIES})")
            return
        if not await self._is_up(claim, process):
            _say(f"the head on {self._host} did not come up (try {self._election.tries} of {MOST_TRIES})")
        if self._spec.cluster != "local":
            let_go(process.pid)
            await asyncio.to_thread(process.wait)

    def _claim(self, seen: Claim, silence: float) -> Claim:
        return Claim(seen.epoch + 1, self._host, leases.machine(), os.getpid(), seen.job_id, time.time(), silence,
                     seen.host)  # fmt: skip

    def _taken(self, claim: Claim) -> bool:
        try:
            return leases.take(self._paths.lease, claim)
        except OSError as error:
            _say(f"the lease cannot be claimed: {error}")
            return False

    def _command(self, epoch: int) -> tuple[list[str], dict[str, str]]:
        address = self._address()
        options = [f"--run-dir={self._paths.root}", f"--epoch={epoch}", f"--host={self._host}", f"--address={address}"]
        argv = [sys.executable, "-m", "slurm_ft.submit.takeover", *options]
        if self._spec.cluster == "local":
            # Without our step's mark, by which what is left of the step is found and killed.
            return argv, {name: value for name, value in os.environ.items() if name != env.STEP}
        allocation = Session.read(self._paths).allocation
        return head_argv(self._host, epoch, allocation, argv), step_environment(os.environ, str(self._paths.root))

    async def _is_up(self, claim: Claim, process: subprocess.Popen[bytes]) -> bool:
        """Has the head that we have started taken our claim over? Until then the claim is renewed: a head that
        is slow to start is not deposed by the next agent."""
        give_up = time.monotonic() + STARTS_WITHIN
        renewed = time.monotonic()
        while process.poll() is None and time.monotonic() < give_up:
            await asyncio.sleep(LOOK_AGAIN)
            seen = await asyncio.to_thread(self._newest)
            if seen is not None and (seen.epoch, seen.pid) != (claim.epoch, claim.pid):
                return seen.epoch == claim.epoch
            if seen is not None and time.monotonic() - renewed >= leases.RENEW:
                renewed = time.monotonic()
                await asyncio.to_thread(self._renew, seen)
        return False

    def _renew(self, claim: Claim) -> None:
        with contextlib.suppress(OSError), contextlib.closing(leases.Lease(self._paths.lease, claim)) as lease:
            lease.renew()

    async def give_up(self) -> None:
        """Nobody has brought a head up: write down that the run ends, and release its allocation, once. Not when the
        lease is renewed: then it is we alone that hear no controller, and somebody looks after the run. From now on
        we do not stand ourselves: our ranks are gone."""
        self._resigned = True
        seen = await asyncio.to_thread(self._newest)
        if seen is None or seen.ended is not None:
            return
        await asyncio.sleep(stale_after(self._spec.policy.head_timeout))
        if await asyncio.to_thread(self._newest) != seen:
            return
        claim = self._claim(seen, self._silence())
        if await asyncio.to_thread(self._taken, claim):
            await asyncio.to_thread(_release, self._paths, self._spec, claim)


def _release(paths: RunPaths, spec: RunSpec, claim: Claim) -> None:
    why = f"no host could take over from the head on {claim.before or 'the head host'}"
    log, clock = EventLog(paths.events), Clock()
    started = {"host": claim.host, "pid": claim.pid, "before": claim.before, "silence": claim.silence, "age": 0.0}
    log.append(Event(clock(), Kind.HEAD_STARTED, None, started, claim.epoch))
    log.append(Event(clock(), Kind.RUN_ENDED, None, {"code": EXIT_TRY_AGAIN, "why": why}, claim.epoch))
    log.close()
    leases.Lease(paths.lease, claim).release(EXIT_TRY_AGAIN)
    if spec.cluster == "local":
        return
    job = claim.job_id
    with contextlib.suppress(SlurmFTError, OSError):
        job = Session.read(paths).allocation.ordered
    _say(f"{why}; releasing job {job}")
    while isinstance(answer := SlurmClient().cancel(job), Unreachable):
        _say(f"job {job} cannot be released yet: {answer.reason}")
        time.sleep(30)


def _say(words: str) -> None:
    print(f"slurm-ft agent: {words}", file=sys.stderr, flush=True)
