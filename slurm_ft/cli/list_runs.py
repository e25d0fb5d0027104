"""`slurm-ft list`: the runs in the runs folder."""

from __future__ import annotations

import time
from pathlib import Path

import click

from slurm_ft.cli import common
from slurm_ft.errors import RunFolderError
from slurm_ft.observe import listing


@common.command("list", examples=("slurm-ft list", "slurm-ft list --runs /shared/runs --json"))
@common.runs_option
@click.option("--noheader", is_flag=True, help="Print no column names.")
@common.json_option
def command(runs_folder: str, noheader: bool, as_json: bool) -> None:
    """List the runs in the runs folder, the newest first.

    STATE carries the exit code of a run that has ended. A run that nobody looks after any more and that has
    not ended in order is DEAD; one that waits for its job to start is WAITING.
    """
    folder, now = Path(runs_folder), time.time()
    if not folder.is_dir():
        raise RunFolderError(f"there is no folder `{folder}`", "name the folder of all runs with --runs")
    found = listing.entries(folder, now)
    for entry in found:
        for trouble in entry.troubles:
            common.say(f"warning: {trouble}")
    if as_json:
        common.print_json(listing.to_json(found, now))
        return
    if not found:
        common.say(f"there are no runs in `{folder}`")
        return
    for line in listing.lines(found, now, not noheader):
        click.echo(line)
