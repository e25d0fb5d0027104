"""A run, held by Python: its status, its end, its logs, its events. Reads the run folder, from any process."""

from __future__ import annotations

import asyncio
import contextlib
import html
import io
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

from slurm_ft import errors
from slurm_ft.events import Event, Follower, Kind
from slurm_ft.observe import logs, report, requests, runs, status
from slurm_ft.observe.last_words import last_words
from slurm_ft.observe.report import Report
from slurm_ft.observe.status import Snapshot
from slurm_ft.paths import RunPaths, read_json
from slurm_ft.slurm.client import cluster_of
from slurm_ft.spec import RunSpec
from slurm_ft.submit.slurm_job import JobWatch

POLL_SECONDS = 0.2
LAST_WORDS_SECONDS = 5.0


class Run:
    """A run that was submitted, wherever it runs and whoever submitted it.

    `attach` finds one by its folder, its name, its job's id, or `last`.
    """

    def __init__(self, folder: str | Path, job_id: str = "", since: int = 0, cluster: str = "") -> None:
        """What stands before the byte `since` of its log is of earlier sessions, which are over. `cluster` is where
        its job is on a site with several, if another than the one that is asked first."""
        self.paths = RunPaths(folder)
        self._job_id, self._since, self._cluster = job_id, since, cluster

    @classmethod
    def attach(cls, run: str | Path = "last", runs_folder: str | Path = "runs") -> Run:
        """Raises RunFolderError, with a hint that lists close names, when there is no such run."""
        return cls(runs.find(str(run), runs_folder, {}).root)

    @property
    def spec(self) -> RunSpec:
        """What was asked for."""
        return RunSpec.from_json(read_json(self.paths.spec))

    @property
    def job_id(self) -> str:
        """The Slurm job, `L<n>` for a run on this machine, or '' when it is not known yet."""
        return self._job_id or self.status().job_id

    @property
    def exit_code(self) -> int | None:
        """The exit code of a run that has ended, else None."""
        if not self._since:
            return self.status().ended
        code = None
        for event in Follower(self.paths.events, self._since).news():
            if event.kind in (Kind.RUN_STARTED, Kind.RUN_ENDED):
                code = event.data.get("code")
        return code

    def status(self) -> Snapshot:
        """The run as of now: its state and a row for each replica. Cheap: one small file."""
        return runs.read(self.paths, time.time()).snapshot

    def report(self) -> Report:
        """Its incidents, goodput and figures up to now, as `slurm-ft report` has them."""
        computed = report.compute(runs.ledger_of(self.paths), runs.policy_of(self.paths)[0])
        return replace(computed, snapshot=runs.named_by_spec(computed.snapshot, self.paths))

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; gives the exit code. Raises TimeoutError after `timeout` seconds, RunFailed for a run
        that everybody has left without its having ended."""
        give_up = None if timeout is None else time.monotonic() + timeout
        code = None
        for news in self._news():
            for event in news:
                if event.kind in (Kind.RUN_STARTED, Kind.RUN_ENDED):
                    code = event.data.get("code")
            if code is not None:
                self._await_last_words()
                return int(code)
            if give_up is not None and time.monotonic() > give_up:
                raise TimeoutError(f"run {self.paths.root.name} has not ended within {timeout:g} s")
            time.sleep(POLL_SECONDS)
        return self._code()

    def result(self, timeout: float | None = None) -> Report:
        """Wait for the end and give the report.

        Raises the error that the exit code stands for, with the first failure and its traceback in it: RunFailed,
        TryAgain (75), Permanent (93), LaunchError (97); TimeoutError after `timeout` seconds.
        """
        code = self.wait(timeout)
        if code:
            kind = _ERRORS.get(code, errors.RunFailed)
            words = "\n".join(last_words(self.paths, code)) or f"run ended with exit code {code}"
            raise kind(words, f"see `slurm-ft report {self.paths.root}`")
        return self.report()

    def logs(self, replica: int = 0, rank: int = 0, attempt: int | None = None, lines: int | None = None) -> str:
        """What a rank has written, of its newest attempt if not told otherwise; the last `lines` of it if told.

        Raises RunFolderError, which lists what there is, when there is no such log.
        """
        out = io.BytesIO()
        logs.show(logs.find(self.paths, logs.Target.parse(f"{replica}/{rank}", attempt)), out, lines)
        return out.getvalue().decode(errors="replace")

    async def events(self) -> AsyncIterator[Event]:
        """All its events, as they come, until it ends or is left by everybody."""
        for news in self._news():
            for event in news:
                yield event
            await asyncio.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Ask it to stop in order; `wait` tells when it has."""
        requests.stop(self.paths)

    def cancel(self) -> str:
        """End it now: scancel, or TERM to the head of a local run. Gives what was done. Raises RunFailed when there
        is nobody to end, TryAgain when Slurm does not answer."""
        snapshot = requests.settled(self.paths, requests.Patience(requests.SETTLES_FOR_CANCEL))
        code = None if runs.is_held(self.paths, time.time()) else self.exit_code
        if self._since and self._job_id:  # what is there may still be of an earlier session
            snapshot = replace(snapshot, job_id=self._job_id)
        if code is not None and not requests.waits_in(self.paths, snapshot, self._cluster):
            return f"it has ended already, with exit code {code}"
        return requests.cancel(self.paths, requests.plan_cancel(self.paths, snapshot), self._cluster)

    def _news(self) -> Iterator[list[Event]]:
        """What is new, again and again; ends with the run. What was written up to the end is given."""
        follower, gone = Follower(self.paths.events, self._since), self._gone()
        ended = False
        while not ended:
            last = gone()
            news = follower.news()
            for event in news:
                if event.kind in (Kind.RUN_STARTED, Kind.RUN_ENDED):
                    ended = event.kind is Kind.RUN_ENDED
            ended = ended or last
            yield news

    def _await_last_words(self) -> None:
        """The event of the end comes a moment before `state.json` says so, and what is asked next is read there."""
        give_up = time.monotonic() + LAST_WORDS_SECONDS
        while self.status().ended is None and time.monotonic() < give_up:
            time.sleep(POLL_SECONDS)

    def _gone(self) -> Callable[[], bool]:
        """Has everybody left the run? Of a Slurm job that has not begun, Slurm is asked now and then."""
        cluster = "local"
        with contextlib.suppress(errors.SlurmFTError):
            cluster = self.spec.cluster
        if cluster == "local" or not self._job_id:
            return runs.Gone(self.paths)
        return JobWatch(self.paths, self._job_id, lambda words: None, cluster=self._cluster or cluster_of(os.environ))

    def _code(self) -> int:
        code = self.status().ended
        if code is None:
            raise errors.RunFailed(
                f"run {self.paths.root.name} was left by everybody without having ended",
                f"see `slurm-ft explain {self.paths.root}`",
            )
        return code

    def __repr__(self) -> str:
        snapshot = self.status()
        step = f", step {snapshot.step}" if snapshot.step is not None else ""
        return f"<Run {self.paths.root.name}: {snapshot.state(self._alive(snapshot))}{step}>"

    def _repr_html_(self) -> str:
        """In a notebook: the table of `slurm-ft status`."""
        snapshot, now = self.status(), time.time()
        top = status.headline(snapshot, now, self._alive(snapshot))
        names = status.COLUMNS
        head = "".join(f"<th>{name}</th>" for name in names)
        cells = (status.values(row, now) for row in snapshot.replicas)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(row[n])}</td>" for n in names) + "</tr>" for row in cells)
        return f"<p>{html.escape(top)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _alive(self, snapshot: Snapshot) -> bool | None:
        return runs.is_alive(self.paths, snapshot, time.time())


_ERRORS: dict[int, type[errors.SlurmFTError]] = {
    errors.EXIT_TRY_AGAIN: errors.TryAgain,
    errors.EXIT_PERMANENT: errors.Permanent,
    errors.EXIT_LAUNCH: errors.LaunchError,
}
