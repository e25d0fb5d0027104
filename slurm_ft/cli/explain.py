"""`slurm-ft explain`: why each replica is where it is."""

from __future__ import annotations

import time

import click

from slurm_ft.cli import common
from slurm_ft.observe import explain, requests, runs, status, unfit


@common.command("explain", examples=("slurm-ft explain", "slurm-ft explain titan-4711 2 --json"))
@common.run_argument
@click.argument("replicas", required=False, metavar="[REPLICA]")
@common.json_option
def command(run: str | None, replicas: str | None, runs_folder: str, as_json: bool) -> None:
    """Say why each replica is in its state and what comes next, with its first failure.

    The reasons are the controller's own. Below them stand the first failure of each replica with its
    traceback and log, the meaning of the exit code, the policy's budgets, and the time-outs in the order in which
    they must come, with a warning where a value of your own breaks it.
    """
    run, replicas = runs.split_arguments(run, replicas, runs_folder)
    paths = runs.find(run, runs_folder)
    now = time.time()
    reading, ledger = runs.read(paths, now), runs.ledger_of(paths)
    policy, trouble = runs.policy_of(paths)
    for words in (*reading.troubles, *([trouble] if trouble else [])):
        common.say(f"warning: {words}")
    snapshot = status.select(reading.snapshot, replicas)
    alive = runs.is_alive(paths, reading.snapshot, now)
    explained = explain.explain(snapshot, ledger, _moment(snapshot, now, alive), policy, alive)
    if as_json:
        about = status.to_json(snapshot, now, alive, str(paths.root))
        told = {**explain.to_json(explained, policy), **explain.ladder_json(policy, ledger)}
        common.print_json({"schema": about["schema"], "run": about["run"], **told})
        return
    click.echo(status.headline(reading.snapshot, now, alive))
    queue = "" if snapshot.started is not None else requests.in_queue(paths, snapshot)
    shown = explain.lines(explained, reading.snapshot, policy, alive, queue)
    for line in (*shown, *unfit.lines(ledger.state.unfit)):
        click.echo(line)
    for line in (*explain.lost_host_lines(ledger.state.lost), *explain.timeout_lines(policy, ledger)):
        click.echo(line)


def _moment(snapshot: status.Snapshot, now: float, alive: bool | None) -> float:
    """The time to speak of: that of the last news where a run was left."""
    return snapshot.t if alive is False and snapshot.t is not None else now
