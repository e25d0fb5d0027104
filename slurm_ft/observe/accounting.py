"""Slurm's accounting of a run beside what the run itself knows.

Slurm keeps one row for a job and one for each of its steps; slurm-ft's own steps are known by their names
(`sft-r2-s1`: replica 2, step 1). The two books differ by design, and this page says how:

- a failure that was repaired in place is in no row, since the step went on;
- a step that was replaced ended badly, and its row stays: so a run that repaired itself and ended with 0 has a
  derived exit code that looks like a failure. Slurm's derived exit code is the highest of the exit codes of all
  steps of a job, and says nothing of the run;
- steps of the same name (a requeued job begins anew) are told apart by the order of their starts.

`reconcile` is pure: events and incidents of the run, rows of sacct. Only `ask` asks Slurm.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_ft.errors import TryAgain, UsageError
from slurm_ft.events import Event, Kind
from slurm_ft.observe import text
from slurm_ft.observe.incidents import Incident
from slurm_ft.slurm.client import SlurmClient
from slurm_ft.slurm.states import ExitCode, Phase
from slurm_ft.slurm.views import AccountRow, NoAccounting, Unreachable

NAME = re.compile(r"sft-r([0-9]+)-s([0-9]+)")
NO_SACCT = "the report without --sacct needs none"
COLUMNS = ("STEP", "NAME", "STATE", "EXIT", "HOSTS", "SECONDS", "MAXRSS", "SLURM-FT")


@dataclass(frozen=True)
class Step:
    """A step that the run started, and what became of it by its own word. `row` is Slurm's, where there is one."""

    job_id: str
    replica: int
    number: int
    hosts: tuple[str, ...]
    launched: float
    ended: str
    incidents: tuple[Incident, ...]
    row: AccountRow | None

    @property
    def name(self) -> str:
        return f"sft-r{self.replica}-s{self.number}"

    @property
    def words(self) -> str:
        """What slurm-ft knows of it, in short."""
        repaired = [f"{incident.label} {incident.cause}, {_repair(incident)}" for incident in self.incidents]
        return "; ".join(repaired or [self.ended or "runs"])


@dataclass(frozen=True)
class Accounts:
    """Both books side by side: jobs and other rows of Slurm's, the run's own steps, and what needs an explanation."""

    jobs: tuple[AccountRow, ...]
    steps: tuple[Step, ...]
    others: tuple[AccountRow, ...]
    notes: tuple[str, ...]


def job_ids(events: Iterable[Event]) -> list[str]:
    """The Slurm jobs of a run, in their order; a requeued job once."""
    ids = (str(event.data.get("job_id", "")) for event in events if event.kind is Kind.RUN_STARTED)
    return list(dict.fromkeys(job for job in ids if job and not job.startswith("L")))


def ask(events: Sequence[Event], cluster: str = "", client: SlurmClient | None = None) -> list[AccountRow]:
    """Slurm's rows for all jobs of a run.

    Raises UsageError for a run that was no Slurm job and on a cluster that keeps no accounting, TryAgain where the
    accounting does not answer.
    """
    jobs = job_ids(events)
    if not jobs:
        raise UsageError("this run had no Slurm job, so Slurm has no accounting of it", NO_SACCT)
    client = client or SlurmClient(cluster=cluster)
    found: list[AccountRow] = []
    for job in jobs:
        answer = client.account(job)
        if isinstance(answer, NoAccounting):
            raise UsageError(f"this cluster keeps no accounting: {answer.reason}", NO_SACCT)
        if isinstance(answer, Unreachable):
            raise TryAgain(f"Slurm's accounting gives no answer: {answer.reason}", NO_SACCT)
        found += answer
    return found


def reconcile(
    events: Sequence[Event], incidents: Sequence[Incident], rows: Sequence[AccountRow], code: int | None
) -> Accounts:
    """Put the rows beside the steps. `code` is the run's exit code, None while it goes on."""
    by_name: dict[tuple[str, str], list[AccountRow]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.start or float("inf")):
        if row.step and NAME.fullmatch(row.name):
            by_name[row.job_id, row.name].append(row)
    steps = []
    for step in _steps(events, incidents):
        found = by_name[step.job_id, step.name]
        steps.append(Step(**{**vars(step), "row": found.pop(0) if found else None}))
    jobs = tuple(row for row in rows if not row.step)
    others = tuple(row for found in by_name.values() for row in found)
    return Accounts(jobs, tuple(steps), others, tuple(_notes(jobs, steps, others, code)))


def _steps(events: Sequence[Event], incidents: Sequence[Incident]) -> list[Step]:
    job, started = "", []
    ends: dict[tuple[str, int, int], str] = {}
    for event in events:
        if event.kind is Kind.RUN_STARTED:
            job = str(event.data.get("job_id", ""))
        elif event.replica is not None and event.kind is Kind.STEP_LAUNCHED:
            started.append((job, event))
            ends.pop((job, event.replica, _number(event)), None)
        elif event.replica is not None and event.kind is Kind.STEP_EXITED:
            code = event.data.get("code")
            ends[job, event.replica, _number(event)] = "ended well" if code == 0 else str(event.data.get("what", ""))
    steps = []
    for position, (job, event) in enumerate(started):
        assert event.replica is not None
        later = (other.t for _, other in started[position + 1 :] if other.replica == event.replica)
        until = next(later, float("inf"))
        own = [i for i in incidents if i.replica == event.replica and event.t <= i.failed < until]
        hosts = tuple(str(host) for host in event.data.get("hosts") or ())
        ended = ends.get((job, event.replica, _number(event)), "")
        steps.append(Step(job, event.replica, _number(event), hosts, event.t, ended, tuple(own), None))
    return steps


def _number(event: Event) -> int:
    value = event.data.get("step")
    return value if isinstance(value, int) else 0


def _repair(incident: Incident) -> str:
    return f"repaired {incident.rung}".strip() if incident.outcome == "healed" else incident.outcome


# --- notes -------------------------------------------------------------------------------------------------------


def _notes(
    jobs: Sequence[AccountRow], steps: Sequence[Step], others: Sequence[AccountRow], code: int | None
) -> Iterable[str]:
    for job in jobs:
        yield from _derived(job, steps, code)
    inside = sum(1 for step in steps for incident in step.incidents if "in place" in incident.rung)
    if inside:
        which = text.plural(inside, "failure")
        yield f"{which} repaired in place: the step went on, so Slurm has no row of {'it' if inside == 1 else 'them'}"
    if missing := [step.name for step in steps if step.row is None]:
        known = {job.job_id for job in jobs}
        late = "the accounting lags by some seconds" if {s.job_id for s in steps} <= known else "the job has no row yet"
        yield f"no row for {', '.join(missing)}: {late}, or the step was never started"
    for row in others:
        yield f"step {row.id} ({row.name}) is in Slurm's book and not in the run's"
    for step in steps:
        if step.row is not None and step.ended and step.row.state.state.phase is Phase.RUNNING:
            yield f"step {step.row.id} still runs by Slurm's book, and has ended by the run's: the accounting lags"
    if any(job.state.raw.upper().startswith("REQUEUED") for job in jobs):
        yield "the job was put back into the queue: it has one row for each time it ran"


def _derived(job: AccountRow, steps: Sequence[Step], code: int | None) -> Iterable[str]:
    """Why the derived exit code says failure where the run says none."""
    derived = job.derived
    if derived is None or derived == ExitCode(0, 0) or code != 0:
        return
    bad = [step for step in steps if step.row is not None and step.row.job_id == job.job_id and _is(step, derived)]
    said = f"job {job.job_id} has the derived exit code {derived.pair} ({derived.words}), and the run ended with 0"
    why = "Slurm takes the highest exit code of all steps, also of one that was replaced"
    if bad and bad[0].row is not None:
        name = f"step {bad[0].row.id} ({bad[0].name})"
        yield f"{said}: it is that of {name}, {bad[0].words}. {why}; the run's own exit code is the job's"
    else:
        yield f"{said}: {why}"


def _is(step: Step, code: ExitCode) -> bool:
    return step.row is not None and step.row.exit_code == code


# --- text and JSON -----------------------------------------------------------------------------------------------


def lines(accounts: Accounts) -> list[str]:
    """As text, below the report."""
    shown = ["", "Slurm's accounting:"]
    for job in accounts.jobs:
        code = job.exit_code.pair if job.exit_code else "-"
        derived = job.derived.pair if job.derived else "-"
        shown.append(
            f"  job {job.job_id}  {job.state.raw}  exit code {code}  derived {derived}  {job.nodelist or '-'}"
            f"  {text.short(float(job.elapsed))}"
        )
    rows = [text.cells(COLUMNS, _cells(step)) for step in accounts.steps]
    shown += ["", *text.table(COLUMNS, rows, frozenset({"SECONDS", "MAXRSS"}))]
    shown += [f"note: {text.clean(note)}" for note in accounts.notes]
    return shown


def _cells(step: Step) -> Mapping[str, Any]:
    row = step.row
    return {
        "STEP": row.id if row else "-",
        "NAME": step.name,
        "STATE": row.state.raw if row else "-",
        "EXIT": row.exit_code.pair if row and row.exit_code else "-",
        "HOSTS": row.nodelist if row else ",".join(step.hosts),
        "SECONDS": str(row.elapsed) if row else "-",
        "MAXRSS": "-" if row is None or row.memory is None else f"{row.memory}M",
        "SLURM-FT": step.words,
    }


def to_json(accounts: Accounts) -> dict[str, Any]:
    """The key `accounting` of `slurm-ft report --sacct --json`."""
    return {
        "jobs": [_row_json(row) for row in accounts.jobs],
        "steps": [
            {
                "job_id": step.job_id,
                "name": step.name,
                "replica": step.replica,
                "hosts": list(step.hosts),
                "launched": text.iso(step.launched),
                "ended": step.ended,
                "incidents": [f"{incident.label} {incident.cause}" for incident in step.incidents],
                "slurm": None if step.row is None else _row_json(step.row),
            }
            for step in accounts.steps
        ],
        "others": [_row_json(row) for row in accounts.others],
        "notes": list(accounts.notes),
    }


def _row_json(row: AccountRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "name": row.name,
        "state": row.state.state.name,
        "cancelled_by": row.state.cancelled_by,
        "exit_code": row.exit_code.pair if row.exit_code else None,
        "derived_exit_code": row.derived.pair if row.derived else None,
        "nodelist": row.nodelist,
        "start": text.iso(row.start),
        "end": text.iso(row.end),
        "elapsed": row.elapsed,
        "max_rss_mib": row.memory,
    }
