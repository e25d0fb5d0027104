"""`slurm-ft status`: the replicas of a run, like squeue."""

from __future__ import annotations

import sys
import time

import click

from slurm_ft.cli import common
from slurm_ft.observe import runs, status, text
from slurm_ft.observe.follow import follow
from slurm_ft.paths import RunPaths

HISTORY = 10


@common.command(
    "status",
    examples=("slurm-ft status", "slurm-ft status titan-4711 1,3,5-8 --format REPLICA,STATE,STEP --noheader"),
)
@common.run_argument
@click.argument("replicas", required=False, metavar="[REPLICAS]")
@click.option("-f", "--follow", "following", is_flag=True, help="Keep showing the run until it ends.")
@click.option(
    "--format",
    "columns",
    metavar="COL,...",
    help="Columns to show; +COL,... adds TOKENS, PHASE, QUORUM or TIME to the usual ones.",
)
@click.option("--noheader", is_flag=True, help="Print neither the line about the run nor the column names.")
@common.json_option
@click.pass_context
def command(
    ctx: click.Context,
    run: str | None,
    replicas: str | None,
    runs_folder: str,
    following: bool,
    columns: str | None,
    noheader: bool,
    as_json: bool,
) -> None:
    """Show the replicas of a run, like squeue.

    RUN is a folder, a run's name, a job id or `last`; without it $SLURM_FT_RUN, $SLURM_JOB_ID or the last run
    is meant. REPLICAS is a selector such as 2 or 1,3,5-8. It works from the run folder alone, also after the
    run. With --follow the exit code is the run's own.
    """
    run, replicas = runs.split_arguments(run, replicas, runs_folder)
    paths = runs.find(run, runs_folder)
    if following:
        ctx.exit(_follow(paths))
    _print(paths, replicas, columns, noheader, as_json)


def _print(paths: RunPaths, replicas: str | None, columns: str | None, noheader: bool, as_json: bool) -> None:
    now = time.time()
    reading = runs.read(paths, now)
    for trouble in reading.troubles:
        common.say(f"warning: {trouble}")
    alive = runs.is_alive(paths, reading.snapshot, now)
    late = runs.late_news(paths, reading.snapshot, now, alive)
    if late:
        common.say(f"warning: {late}")
    snapshot = status.select(reading.snapshot, replicas)
    if as_json:
        common.print_json(status.to_json(snapshot, now, alive, str(paths.root)))
        return
    lines = status.table(snapshot.replicas, now, text.pick(status.COLUMNS, columns), not noheader)
    if not noheader:
        top = status.headline(reading.snapshot, now, alive)
        click.echo(text.paint(top, status.colour(snapshot.state(alive)), common.coloured()))
    for line in lines:
        click.echo(line)


def _follow(paths: RunPaths) -> int:
    """Show the run until it ends; 1 when nobody looks after it any more."""
    policy, _ = runs.policy_of(paths)
    code = follow(paths, sys.stdout, sys.stdout.isatty(), runs.Gone(paths), history=HISTORY, policy=policy)
    if code is None:
        common.say(f"nobody looks after the run in `{paths.root}` any more, and it has not ended in order")
        return 1
    return code
