"""`slurm-ft report`: incidents, recovery times and goodput."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import click

from slurm_ft import events
from slurm_ft.cli import common
from slurm_ft.observe import accounting, report, runs
from slurm_ft.slurm.client import cluster_of


@common.command("report", examples=("slurm-ft report", "slurm-ft report titan-4711 --json"))
@common.run_argument
@common.json_option
@click.option("--sacct", is_flag=True, help="Put the rows of Slurm's accounting beside the run's own steps.")
@click.option("--clusters", default="", metavar="NAME", help="With --sacct: the cluster to ask, on sites with several.")
def command(run: str | None, runs_folder: str, as_json: bool, sacct: bool, clusters: str) -> None:
    """Report how a run went: its replicas, every incident with its repair, goodput, and advice.

    It is computed from the run's events.jsonl, so it works while the run goes on and for ever after. --sacct
    asks Slurm too, and explains where the two books differ.
    docs/report.md says what each figure means.
    """
    paths = runs.find(run, runs_folder)
    computed = report.compute(runs.ledger_of(paths), runs.policy_of(paths)[0])
    computed = replace(computed, snapshot=runs.named_by_spec(computed.snapshot, paths))
    alive = runs.is_alive(paths, computed.snapshot, time.time())
    if computed.sessions == 0:
        common.say(f"warning: `{paths.events}` holds no event yet: the run has not started")
    accounts = None
    if sacct:
        told = list(events.read(paths.events))
        found = accounting.ask(told, clusters or cluster_of(os.environ))
        accounts = accounting.reconcile(told, computed.incidents, found, computed.snapshot.ended)
    if as_json:
        value = report.to_json(computed, alive)
        common.print_json(value if accounts is None else value | {"accounting": accounting.to_json(accounts)})
        return
    for line in [*report.lines(computed, alive), *([] if accounts is None else accounting.lines(accounts))]:
        click.echo(line)
