"""`slurm-ft cancel`: end a run now."""

from __future__ import annotations

import click

from slurm_ft.cli import common
from slurm_ft.observe import requests, runs


@common.command("cancel", examples=("slurm-ft cancel titan-4711", "slurm-ft cancel last --dry-run"))
@common.run_argument
@common.dry_run_option
def command(run: str | None, runs_folder: str, dry_run: bool) -> None:
    """End a run now: scancel its Slurm job, with all links of its chain, or send TERM to the head of a local run.

    To let the ranks save first, use `slurm-ft stop`.
    """
    paths = runs.find(run, runs_folder)
    snapshot = requests.settled(paths, requests.Patience(requests.SETTLES_FOR_CANCEL))
    if snapshot.ended is not None and not requests.waits_in(paths, snapshot):
        common.say(f"run {paths.root.name} has ended already, with exit code {snapshot.ended}")
        return
    plan = requests.plan_cancel(paths, snapshot)
    if dry_run:
        click.echo(str(plan))
        return
    common.say(f"run {paths.root.name}: {requests.cancel(paths, plan)}")
