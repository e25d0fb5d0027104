"""`slurm-ft save`: have a run save now."""

from __future__ import annotations

import time

import click

from slurm_ft.cli import common
from slurm_ft.errors import RunFailed
from slurm_ft.events import Follower
from slurm_ft.observe import requests, runs


@common.command("save", examples=("slurm-ft save", "slurm-ft save titan-4711 --no-wait"))
@common.run_argument
@click.option("--no-wait", is_flag=True, help="Ask for it and do not wait for the answer.")
@common.dry_run_option
def command(run: str | None, runs_folder: str, no_wait: bool, dry_run: bool) -> None:
    """Ask the ranks of a run to save, and wait until they have.

    Ranks can save that use slurm_ft.train.on_save, or run `titan`; others may be asked by a signal (--save-signal
    of the run). It creates the file `save` in the run folder: a colleague who shares the folder can `touch` it too.
    Exit code 1: nothing complete was saved.
    """
    paths = runs.find(run, runs_folder)
    if dry_run:
        click.echo(f"touch {paths.save}")
        return
    now = time.time()
    snapshot = runs.read(paths, now).snapshot
    if snapshot.ended is not None:
        raise RunFailed(f"run {paths.root.name} has ended, with exit code {snapshot.ended}", "nothing can save")
    if snapshot.started is not None and runs.is_alive(paths, snapshot, now) is False:
        raise RunFailed(f"nobody looks after run {paths.root.name} any more", "nothing can save")
    follower = Follower.from_now(paths.events)
    requests.ask_to_save(paths)
    common.say(f"run {paths.root.name} is asked to save")
    if no_wait:
        return
    ended = requests.await_save(follower, runs.Gone(paths))
    if ended is None:
        raise RunFailed(f"run {paths.root.name} ended before it had saved", "see `slurm-ft status`")
    if not ended.data.get("complete"):
        raise RunFailed(f"nothing complete was saved: {ended.data.get('why', '')}",
                        "see slurm_ft.train.on_save in docs/saving.md")  # fmt: skip
    click.echo(f"step {ended.data['step']}" + (f" {ended.data['path']}" if ended.data.get("path") else ""))
