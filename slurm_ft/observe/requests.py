"""What a reader may ask of a run: to be hurt, stopped or cancelled. It writes requests, never a run's own files.

A request to inject is a file in the control folder, which the controller reads, deletes and answers with an
`injected` event that bears the request's id. To stop is to touch the `stop` file. To cancel is a signal to
the head of a local run, or scancel for a Slurm job.

`wait` and `clock` are arguments, so that a test neither sleeps nor depends on the time.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurm_ft.controller import comeback
from slurm_ft.errors import RunFailed, RunFolderError, TryAgain, UsageError
from slurm_ft.events import Event, Follower, Kind
from slurm_ft.lease import held_by_process
from slurm_ft.observe import runs
from slurm_ft.observe.ledger import Ledger
from slurm_ft.observe.status import Snapshot, from_state
from slurm_ft.paths import RunPaths, read_json, write_json

POLL_SECONDS = 0.1
ANSWER_SECONDS = 20.0
"""The controller looks at the control folder several times a second, and an agent answers at once."""
SETTLES_WITHIN = 45.0
"""Seconds in which the head of a session that has ended leaves or the next one tells its state; a lost head's lease is
nobody's after 40 s."""
SETTLES_FOR_CANCEL = 5.0
"""The same for who does not want to wait: to cancel a session that is about to leave does no harm."""

Wait = Callable[[float], None]
Now = Callable[[], float]


class Patience:
    """Waits in short pieces until its time is over."""

    def __init__(self, seconds: float, wait: Wait = time.sleep, clock: Now = time.monotonic) -> None:
        self._wait, self._clock = wait, clock
        self._until = clock() + seconds

    def last(self) -> bool:
        """Wait a little. True, without waiting, when the time is over."""
        if self._clock() >= self._until:
            return True
        self._wait(POLL_SECONDS)
        return False


class Watch:
    """A run's newest state as its events and `state.json` tell it."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._follower = Follower(paths.events)
        self.ledger = Ledger()

    def look(self) -> list[Event]:
        """Take in what is new, and give it."""
        news = self._follower.news()
        for event in news:
            self.ledger.add(event)
        return news

    @property
    def started(self) -> bool:
        return bool(self.ledger.sessions)

    @property
    def ended(self) -> int | None:
        return self.ledger.state.ended

    def step_of(self, replica: int) -> int:
        """The training step that a replica has reached; -1 before the first."""
        facts = self.ledger.facts.get(replica)
        steps = [-1 if facts is None or facts.step is None else facts.step]
        with contextlib.suppress(RunFolderError):
            rows = from_state(read_json(self._paths.state)).replicas
            steps += [row.step for row in rows if row.id == replica and row.step is not None]
        return max(steps)


# --- inject --------------------------------------------------------------------------------------------------


def injection(replica: int | None, rank: int, kind: str, seconds: float | None = None) -> dict[str, Any]:
    """The request to hurt a rank or a host of a replica, or the run itself (`replica` is None)."""
    request = {"id": uuid.uuid4().hex, "type": "inject", "replica": replica, "rank": rank, "kind": kind}
    return request if seconds is None else {**request, "seconds": seconds}


def request_path(paths: RunPaths, request: Mapping[str, Any]) -> Path:
    return paths.control / f"{request['id']}.json"


def await_run(run: str | None, folder: str, patience: Patience) -> RunPaths:
    """The run, as soon as its folder is there. Raises RunFolderError when it does not come."""
    while True:
        try:
            return runs.find(run, folder)
        except RunFolderError:
            if patience.last():
                raise


def await_step(watch: Watch, replica: int | None, step: int | None, patience: Patience) -> None:
    """Return when the run has started and the replica, if one is meant, has reached a training step.

    Raises RunFailed when the run ends or the patience does before that, UsageError for a replica that the run
    does not have.
    """
    while True:
        watch.look()
        if watch.ended is not None:
            raise RunFailed(f"the run has ended with exit code {watch.ended}", "inject works on a running run")
        if watch.started:
            count = len(watch.ledger.state.replicas)
            if replica is None:
                return
            if replica >= count:
                raise UsageError(f"there is no replica {replica}", f"the replicas are 0 to {count - 1}")
            if step is None or watch.step_of(replica) >= step:
                return
        if patience.last():
            raise RunFailed(_not_reached(watch, replica, step), "wait longer with --wait, or see `slurm-ft status`")


def _not_reached(watch: Watch, replica: int | None, step: int | None) -> str:
    if replica is None or not watch.started:
        return "the run has not started yet"
    reached = watch.step_of(replica)
    where = "no step yet" if reached < 0 else f"step {reached}"
    return f"replica {replica} has not reached step {step} in time; it is at {where}"


def inject(paths: RunPaths, request: Mapping[str, Any], watch: Watch, patience: Patience) -> None:
    """Ask for an injection and return when it is done. Raises RunFailed when it is refused or not answered; a
    request that was not answered is withdrawn, so that it does not strike later."""
    path = request_path(paths, request)
    try:
        write_json(path, request)
    except OSError as error:
        raise RunFolderError(f"`{path.parent}` cannot be written: {error.strerror}", "is this run yours?") from None
    while True:
        for event in watch.look():
            if event.kind is Kind.INJECTED and event.data.get("id") == request["id"]:
                if event.data.get("error"):
                    raise RunFailed(str(event.data["error"]), "see `slurm-ft status` for what runs")
                return
        if watch.ended is not None or patience.last():
            break
    with contextlib.suppress(OSError):
        path.unlink()
    if watch.ended is not None:
        raise RunFailed(f"the run ended with exit code {watch.ended} before it answered", "inject while it trains")
    raise RunFailed("the controller gave no answer", "is it alive? see `slurm-ft status` and controller.log")


# --- stop ------------------------------------------------------------------------------------------------------


def stop(paths: RunPaths) -> None:
    """Ask the run to stop in order, also one whose job has not made its folder yet."""
    try:
        paths.root.mkdir(parents=True, exist_ok=True)
        paths.stop.touch()
    except OSError as error:
        raise RunFolderError(f"`{paths.stop}` cannot be written: {error.strerror}", "is this run yours?") from None


def ask_to_save(paths: RunPaths) -> None:
    """Ask the ranks of the run to save."""
    try:
        paths.save.touch()
    except OSError as error:
        raise RunFolderError(f"`{paths.save}` cannot be written: {error.strerror}", "is this run yours?") from None


def await_save(follower: Follower, gone: Callable[[], bool], wait: Wait = time.sleep) -> Event | None:
    """The SAVE_ENDED that comes next, or None when the run is over without it."""
    while True:
        last = gone()
        for event in follower.news():
            if event.kind in (Kind.SAVE_ENDED, Kind.RUN_ENDED):
                return event if event.kind is Kind.SAVE_ENDED else None
        if last:
            return None
        wait(POLL_SECONDS)


def await_end(paths: RunPaths, gone: Callable[[], bool], wait: Wait = time.sleep) -> int | None:
    """The exit code of the run once it has ended, or None when it was left without having ended."""
    watch = Watch(paths)
    while True:
        last = gone()
        watch.look()
        if watch.ended is not None or last:
            return watch.ended
        wait(POLL_SECONDS)


def forget_stop(paths: RunPaths) -> None:
    """For a new submission: a stop that was asked of a session which never began is not meant for it."""
    with contextlib.suppress(OSError):
        paths.stop.unlink()


# --- has it ended? ---------------------------------------------------------------------------------------------


def settled(paths: RunPaths, patience: Patience) -> Snapshot:
    """The run's state once it is clear whether it has ended: a session's end is the run's only when nobody looks after
    it any more. Until then its head puts the job back into the queue, or a new one begins the next session.

    When that takes longer than the patience, the run goes on, in the job of who looks after it.
    """
    while True:
        snapshot = runs.read(paths, time.time()).snapshot
        if snapshot.ended is None or not runs.is_held(paths, time.time()):
            return snapshot
        if patience.last():
            holder = runs.holder(paths)
            job = holder.job_id if holder is not None else ""
            return replace(snapshot, ended=None, job_id=job or snapshot.job_id)


# --- cancel ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cancellation:
    """How a run is cancelled: scancel for `jobs`, in this order, or TERM to the process `pid` of this machine."""

    jobs: tuple[str, ...] = ()
    pid: int | None = None

    @property
    def argv(self) -> list[str]:
        return ["scancel", *self.jobs] if self.pid is None else ["kill", "-TERM", str(self.pid)]

    def __str__(self) -> str:
        return shlex.join(self.argv)


def job_of(paths: RunPaths, snapshot: Snapshot) -> str:
    """The Slurm job of a run, or '' where it has none or it is not known."""
    holder = runs.holder(paths)
    job = snapshot.job_id or (holder.job_id if holder else "") or runs.job_in_name(paths.root)
    job = job or next(iter(comeback.links(paths)), "")
    return "" if snapshot.cluster == "local" or job.startswith("L") else job


def in_queue(paths: RunPaths, snapshot: Snapshot) -> str:
    """What Slurm says of the job of a run that has not started; '' where there is no job to ask about."""
    from slurm_ft.slurm.client import JobView, SlurmClient, Unknown, cluster_of
    from slurm_ft.slurm.reasons import wait_words

    job = job_of(paths, snapshot)
    if not job:
        return ""
    answer = SlurmClient(cluster=cluster_of(os.environ)).job(job)
    if isinstance(answer, JobView):
        why = f" ({wait_words(answer.reason, job)})" if answer.reason not in ("", "None") else ""
        return f"its job {job}: {answer.state.words}{why}"
    if isinstance(answer, Unknown):
        return f"Slurm does not know its job {job} any more"
    return f"Slurm gave no answer about its job {job}: {answer.reason}"


def waits_in(paths: RunPaths, snapshot: Snapshot, cluster: str = "") -> str:
    """The job in the queue in which a run goes on whose last session has ended; '' where it is over or goes on now.
    Slurm is asked where the run folder knows of none: it puts jobs back by itself, as after a preemption."""
    if snapshot.ended is None or snapshot.cluster == "local":
        return ""
    waits = comeback.waits_in(paths, snapshot.job_id, snapshot.ended)
    return waits or ("" if snapshot.ended in comeback.FINISHED else _put_back(job_of(paths, snapshot), cluster))


def _put_back(job: str, cluster: str) -> str:
    """This job, if Slurm says that it waits in the queue."""
    from slurm_ft.slurm.client import JobView, SlurmClient, cluster_of

    answer = SlurmClient(cluster=cluster or cluster_of(os.environ)).job(job) if job else None
    return job if isinstance(answer, JobView) and answer.state.state.pending else ""


def plan_cancel(paths: RunPaths, snapshot: Snapshot) -> Cancellation:
    """How this run is cancelled. Raises RunFailed when nobody looks after it, UsageError when it is not here."""
    holder = runs.holder(paths)
    if snapshot.cluster != "local":
        job = job_of(paths, snapshot)
        if not job:
            raise RunFailed("the job of this run is not known", "look for it with `squeue --me`, then `scancel` it")
        # A link begins when the one before it has ended, however it did: so the last one first.
        return Cancellation(jobs=(*reversed(comeback.links_after(paths, job)), _ordered(paths, job)))
    if not runs.is_held(paths, time.time()):
        raise RunFailed("nobody looks after this run: there is nothing to cancel", "see `slurm-ft status`")
    if holder is None:
        raise RunFailed("the lease of this run does not say who holds it", f"see {paths.lease}")
    if not is_head(holder.pid, paths):
        here = socket.gethostname()
        raise UsageError(
            f"process {holder.pid} is not the head of this run on {here}",
            f"the run was started on {holder.host}: cancel it there, or use `slurm-ft stop`",
        )
    return Cancellation(pid=holder.pid)


def _ordered(paths: RunPaths, job: str) -> str:
    """What scancel is to call a job: `100_1` for a task of an array, whose number may be that of the whole array."""
    with contextlib.suppress(RunFolderError):
        session = read_json(paths.session)
        if session.get("job_id") == job and session.get("task"):
            return str(session["task"])
    return job


def is_head(pid: int, paths: RunPaths, proc: Path = Path("/proc")) -> bool:
    """Is this process the head of the run? It must be ours by its command line and hold the run's lease: a number
    alone may belong to somebody else by now."""
    claim = runs.holder(paths)
    try:
        words = (proc / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    ours = any(b"slurm_ft" in word or b"slurm-ft" in word for word in words)
    return ours and claim is not None and claim.pid == pid and held_by_process(paths.lease, claim, proc)


def cancel(paths: RunPaths, plan: Cancellation, cluster: str = "") -> str:
    """Carry a plan out, on this cluster if one is named, and say what was done. Raises TryAgain when Slurm does not
    answer."""
    if plan.pid is None:
        words = "; ".join(_scancel(job, cluster) for job in plan.jobs)
        comeback.forget(paths, plan.jobs)
        return words
    try:
        # A descriptor stays with its process, so that the number cannot change hands after it was looked at.
        process = os.pidfd_open(plan.pid)
    except ProcessLookupError:
        return "the run's head has just ended by itself"
    try:
        if not is_head(plan.pid, paths):
            return "the run's head has just ended by itself"
        signal.pidfd_send_signal(process, signal.SIGTERM)
    except ProcessLookupError:
        return "the run's head has just ended by itself"
    finally:
        os.close(process)
    return f"sent TERM to the head, process {plan.pid}"


def _scancel(job_id: str, cluster: str) -> str:
    from slurm_ft.slurm.client import SlurmClient, Unknown, Unreachable, cluster_of

    answer = SlurmClient(cluster=cluster or cluster_of(os.environ)).cancel(job_id)
    if isinstance(answer, Unreachable):
        raise TryAgain(f"job {job_id} could not be cancelled: {answer.reason}", "try again, or `scancel` it by hand")
    if isinstance(answer, Unknown):
        return f"Slurm does not know job {job_id} any more"
    return f"job {job_id} is cancelled"
