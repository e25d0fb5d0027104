"""Rows that squeue and sacct print, read as text.

Text is asked for in the same form from every release, since --json changes its shape from one to the next. Two marks
make it safe. A bar ends each field that Slurm makes up itself (ids, states, times), where it cannot occur. Free
text comes last and ends with the unit separator (0x1f), and so does the row: a job's name may hold bars, blanks,
line breaks and bytes that are no UTF-8, and is still one field of one row.

Around the rows there may be others' words: `CLUSTER: name` headings of --clusters, and what a site's wrapper says. A
row is what has all fields in it; the rest is chatter. An answer in which there is chatter and no row is not
an answer, so `jobs` and its like give None for it, and an empty list where nothing was said at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from slurm_ft.slurm import units
from slurm_ft.slurm.states import parse_exit_code, parse_state
from slurm_ft.slurm.views import AccountRow, JobView, StepView

SEPARATOR = "\x1f"

JOB_FIELDS = (
    "jobid",
    "jobarrayid",
    "state",
    "reason",
    "numnodes",
    "nodelist",
    "timelimit",
    "timeleft",
    "restartcnt",
    "requeue",
    "exit_code",
)
# A colon with no width means: do not cut. The bar ends each field, the last one too.
JOB_FORMAT = ",".join(f"{field}:|" for field in JOB_FIELDS)
NAMED_FORMAT = f"{JOB_FORMAT},name:{SEPARATOR}"

STEP_FORMAT = f"%i|%N|%j{SEPARATOR}"

ACCOUNT_FIELDS = (
    "jobid",
    "state",
    "exitcode",
    "derivedexitcode",
    "nnodes",
    "nodelist",
    "start",
    "end",
    "elapsedraw",
    "maxrss",
    "cluster",
    "jobname",
)

TIME_FORMAT = {"SLURM_TIME_FORMAT": "%s"}
"""The environment for sacct: seconds since 1970, which no time zone changes."""

Row = TypeVar("Row", JobView, StepView, AccountRow)

_HEADING = re.compile(r"^CLUSTER: .*\n?", re.MULTILINE)


def jobs(out: str, named: bool = False) -> list[JobView] | None:
    """The rows of `squeue --Format=JOB_FORMAT`, or NAMED_FORMAT."""
    count = len(JOB_FIELDS)
    found = [_job(dict(zip((*JOB_FIELDS, "name"), row, strict=False))) for row in _rows(out, count, "|", named)]
    return _checked(out, [view for view in found if view is not None])


def steps(out: str) -> list[StepView] | None:
    """The rows of `squeue --steps --format=STEP_FORMAT`."""
    return _checked(out, [StepView(row[0], row[2], row[1]) for row in _rows(out, 2, "|", True)])


def account(out: str) -> list[AccountRow] | None:
    """The rows of `sacct --parsable --delimiter=SEPARATOR --format=ACCOUNT_FIELDS`."""
    rows = _rows(out, len(ACCOUNT_FIELDS) - 1, SEPARATOR, True)
    found = [_account(dict(zip(ACCOUNT_FIELDS, row, strict=True))) for row in rows]
    return _checked(out, [row for row in found if row is not None])


_PAIR = re.compile(r"(?:^|(?<=\s))([A-Z][A-Za-z:/_]*)=(.*?)(?=\s[A-Z][A-Za-z:/_]*=|\s*$)", re.DOTALL)


def scontrol(out: str) -> list[JobView] | None:
    """The jobs of `scontrol --oneliner show job`: one line each, but for line breaks in a name."""
    found = []
    for text in re.split(r"^(?=JobId=[0-9])", out, flags=re.MULTILINE)[1:]:
        # The name is free text: it may look like fields, and ends where the next real one stands.
        name, found_name, rest = text.partition(" UserId=")
        head, _, name = name.partition(" JobName=")
        pairs = dict(_PAIR.findall(f"{head} UserId={rest}")) if found_name else {}
        view = _scontrol_job(pairs, name)
        if view is not None:
            found.append(view)
    return _checked(out, found)


def _scontrol_job(pairs: Mapping[str, str], name: str) -> JobView | None:
    try:
        nodes, restarts = count(pairs["NumNodes"]), int(pairs["Restarts"])
        limit, ran = units.read_time(pairs["TimeLimit"]), units.read_time(pairs["RunTime"])
        field, job = parse_state(pairs["JobState"]), pairs["JobId"].split()[0]
    except (KeyError, ValueError, IndexError):
        return None
    known = isinstance(limit, int) and isinstance(ran, int)
    array, task = pairs.get("ArrayJobId"), pairs.get("ArrayTaskId", "")
    het, offset = pairs.get("HetJobId"), pairs.get("HetJobOffset")
    array_id = f"{array}_{task if task.isdigit() else f'[{task}]'}" if array else f"{het}+{offset}" if het else job
    return JobView(
        job_id=job,
        state=field,
        reason=pairs.get("Reason", "None"),
        nodes=nodes,
        nodelist=hosts(pairs.get("NodeList", "")),
        time_limit=limit,
        time_left=max(0, limit - ran) if known and field.state.running else limit,  # type: ignore[operator]
        restarts=restarts,
        requeue=pairs.get("Requeue") == "1",
        exit_code=parse_exit_code(pairs.get("ExitCode", "")),
        array_id=array_id,
        name=name,
    )


def _checked(out: str, found: list[Row]) -> list[Row] | None:
    return found if found or not _HEADING.sub("", out).strip() else None


def _rows(out: str, count: int, mark: str, free: bool) -> Iterator[Sequence[str]]:
    """Rows of `count` fields that end with `mark` each and, if `free`, one of free text after them."""
    field = rf"[^{mark}\n]*{re.escape(mark)}"
    # Ids begin with a number: words of others do not, and need not end with a line break either.
    start = rf"(?P<fields>[0-9]{field}(?:{field}){{{count - 1}}})"
    end = rf"(?P<free>[^{SEPARATOR}]*){SEPARATOR}" if free else r"(?P<free>)$"
    for match in re.finditer(rf"^{start}{end}", out, re.MULTILINE):
        fields = match["fields"].split(mark)[:-1]
        yield [*(text.strip() for text in fields), match["free"]] if free else [text.strip() for text in fields]


def _job(row: Mapping[str, str]) -> JobView | None:
    try:
        nodes, restarts = count(row["numnodes"]), int(row["restartcnt"])
    except ValueError:
        return None
    return JobView(
        job_id=row["jobid"],
        state=parse_state(row["state"]),
        reason=row["reason"],
        nodes=nodes,
        nodelist=hosts(row["nodelist"]),
        time_limit=units.read_time(row["timelimit"]),
        time_left=units.read_time(row["timeleft"]),
        restarts=restarts,
        requeue=row["requeue"] == "1",
        exit_code=parse_exit_code(row["exit_code"]),
        array_id=row["jobarrayid"],
        name=row.get("name", ""),
    )


def _account(row: Mapping[str, str]) -> AccountRow | None:
    job, _, step = row["jobid"].partition(".")
    try:
        nodes, elapsed = count(row["nnodes"] or "0"), int(row["elapsedraw"] or 0)
    except ValueError:
        return None
    return AccountRow(
        job_id=job,
        step=step,
        name=row["jobname"],
        state=parse_state(row["state"]),
        exit_code=parse_exit_code(row["exitcode"]),
        derived=parse_exit_code(row["derivedexitcode"]),
        nodes=nodes,
        nodelist=hosts(row["nodelist"]),
        start=moment(row["start"]),
        end=moment(row["end"]),
        elapsed=elapsed,
        memory=units.read_memory(row["maxrss"]),
        cluster=row["cluster"],
    )


def count(text: str) -> int:
    """Read a number of nodes: the least of a range, and 2K for 2048, as squeue writes round numbers."""
    number = text.split("-")[0]
    return int(number[:-1]) * 1024 if number.endswith("K") else int(number)


def hosts(text: str) -> str:
    """A hostlist, or '' for what Slurm writes where there is none."""
    return "" if text in ("(null)", "None assigned", "None", "N/A") else text


def moment(text: str) -> float | None:
    """Seconds since 1970; None for Unknown, None and 0, which stand for a time that has not come."""
    return float(text) if text.isdigit() and int(text) else None
