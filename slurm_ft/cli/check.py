"""`slurm-ft check`: is this host, or each host of this job, fit to train? Silent and 0 when it is."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from slurm_ft import config, env
from slurm_ft.cli import common
from slurm_ft.errors import UsageError
from slurm_ft.health.node import AREAS, Wanted

SECONDS = 4.0


@common.command("check", examples=("slurm-ft check --node", "slurm-ft check --all --hosts      (in a job)"))
@click.option("--node", is_flag=True, help="GPUs, /dev/shm, limits, what is left over. The default.")
@click.option("--network", is_flag=True, help="Interfaces, InfiniBand ports, the network plugin.")
@click.option("--storage", is_flag=True, help="The run folder and the scratch folder.")
@click.option("--native", is_flag=True, help="The native libraries of slurm-ft.")
@click.option("--all", "all_areas", is_flag=True, help="--node, --network and --storage.")
@click.option("--hosts", is_flag=True, help="On each host of the job around this shell, and between them.")
@click.option(
    "--gpus",
    type=click.IntRange(0),
    metavar="N",
    help="The GPUs that a host must have.  [default: Slurm's number, or the site's]",
)
@click.option("--shared", metavar="DIR", help="The folder that all hosts must share.  [default: the run's, or RUNS]")
@click.option(
    "--timeout",
    "seconds",
    type=click.FloatRange(0.1),
    default=SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="A check that has not answered by then is a fault.",
)
@click.option("--verbose", "-v", is_flag=True, help="Print what the native libraries find, too.")
@common.json_option
def command(seconds: float, verbose: bool, as_json: bool, **options: Any) -> None:
    """Look whether this host is fit to train.

    Prints nothing and exits 0 when all is well, else one line `ERROR: ...` for each fault and exits 1. It takes no
    memory of a GPU, and calls no command of Slurm's but for --hosts, which is one srun. All checks run at once and
    each in a process of its own, so a file server that does not answer is a fault and does not hang the check.
    """
    areas = frozenset(AREAS if options["all_areas"] else (name for name in AREAS if options[name]))
    if not areas and not options["native"]:
        areas = frozenset({"node"})
    wanted = _wanted(os.environ, config.settings(os.environ, Path.cwd()), options["gpus"], options["shared"])
    faults = _on_all_hosts(wanted, areas, seconds) if options["hosts"] else _here(wanted, areas, seconds)
    value: dict[str, Any] = {"schema": 1}
    if options["native"] or verbose:
        from slurm_ft import native

        report = native.report()
        value["native"] = dataclasses.asdict(report)
        faults += [{"host": "", "fault": fault} for fault in native.faults(report) if options["native"]]
        for line in report.lines() if verbose and not as_json else ():
            click.echo(line)
    if as_json:
        common.print_json(value | {"faults": faults})
    else:
        for item in faults:
            click.echo(f"ERROR: {item['host']}: {item['fault']}" if item["host"] else f"ERROR: {item['fault']}")
    sys.exit(1 if faults else 0)


def _wanted(surroundings: Mapping[str, str], settings: config.Settings, gpus: int | None, shared: str | None) -> Wanted:
    """What a host is held against: options, then the job, then the site's settings. Pure."""
    single = {name: item.value for name, item in settings.single.items()}
    if gpus is None:
        found = surroundings.get("SLURM_GPUS_ON_NODE", "")
        site = None if "SLURM_JOB_ID" in surroundings else single.get("gpus_per_node")
        gpus = int(found) if found.isdigit() else site
    scratch = config.expanded(str(single.get("scratch", "")), surroundings)
    return Wanted(
        gpus=gpus,
        environ=settings.variables() | dict(surroundings),
        shared=str(Path(shared or surroundings.get(env.RUN) or single["runs"]).absolute()),
        scratch=scratch,
    )


def _here(wanted: Wanted, areas: frozenset[str], seconds: float) -> list[dict[str, str]]:
    from slurm_ft.health import bounded, checks

    return [{"host": "", "fault": fault} for fault in bounded(checks(wanted, areas), seconds)]


def _on_all_hosts(wanted: Wanted, areas: frozenset[str], seconds: float) -> list[dict[str, str]]:
    from slurm_ft.health.hosts import check_hosts
    from slurm_ft.slurm.hostlist import expand

    if "SLURM_JOB_ID" not in os.environ or "SLURM_JOB_NODELIST" not in os.environ:
        raise UsageError("there is no Slurm job around this shell", "use --hosts in an sbatch script or under salloc")
    found = check_hosts(expand(os.environ["SLURM_JOB_NODELIST"]), wanted, areas, seconds)
    return [{"host": host, "fault": fault} for host, fault in found]
