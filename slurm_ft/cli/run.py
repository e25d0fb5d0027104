"""`slurm-ft run`: the run's head in this process; the last line of an sbatch script."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from slurm_ft import config, env
from slurm_ft.cli.common import Configured
from slurm_ft.cli.spec_options import SETTINGS, check_program, folder_name, make_spec, spec_options
from slurm_ft.errors import UsageError
from slurm_ft.submit.script import lines_of_job

EPILOG = """\b
Examples:
  exec slurm-ft run -- python train.py                      in an sbatch script with --no-kill
  slurm-ft run --cluster local --replicas 2 -- titan --steps 20
"""


def given(words: Sequence[str], origin: str) -> dict[str, Any]:
    """The options that these words give, by the names of parameters. Raises UsageError for words that are wrong."""
    try:
        context = command.make_context("slurm-ft run", [*words, "--", "-"])
    except click.UsageError as error:
        raise UsageError(f"{origin}: {error.format_message()}", "see `slurm-ft run -h`") from None
    names = (name for name in context.params if name != "command")
    return {name: context.params[name] for name in names if _was_given(context, name)}


def _was_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _with_the_scripts(options: dict[str, Any]) -> dict[str, Any]:
    """These options above those of the script's `# SLURM_FT` lines, and below those of `slurm-ft submit SCRIPT`."""
    context = click.get_current_context()
    own = {name: value for name, value in options.items() if _was_given(context, name)}
    lines = given(lines_of_job(os.environ), "# SLURM_FT lines")
    above = given(shlex.split(os.environ.get(env.OPTIONS, "")), f"${env.OPTIONS}")
    environment = [*lines.get("environment", ()), *own.get("environment", ()), *above.get("environment", ())]
    return options | lines | own | above | {"environment": environment}


class RunCommand(Configured):
    keys = ("runs", *SETTINGS)


@click.command(cls=RunCommand, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--cluster", type=click.Choice(["slurm", "local"]), default="slurm", show_default=True)
@spec_options
def command(**options: Any) -> None:
    """Run COMMAND in this allocation, and look after it until it ends.

    One replica per node unless --replicas says otherwise. COMMAND is any program, `python ...`, or
    `titan ...`. Lines `# SLURM_FT --replicas=4` at the top of the job's script are options too; those of this
    command win.
    """
    from slurm_ft.controller.comeback import is_over
    from slurm_ft.controller.head import look_after, open_run
    from slurm_ft.observe.last_words import last_words
    from slurm_ft.paths import RunPaths
    from slurm_ft.submit.batch_shell import ADVICE, warning_would_kill
    from slurm_ft.submit.local_run import new_job_id
    from slurm_ft.submit.place import allocation_place, local_place

    options = _with_the_scripts(options)
    local = options["cluster"] == "local"
    place = None if local else allocation_place(os.environ)
    if not options["name"] and not local and os.environ.get("SLURM_JOB_NAME"):
        options["name"] = folder_name(os.environ["SLURM_JOB_NAME"])
    replicas, ranks = options["replicas"], options["ranks_per_node"]
    if replicas is None:
        hosts = len(place.hosts) if place else 1
        replicas = max(1, (hosts - options["spares"]) // max(1, options["nodes_per_replica"]))
    if ranks is None:
        gpus = os.environ.get("SLURM_GPUS_ON_NODE", "")
        ranks = max(1, int(gpus)) if gpus.isdigit() else 1
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
    job_id = os.environ.get("SLURM_JOB_ID", place.job_id)
    paths = RunPaths((options["run_dir"] or str(runs / f"{spec.name}-{place.job_id}")).replace("%j", job_id))
    if options["dry_run"]:
        click.echo(dry_run(paths, spec, place))
        return
    over = "" if local else is_over(paths, os.environ)
    if over:
        click.echo(over, err=True)
        return
    open_run(paths, spec)
    if not local:
        for name, value in config.settings(os.environ, Path.cwd()).variables().items():
            os.environ.setdefault(name, value)
        if warning_would_kill(os.environ):
            click.echo(f"warning: {ADVICE}", err=True)
    click.echo(f"run folder: {paths.root}", err=True)
    code = look_after(paths, place)
    for line in last_words(paths, code):
        click.echo(line, err=True)
    sys.exit(code)


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
    local = spec.cluster == "local"
    for replica, hosts in enumerate(layout.replicas):
        request = StepRequest(paths, replica, 1, tuple(hosts))
        argv = request.agent_argv() if local else step_argv(request, allocation_from(os.environ, spec.host.srun_args))
        lines.append(shlex.join(argv))
    return "\n".join(lines)
