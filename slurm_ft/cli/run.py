"""`slurm-ft run`: the run's head in this process; the last line of an sbatch script."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from slurm_ft.cli.spec_options import check_program, make_spec, spec_options
from slurm_ft.errors import UsageError

EPILOG = """\b
Examples:
  exec slurm-ft run -- python train.py                      in an sbatch script with --no-kill
  slurm-ft run --cluster local --replicas 2 -- titan --steps 20
"""


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--cluster", type=click.Choice(["slurm", "local"]), default="slurm", show_default=True)
@spec_options
def command(**options: Any) -> None:
    """Run COMMAND in this allocation, and look after it until it ends.

    One replica per node unless --replicas says otherwise. COMMAND is any program, `python ...`, or
    `titan ...`.
    """
    from slurm_ft.controller.head import look_after, open_run
    from slurm_ft.paths import RunPaths
    from slurm_ft.submit.local_run import new_job_id
    from slurm_ft.submit.place import allocation_place, local_place

    local = options["cluster"] == "local"
    place = None if local else allocation_place(os.environ)
    options["name"] = options["name"] or (os.environ.get("SLURM_JOB_NAME") if not local else None)
    hosts = len(place.hosts) if place else options["replicas"] or 1
    replicas = options["replicas"] or max(1, (hosts - options["spares"]) // max(1, options["nodes_per_replica"]))
    gpus = os.environ.get("SLURM_GPUS_ON_NODE", "")
    ranks = options["ranks_per_node"] or (int(gpus) if gpus.isdigit() else 1)
    spec = make_spec(options, options["cluster"], replicas, ranks)
    check_program(spec.replica.command, sys.executable)
    runs = Path(options["runs"])
    if place is None:
        place = local_place(spec, new_job_id(runs, spec.name))
    if len(place.hosts) < spec.hosts:
        raise UsageError(
            f"the run needs {spec.hosts} hosts and the allocation has {len(place.hosts)}",
            "lower --replicas, --nodes-per-replica or --spares, or ask Slurm for more nodes",
        )
    paths = RunPaths(options["run_dir"] or runs / f"{spec.name}-{place.job_id}")
    if options["dry_run"]:
        click.echo(dry_run(paths, spec, place))
        return
    open_run(paths, spec)
    click.echo(f"run folder: {paths.root}", err=True)
    sys.exit(look_after(paths, place))


def dry_run(paths: Any, spec: Any, place: Any) -> str:
    """What each replica's step would be, as the very command lines."""
    import shlex

    from slurm_ft.agent.command import rank_argv
    from slurm_ft.launch import StepRequest
    from slurm_ft.launch.srun import allocation_from, step_argv
    from slurm_ft.mesh.layout import assign

    layout = assign(list(place.hosts), spec.replicas, spec.replica.hosts, spec.spares, spec.replica.ranks_per_host)
    rank = shlex.join(rank_argv(spec.replica.command, sys.executable))
    lines = [f"# run folder {paths.root}", f"# each rank: {rank}"]
    for replica, hosts in enumerate(layout.replicas):
        request = StepRequest(paths, replica, 1, tuple(hosts))
        argv = request.agent_argv() if spec.cluster == "local" else step_argv(request, allocation_from(os.environ))
        lines.append(shlex.join(argv))
    return "\n".join(lines)
