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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from slurm_ft import env
from slurm_ft.controller.requests import STOP_WORDS
from slurm_ft.controller.state import LONG
from slurm_ft.errors import EXIT_DONE, EXIT_PERMANENT, EXIT_TRY_AGAIN, EXIT_USAGE, RunFolderError, UsageError
from slurm_ft.events import Event, Kind, read
from slurm_ft.paths import RunPaths, read_json, write_json
from slurm_ft.slurm.client import Done, JobView, SlurmClient, Unknown, Unreachable

if TYPE_CHECKING:
    from slurm_ft.launch.session import Session

REQUEUE_TRIES, REQUEUE_PAUSE = 5, 4.0
"""How often a Slurm that does not answer is asked to put a job back, or to cancel links, and the pause in seconds."""
FINISHED = frozenset({EXIT_DONE, EXIT_PERMANENT})
"""A run that has ended with one of these does not begin again in a later link or a requeued job."""
REPORTS = frozenset({Kind.MEMBER, Kind.QUORUM, Kind.PROGRESS})
"""What programs report that tell how they get on."""
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

    @property
    def stopped(self) -> bool:
        """Did it end because somebody had asked for a stop?"""
        return self.code > 128 and self.why == STOP_WORDS


def ending(events: Iterable[Event], code: int) -> Ending:
    """How the last session in these events ended. A session has got on when a replica has, or where programs report
    nothing when one has run for long."""
    sessions: list[bool] = []
    why, silent = "", True
    ran_since: dict[int | None, float] = {}
    for event in events:
        if event.kind is Kind.RUN_STARTED:
            sessions.append(False)
            why, silent = "", True
            ran_since.clear()
            continue
        if not sessions:
            continue
        silent = silent and event.kind not in REPORTS
        if event.kind is Kind.RANKS_STARTED:
            ran_since[event.replica] = event.t
        elif event.kind is Kind.STOP_REQUESTED:
            said = str(event.data.get("why", ""))
            why = said if said == STOP_WORDS else why or said
        ran_long = silent and event.t - ran_since.get(event.replica, event.t) > LONG
        sessions[-1] = sessions[-1] or ran_long or event.kind is Kind.PROGRESSED
    idle = next((n for n, moved in enumerate(reversed(sessions)) if moved), len(sessions))
    return Ending(code, why, idle)


def plan(end: Ending, links: tuple[str, ...], job: JobView | None, may_requeue: bool, job_id: str) -> Plan:
    """What is to be done. `links` are the chain's jobs after this one; `job` is what Slurm says of this job, None when
    it does not answer: then it is asked to put the job back, and refuses by itself what may not be."""
    cancelled = job is not None and job.state.cancelled
    if end.code == EXIT_TRY_AGAIN and not cancelled:
        if links:
            return Plan(goes_on(links[0]), next=links[0])
        if not may_requeue:
            return Plan()
        if end.idle >= NO_PROGRESS:
            return Plan(f"not put back into the queue: no progress in the last {end.idle} sessions")
        if job is not None and not job.requeue:
            return Plan("not put back into the queue: Slurm says that this job may not be (--requeue allows it)")
        return Plan(goes_on(job_id, job_id), requeue=True, next=job_id)
    if links and (end.code in FINISHED or end.code == EXIT_USAGE or cancelled or end.stopped):
        return Plan(cancelled_links(links, links), cancel=links)
    return Plan()


def cancelled_links(links: Collection[str], gone: Collection[str]) -> str:
    """What became of the rest of a chain, in words; `gone` are those that Slurm has cancelled."""
    left = [link for link in links if link not in gone]
    words = [f"the rest of the chain is cancelled: {', '.join(link for link in links if link in gone)}"] if gone else []
    if left:
        words.append(f"could not be cancelled: {', '.join(left)} (`scancel {' '.join(left)}` does it)")
    return "; ".join(words)


def goes_on(following: str, job_id: str = "") -> str:
    """How a run goes on after job `job_id`, in words: in the job that follows."""
    if following == job_id:
        return "the job is put back into the queue, and the run goes on in it"
    return f"the run goes on in job {following}, the next link of its chain"


def links(paths: RunPaths) -> tuple[str, ...]:
    """The jobs of the run's chain, in order; none when it is no chain."""
    try:
        return tuple(str(item) for item in read_json(paths.chain)["links"])
    except (RunFolderError, KeyError, TypeError):
        return ()


def links_after(paths: RunPaths, job_id: str) -> tuple[str, ...]:
    """The jobs of the run's chain that come after this one; none when it is not in a chain."""
    chain = links(paths)
    return chain[chain.index(job_id) + 1 :] if job_id in chain else ()


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
    left = links_after(paths, job_id)
    end = ending(read(paths.events), code)
    if idle:
        end = replace(end, idle=0)
    if not left and code != EXIT_TRY_AGAIN:
        return Plan()
    answer = client.job(name)
    job = client.with_base(answer) if isinstance(answer, JobView) else None
    chosen = plan(end, left, job, may_requeue, job_id)
    if chosen.cancel:
        gone = _cancel(paths, client, chosen.cancel)
        return replace(chosen, words=cancelled_links(chosen.cancel, gone), cancel=gone)
    if chosen.next:
        with contextlib.suppress(OSError):
            write_json(paths.again, {"after": job_id, "job_id": chosen.next, "how": chosen.words})
    if chosen.requeue:
        done = _answer(partial(client.requeue, name), iter(range(REQUEUE_TRIES - 1)))
        if not isinstance(done, Done):
            with contextlib.suppress(OSError):
                paths.again.unlink()
            why = getattr(done, "reason", "Slurm does not know it")
            return Plan(f"the job could not be put back into the queue: {why}")
    return chosen


def _cancel(paths: RunPaths, client: SlurmClient, jobs: tuple[str, ...]) -> tuple[str, ...]:
    """Cancel these links, the last first, so that none of them may begin meanwhile; the chain is shorter by them.
    Gives those that are gone. The links share the tries: a Slurm that is away would take minutes for each."""
    gone = set[str]()
    more_tries = iter(range(REQUEUE_TRIES - 1))
    for link in reversed(jobs):
        with contextlib.suppress(UsageError):
            if not isinstance(_answer(partial(client.cancel, link), more_tries), Unreachable):
                gone.add(link)
    forget(paths, gone)
    return tuple(link for link in jobs if link in gone)


def forget(paths: RunPaths, jobs: Collection[str]) -> None:
    """The run does not go on in these jobs: they were cancelled."""
    with contextlib.suppress(OSError):
        if links(paths):
            write_json(paths.chain, {"links": [link for link in links(paths) if link not in jobs]})
    with contextlib.suppress(OSError, RunFolderError, KeyError):
        if read_json(paths.again)["job_id"] in jobs:
            paths.again.unlink()


def waits_in(paths: RunPaths, job_id: str, code: int) -> str:
    """The job in which a run that has ended with this code in this job goes on; '' when it does not."""
    if code in FINISHED:
        return ""
    with contextlib.suppress(RunFolderError, KeyError):
        said = read_json(paths.again)
        if said["after"] == job_id:
            return str(said["job_id"])
    return next(iter(links_after(paths, job_id)), "")


def _answer(
    order: Callable[[], Done | Unknown | Unreachable], more_tries: Iterator[int]
) -> Done | Unknown | Unreachable:
    """Slurm's answer to an order. One that does not answer is asked again: the job's time is not quite over yet."""
    answer = order()
    while isinstance(answer, Unreachable) and next(more_tries, None) is not None:
        time.sleep(REQUEUE_PAUSE)
        answer = order()
    return answer


def is_over(paths: RunPaths, surroundings: Mapping[str, str]) -> str:
    """Why a later link, or a job that was put back into the queue, has nothing to do; or ''."""
    later = surroundings.get(env.CHAIN, "") not in ("", "1")  # the first link of a chain may begin anew
    again = later or surroundings.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
    if not again:
        return ""
    last = None
    for event in read(paths.events):
        if event.kind in (Kind.RUN_STARTED, Kind.RUN_ENDED):
            last = event
    if last is None or last.kind is not Kind.RUN_ENDED:
        return ""
    code = last.data.get("code")
    if code in FINISHED:
        return f"the run has ended already, with exit code {code}: nothing is left to do"
    if later and isinstance(code, int) and ending(read(paths.events), code).stopped:  # Slurm did not cancel this link
        return f"the run was stopped by somebody, with exit code {code}: the rest of its chain has nothing to do"
    return ""
