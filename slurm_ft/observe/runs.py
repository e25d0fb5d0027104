"""Finds runs and reads their folders, whatever state those are in.

A run folder is one that holds `run.json`, `events.jsonl` or `state.json`. RUN on the command line is a folder,
a run's name, a job id or `last`; without it $SLURM_FT_RUN, then $SLURM_JOB_ID, then `last` is meant. Of
several runs that fit, the newest is taken.

Nothing here writes.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_ft import env, events, lease
from slurm_ft.errors import RunFolderError, SlurmFTError
from slurm_ft.lease import Claim
from slurm_ft.observe.ledger import Ledger
from slurm_ft.observe.status import STALE_SECONDS, Snapshot, from_ledger, from_state
from slurm_ft.observe.text import SELECTOR
from slurm_ft.paths import RunPaths, read_json
from slurm_ft.spec import Policy, RunSpec

LAST = "last"
SHOWN = 5
LEFT_SECONDS = 40.0
"""Seconds after a head's last renewal in which another one may still take over: the policy's usual `head_timeout`
of 10 s, the agents' turns, and the start of a head."""


FULL_BYTES = 64 << 10
"""With less room than this a file system is full: an event or a state may not fit."""


def is_run(folder: Path) -> bool:
    paths = RunPaths(folder)
    return any(_is_file(path) for path in (paths.spec, paths.events, paths.state))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def age_of(folder: Path) -> float:
    """When a run was made: `run.json` is written once, at its start."""
    paths = RunPaths(folder)
    for path in (paths.spec, paths.events, paths.state):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def all_runs(runs: Path) -> list[Path]:
    """The run folders in a folder, the newest first."""
    try:
        found = [item for item in runs.iterdir() if item.is_dir() and is_run(item)]
    except OSError:
        return []
    return sorted(found, key=lambda folder: (age_of(folder), folder.name), reverse=True)


def find(run: str | None, runs: str | Path, environment: Mapping[str, str] | None = None) -> RunPaths:
    """The run that is meant. Raises RunFolderError, with a hint that lists close or recent ones."""
    environment = os.environ if environment is None else environment
    folder = Path(runs)
    if run:
        return RunPaths(_named(run, folder))
    if environment.get(env.RUN):
        return RunPaths(_named(environment[env.RUN], folder))
    job = environment.get("SLURM_JOB_ID")
    if job and (found := _search(job, all_runs(folder))) is not None:
        return RunPaths(found)
    return RunPaths(_named(LAST, folder))


def exists(run: str, runs: str | Path) -> bool:
    """Is there such a run? Tells a RUN from a replica selector where one argument could be both."""
    try:
        find(run, runs, {})
    except RunFolderError:
        return False
    return True


def _named(run: str, runs: Path) -> Path:
    direct = Path(run)
    if run != LAST and is_run(direct):
        return direct
    known = all_runs(runs)
    if run == LAST:
        if known:
            return known[0]
        raise RunFolderError(f"there is no run in `{runs}`", _hint_for_none(runs))
    found = _search(run, known)
    if found is not None:
        return found
    if direct.is_dir() and ("/" in run or not known):
        raise RunFolderError(f"`{run}` is not the folder of a run: it holds no run.json", _hint(run, known, runs))
    raise RunFolderError(f"there is no run `{run}` in `{runs}`", _hint(run, known, runs))


def _search(run: str, known: list[Path]) -> Path | None:
    """A run by folder name or job id, then by the name it was given. `known` is sorted, the newest first."""
    by_folder = (folder for folder in known if folder.name == run or folder.name.endswith(f"-{run}"))
    found = next((folder for folder in by_folder if folder.name == run or _looks_like_job(run)), None)
    if found is not None:
        return found
    return next((folder for folder in known if run in _names(folder)), None)


def _looks_like_job(run: str) -> bool:
    """`123`, `123_4` of an array, or `L123` of a local run."""
    return re.fullmatch(r"L?\d+(_\d+)?", run) is not None


def job_in_name(folder: Path) -> str:
    """The job id at the end of a run folder's name, or ''."""
    tail = folder.name.rpartition("-")[2]
    return tail if tail != folder.name and _looks_like_job(tail) else ""


def _names(folder: Path) -> set[str]:
    """The name and the job that a run's own files give."""
    paths, names = RunPaths(folder), set()
    for path in (paths.spec, paths.state):
        with contextlib.suppress(RunFolderError):
            value = read_json(path)
            names |= {str(value[key]) for key in ("name", "job_id") if value.get(key) not in (None, "")}
    return names


def _hint(run: str, known: list[Path], runs: Path) -> str:
    if not known:
        return _hint_for_none(runs)
    names = [folder.name for folder in known]
    close = difflib.get_close_matches(run, names, SHOWN, 0.5)
    return f"close: {', '.join(close)}" if close else f"the newest runs are: {', '.join(names[:SHOWN])}"


def _hint_for_none(runs: Path) -> str:
    what = "it does not exist" if not runs.is_dir() else "it is empty of runs"
    return f"{what}; name the folder of a run, or the folder of all runs with --runs or ${env.RUNS}"


# --- reading one run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """What could be read of a run, and in `troubles` what could not."""

    snapshot: Snapshot
    troubles: tuple[str, ...] = ()


def policy_of(paths: RunPaths) -> tuple[Policy, str]:
    """The policy in a run's `run.json`, or the usual one and what is wrong with the file."""
    try:
        return RunSpec.from_json(read_json(paths.spec)).policy, ""
    except SlurmFTError as error:
        return Policy(), f"{error.message.splitlines()[0]}: the usual policy is assumed"


def ledger_of(paths: RunPaths) -> Ledger:
    return Ledger(events.read(paths.events))


def read(paths: RunPaths, now: float) -> Reading:
    """The status of a run: from `state.json`, or from the events where that file is missing or damaged."""
    try:
        snapshot = from_state(read_json(paths.state))
    except RunFolderError as error:
        if not _is_file(paths.events):
            return Reading(_from_spec(paths), () if not paths.state.exists() else (error.message,))
        words = (f"{error.message}: the status is computed from events.jsonl",) if paths.state.exists() else ()
        return Reading(_from_events(ledger_of(paths), paths, now), words)
    return Reading(_with_reasons(_ended_by_log(snapshot, paths, now), paths, now))


def late_news(paths: RunPaths, snapshot: Snapshot, now: float, alive: bool | None) -> str:
    """Why the newest state of a run that is looked after is old, or ''."""
    age = snapshot.age(now)
    if snapshot.ended is not None or not alive or age is None or age <= STALE_SECONDS:
        return ""
    try:
        space = os.statvfs(paths.root)
        full = space.f_bavail * space.f_frsize < FULL_BYTES or (space.f_files > 0 and space.f_favail == 0)
    except OSError:
        full = False
    why = "the file system of the run folder is full" if full else "does its head host still write to the run folder?"
    return f"the last news are {age:.0f} s old and the run is looked after: {why}"


def _with_reasons(snapshot: Snapshot, paths: RunPaths, now: float) -> Snapshot:
    """A controller has no reason to give once its run has ended; the events still tell why."""
    if snapshot.ended is None or all(row.reason for row in snapshot.replicas) or not _is_file(paths.events):
        return snapshot
    reasons = {row.id: row.reason for row in _from_events(ledger_of(paths), paths, now).replicas}
    rows = (row if row.reason else replace(row, reason=reasons.get(row.id, "")) for row in snapshot.replicas)
    return replace(snapshot, replicas=tuple(rows))


def _from_events(ledger: Ledger, paths: RunPaths, now: float) -> Snapshot:
    # Without fresh news the reasons are those of the last news: "it trains since" must not count on for ever.
    fresh = ledger.last is None or now - ledger.last <= STALE_SECONDS
    moment = now if fresh or ledger.last is None else ledger.last
    return named_by_spec(from_ledger(ledger, moment, policy_of(paths)[0]), paths)


def _from_spec(paths: RunPaths) -> Snapshot:
    """A run that has not said anything yet."""
    return named_by_spec(Snapshot(t=None), paths)


def named_by_spec(snapshot: Snapshot, paths: RunPaths) -> Snapshot:
    if snapshot.name:
        return snapshot
    with contextlib.suppress(RunFolderError):
        value = read_json(paths.spec)
        return replace(snapshot, name=str(value.get("name", "")), cluster=str(value.get("cluster", "")))
    return snapshot


def _ended_by_log(snapshot: Snapshot, paths: RunPaths, now: float) -> Snapshot:
    """A controller that was killed between its last event and its last state leaves an old state: when the
    state is old and says that the run goes on, the events decide."""
    age = snapshot.age(now)
    if snapshot.ended is not None or (age is not None and age <= STALE_SECONDS) or not _is_file(paths.events):
        return snapshot
    with contextlib.suppress(OSError):
        if snapshot.t is not None and paths.events.stat().st_mtime <= snapshot.t:
            return snapshot
    ledger = ledger_of(paths)
    if ledger.last is None or (snapshot.t is not None and ledger.last <= snapshot.t):
        return snapshot
    return _from_events(ledger, paths, now)


# --- is somebody there? ------------------------------------------------------------------------------------


def holder(paths: RunPaths) -> Claim | None:
    """Who looks after a run, or did last."""
    try:
        claim = lease.newest(paths.lease)
    except OSError:
        return None
    return claim if claim is not None and claim.pid else None


def is_held(paths: RunPaths, now: float) -> bool:
    """Does a head look after the run, or may one take over soon? Where that cannot be told, the answer is yes:
    the careful one. A head on another machine is judged by the age of its last renewal."""
    try:
        claim = lease.newest(paths.lease)
        if claim is None or claim.ended is not None:
            return False
        if claim.machine == lease.machine() and lease.held_by_process(paths.lease, claim):
            return True
        return now - (paths.lease / str(claim.epoch)).stat().st_mtime <= LEFT_SECONDS
    except OSError:
        return True


def is_alive(paths: RunPaths, snapshot: Snapshot, now: float) -> bool | None:
    """Whether somebody looks after a run. None where fresh news make the test needless."""
    if snapshot.ended is not None:
        return None
    age = snapshot.age(now)
    if age is not None and age <= STALE_SECONDS:
        return None
    return is_held(paths, now)


class Gone:
    """Callable: has a run been left by everybody without ending? For `until` of the live view.

    One without a log has not begun, or its head came and went before it could write one: its lease tells.
    """

    def __init__(self, paths: RunPaths, now: Callable[[], float] = time.time) -> None:
        self._paths, self._now = paths, now

    def __call__(self) -> bool:
        try:
            quiet = self._now() - self._paths.events.stat().st_mtime
        except OSError:
            return holder(self._paths) is not None and not is_held(self._paths, self._now())
        if quiet <= STALE_SECONDS:
            return False
        return _state_is_old(self._paths, self._now()) and not is_held(self._paths, self._now())


class Over:
    """Callable: is a run over, in order or not? For readers that follow something else than its events."""

    def __init__(self, paths: RunPaths, now: Callable[[], float] = time.time) -> None:
        self._events = events.Follower(paths.events)
        self._gone = Gone(paths, now)
        self._ended = False

    def __call__(self) -> bool:
        for event in self._events.news():
            if event.kind in (events.Kind.RUN_STARTED, events.Kind.RUN_ENDED):
                self._ended = event.kind is events.Kind.RUN_ENDED
        return self._ended or self._gone()


def _state_is_old(paths: RunPaths, now: float) -> bool:
    try:
        return now - paths.state.stat().st_mtime > STALE_SECONDS
    except OSError:
        return True


# --- arguments ---------------------------------------------------------------------------------------------


def split_arguments(
    run: str | None, selector: str | None, folder: str | Path, form: re.Pattern[str] = SELECTOR
) -> tuple[str | None, str | None]:
    """RUN and REPLICA, where both may be left out. One argument alone is a RUN if there is such a run, else a
    REPLICA if it has the form of one."""
    if run is not None and selector is None and form.fullmatch(run) and not exists(run, folder):
        return None, run
    return run, selector
