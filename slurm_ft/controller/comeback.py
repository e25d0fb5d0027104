"""What becomes of the job when its run has ended in it: back into the queue, the next link of a chain, or nothing.

A run that had to end for a time limit or a preemption (code 75) comes back by itself. A link of a chain leaves
that to the next link, which waits in the queue; another job is put back into the queue, if Slurm lets it and the
run gets on at all: two sessions in a row without progress are not worth a third. A run that is finished, will
fail in the same way again, or was stopped by somebody cancels the links that are left.

Slurm itself puts a job back that it preempts or whose host fails; it does so with the same id, and a link that
is put back is still the link. A SIGTERM alone does not say whether a person or a preemption sent it, so Slurm
is asked once: only a job that is CANCELLED was ended by a person.

The head does this, after the controller has left. Files in the run folder:

    chain.json    {"links": ["12", "13"]}: the jobs of the chain, in order; `submit --chain` writes it
    again.json    {"after": "12", "job_id": "13", "how": "..."}: how the run goes on, for who follows it
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from slurm_ft import env
from slurm_ft.controller.requests import STOP_WORDS
from slurm_ft.errors import EXIT_DONE, EXIT_PERMANENT, EXIT_TRY_AGAIN, EXIT_USAGE, RunFolderError, UsageError
from slurm_ft.events import Event, Kind, read
from slurm_ft.launch.session import Session
from slurm_ft.paths import RunPaths, read_json, write_json
from slurm_ft.slurm.client import Done, JobView, SlurmClient, Unknown, Unreachable

REQUEUE_TRIES, REQUEUE_PAUSE = 5, 4.0
"""How often a Slurm that does not answer is asked to put a job back, and the seconds between two tries."""
FINISHED = frozenset({EXIT_DONE, EXIT_PERMANENT})
"""A run that has ended with one of these does not begin again in a later link or a requeued job."""
NO_PROGRESS = 2
"""After so many sessions in a row without progress a job is not put back into the queue."""


@dataclass(frozen=True)
class Plan:
    """What is to be done, in this order: cancel these jobs, put this job back into the queue. `next` goes on."""

    words: str = ""
    cancel: tuple[str, ...] = ()
    requeue: bool = False
    next: str = ""


@dataclass(frozen=True)
class Ending:
    """How a session ended. `idle` counts the sessions in a row, this one the last, that made no progress."""

    code: int
    why: str = ""
    idle: int = 0


def ending(events: Iterable[Event], code: int) -> Ending:
    """How the last session in these events ended."""
    sessions: list[bool] = []
    why = ""
    for event in events:
        if event.kind is Kind.RUN_STARTED:
            sessions.append(False)
            why = ""
        elif event.kind is Kind.PROGRESSED and sessions:
            sessions[-1] = True
        elif event.kind is Kind.STOP_REQUESTED:
            why = why or str(event.data.get("why", ""))
    idle = next((n for n, moved in enumerate(reversed(sessions)) if moved), len(sessions))
    return Ending(code, why, idle)


def plan(end: Ending, links: tuple[str, ...], job: JobView | None, may_requeue: bool, job_id: str) -> Plan:
    """What is to be done. `links` are the chain's jobs after this one; `job` is what Slurm says of this job, None when
    it does not answer: then it is asked to put the job back, and refuses by itself what may not be."""
    if end.code == EXIT_TRY_AGAIN:
        if links:
            return Plan(goes_on(links[0]), next=links[0])
        if not may_requeue:
            return Plan()
        if end.idle >= NO_PROGRESS:
            return Plan(f"not put back into the queue: no progress in the last {end.idle} sessions")
        if job is not None and not job.requeue:
            return Plan("not put back into the queue: Slurm says that this job may not be (--requeue allows it)")
        return Plan(goes_on(job_id, job_id), requeue=True, next=job_id)
    cancelled = job is not None and job.state.state.name == "CANCELLED"
    stopped = end.code > 128 and (end.why == STOP_WORDS or cancelled)
    if links and (end.code in FINISHED or end.code == EXIT_USAGE or stopped):
        return Plan(f"the rest of the chain is cancelled: {', '.join(links)}", cancel=links)
    return Plan()


def goes_on(following: str, job_id: str = "") -> str:
    """How a run goes on after job `job_id`, in words: in the job that follows."""
    if following == job_id:
        return "the job is put back into the queue, and the run goes on in it"
    return f"the run goes on in job {following}, the next link of its chain"


def links_after(paths: RunPaths, job_id: str) -> tuple[str, ...]:
    """The jobs of the run's chain that come after this one; none when it is not in a chain."""
    try:
        links = [str(item) for item in read_json(paths.chain)["links"]]
    except (RunFolderError, KeyError, TypeError):
        return ()
    return tuple(links[links.index(job_id) + 1 :]) if job_id in links else ()


def come_back(
    paths: RunPaths,
    session: Session,
    code: int,
    may_requeue: bool,
    client: SlurmClient | None = None,
    idle: bool = False,
) -> Plan:
    """Do what is to be done for the job whose session has just ended with this exit code; gives what was done. With
    `idle` sessions without progress do not count: those of a program that reports none."""
    client = client or SlurmClient()
    job_id, name = session.job_id, session.allocation.ordered
    links = links_after(paths, job_id)
    end = ending(read(paths.events), code)
    if idle:
        end = replace(end, idle=0)
    if not links and code != EXIT_TRY_AGAIN:
        return Plan()
    answer = client.job(name)
    chosen = plan(end, links, answer if isinstance(answer, JobView) else None, may_requeue, job_id)
    for link in chosen.cancel:
        with contextlib.suppress(UsageError):
            client.cancel(link)
    if chosen.next:
        with contextlib.suppress(OSError):
            write_json(paths.again, {"after": job_id, "job_id": chosen.next, "how": chosen.words})
    if chosen.requeue:
        done = _requeued(client, name)
        if not isinstance(done, Done):
            with contextlib.suppress(OSError):
                paths.again.unlink()
            why = getattr(done, "reason", "Slurm does not know it")
            return Plan(f"the job could not be put back into the queue: {why}")
    return chosen


def _requeued(client: SlurmClient, name: str) -> Done | Unknown | Unreachable:
    """Slurm's answer. One that does not answer is asked again: the job's time is not quite over yet."""
    for _ in range(REQUEUE_TRIES - 1):
        answer = client.requeue(name)
        if not isinstance(answer, Unreachable):
            return answer
        time.sleep(REQUEUE_PAUSE)
    return client.requeue(name)


def is_over(paths: RunPaths, surroundings: Mapping[str, str]) -> str:
    """Why a later link, or a job that was put back into the queue, has nothing to do; or ''."""
    again = surroundings.get(env.CHAIN) or surroundings.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
    if not again:
        return ""
    last = None
    for event in read(paths.events):
        if event.kind in (Kind.RUN_STARTED, Kind.RUN_ENDED):
            last = event
    if last is None or last.kind is not Kind.RUN_ENDED or last.data.get("code") not in FINISHED:
        return ""
    return f"the run has ended already, with exit code {last.data['code']}: nothing is left to do"
