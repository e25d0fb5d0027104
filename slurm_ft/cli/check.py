"""`slurm-ft check`: is this host fit to train? Silent and 0 when it is."""

from __future__ import annotations

import dataclasses
import sys

import click

from slurm_ft.cli import common


@common.command("check", examples=("slurm-ft check", "slurm-ft check -v"))
@click.option("--verbose", "-v", is_flag=True, help="Print what was found, too.")
@common.json_option
def command(verbose: bool, as_json: bool) -> None:
    """Look at this host's GPUs and at the native libraries for them.

    Prints nothing and exits 0 when all is well, else one line for each fault and exits 1. It opens the GPU
    libraries and takes no GPU memory.
    """
    from slurm_ft import native

    report = native.report()
    found = native.faults(report)
    if as_json:
        common.print_json({"schema": 1, "faults": found, "native": dataclasses.asdict(report)})
    else:
        for line in report.lines() if verbose else ():
            click.echo(line)
        for fault in found:
            click.echo(f"ERROR: {fault}")
    sys.exit(1 if found else 0)
