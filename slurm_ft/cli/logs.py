"""`slurm-ft logs`: what the ranks write."""

from __future__ import annotations

import sys

import click

from slurm_ft.cli import common
from slurm_ft.observe import logs, runs

FOLLOWED_LINES = 10


@common.command("logs", examples=("slurm-ft logs 2/0 -n 50", "slurm-ft logs titan-4711 -f"))
@common.run_argument
@click.argument("replica", required=False, metavar="[REPLICA[/RANK]]")
@click.option("-f", "--follow", "following", is_flag=True, help="Print what is added until the run ends.")
@click.option("--attempt", type=click.IntRange(min=1), metavar="N", help="This attempt; the last one by default.")
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), metavar="LINES",
    help=f"The last LINES of each log; all by default, {FOLLOWED_LINES} with --follow.",
)  # fmt: skip
def command(
    run: str | None, replica: str | None, runs_folder: str, following: bool, attempt: int | None, lines: int | None
) -> None:
    """Print or follow what the ranks write.

    REPLICA is a selector such as 2, 2/0 or 1,3-5; all replicas by default. Lines of several ranks are
    labelled with their replica and rank. One argument alone is a RUN if there is such a run, else a REPLICA.
    """
    run, replica = runs.split_arguments(run, replica, runs_folder, logs.TARGET)
    paths = runs.find(run, runs_folder)
    target = logs.Target.parse(replica, attempt)
    out = sys.stdout.buffer
    if not following:
        logs.show(logs.find(paths, target), out, lines)
        return
    logs.follow(
        paths, target, out, runs.Over(paths), lines=FOLLOWED_LINES if lines is None else lines, say=common.say
    )  # fmt: skip
