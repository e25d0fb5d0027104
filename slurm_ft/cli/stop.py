"""`slurm-ft stop`: end a run in order."""

from __future__ import annotations

import time

import click

from slurm_ft.cli import common
from slurm_ft.errors import RunFailed
from slurm_ft.observe import requests, runs
from slurm_ft.observe.words import exit_meaning


@common.command("stop", examples=("slurm-ft stop", "slurm-ft stop titan-4711 --no-wait"))
@common.run_argument
@click.option("--no-wait", is_flag=True, help="Ask for it and do not wait for the end.")
@common.dry_run_option
def command(run: str | None, runs_folder: str, no_wait: bool, dry_run: bool) -> None:
    """End a run in order: ranks that can save do so first, then they get TERM.

    It creates the file `stop` in the run folder, so it needs no more rights than that: a colleague who shares
    the folder can `touch` it too.
    """
    paths = runs.find(run, runs_folder)
    if dry_run:
        click.echo(f"touch {paths.stop}")
        return
    snapshot = requests.settled(paths, requests.Patience(requests.SETTLES_WITHIN))
    waits_in = requests.waits_in(paths, snapshot)
    if waits_in:
        requests.stop(paths)
        common.say(
            f"run {paths.root.name} waits in job {waits_in}, and stops as soon as that begins;"
            " `slurm-ft cancel` takes the job out of the queue"
        )
        return
    if snapshot.ended is not None:
        common.say(f"run {paths.root.name} has ended already, with exit code {snapshot.ended}")
        return
    if snapshot.started is not None and runs.is_alive(paths, snapshot, time.time()) is False:
        raise RunFailed(f"nobody looks after run {paths.root.name} any more", "there is nothing to stop")
    requests.stop(paths)
    common.say(f"run {paths.root.name} is asked to stop")
    if no_wait:
        return
    code = requests.await_end(paths, runs.Gone(paths))
    if code is None:
        raise RunFailed(f"run {paths.root.name} was left without having ended", "see `slurm-ft status`")
    common.say(f"run {paths.root.name} has ended with exit code {code}: {exit_meaning(code)}")
