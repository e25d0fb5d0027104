"""`slurm-ft report`: incidents, recovery times and goodput."""

from __future__ import annotations

import time
from dataclasses import replace

import click

from slurm_ft.cli import common
from slurm_ft.observe import report, runs


@common.command("report", examples=("slurm-ft report", "slurm-ft report titan-4711 --json"))
@common.run_argument
@common.json_option
def command(run: str | None, runs_folder: str, as_json: bool) -> None:
    """Report how a run went: its replicas, every incident with its repair, goodput, and advice.

    It is computed from the run's events.jsonl, so it works while the run goes on and for ever after.
    docs/report.md says what each figure means.
    """
    paths = runs.find(run, runs_folder)
    computed = report.compute(runs.ledger_of(paths), runs.policy_of(paths)[0])
    computed = replace(computed, snapshot=runs.named_by_spec(computed.snapshot, paths))
    alive = runs.is_alive(paths, computed.snapshot, time.time())
    if computed.sessions == 0:
        common.say(f"warning: `{paths.events}` holds no event yet: the run has not started")
    if as_json:
        common.print_json(report.to_json(computed, alive))
        return
    for line in report.lines(computed, alive):
        click.echo(line)
