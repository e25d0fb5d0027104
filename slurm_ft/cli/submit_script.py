"""What `slurm-ft submit SCRIPT` asks of sbatch, and of the `slurm-ft run` in the script. No Slurm is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from slurm_ft.cli import run
from slurm_ft.cli.spec_options import folder_name
from slurm_ft.errors import UsageError
from slurm_ft.spec import Policy
from slurm_ft.submit.script import Script, Submission, missing, warned_late
from slurm_ft.submit.slurm_job import warning_seconds

SBATCH = {"time_limit": "time", "partition": "partition", "account": "account", "qos": "qos", "mem": "mem",
          "gpus_per_node": "gpus-per-node", "cpus_per_node": "cpus-per-task"}  # fmt: skip
OTHER_WORDS = {
    "gpus-per-node": {"gres", "gpus", "gpus-per-task", "gpus-per-socket"},
    "mem": {"mem-per-cpu", "mem-per-gpu"},
    "cpus-per-task": {"cpus-per-gpu"},
}
"""Other options by which a script asks for the same: a setting is not laid over them."""
EXTENT = {"replicas", "nodes_per_replica", "spares"}


def submission(script: Script, options: dict[str, Any]) -> tuple[Submission, str, int]:
    """The sbatch call, the run folder (`%j` stands for the job's id), and the number of nodes.

    Raises UsageError for lines that `slurm-ft run` would not understand, or that ask for too few nodes.
    """
    context = click.get_current_context()
    if options["setup"]:
        raise UsageError("--setup goes into a script that slurm-ft writes", f"put the line into {script.path}")
    typed = {item.name for item in context.command.params if item.name and _source(context, item.name) == "COMMANDLINE"}
    words = [
        word for item in run.command.params if item.name in typed for word in _words(item, options[item.name or ""])
    ]
    lines = run.given(script.words, f"{script.path}, # SLURM_FT lines")
    chosen = lines | {name: options[name] for name in typed}
    run_dir = _run_dir(script, options, chosen)
    nodes = _nodes(script, chosen, bool(typed & EXTENT))
    asked = {
        SBATCH[name]: options[name]
        for name in SBATCH
        if options[name] not in (None, "") and (name in typed or not _asks_for(script, SBATCH[name]))
    }
    asked |= {} if "job-name" in script.options else {"job-name": script.name}
    if nodes and ("nodes" not in script.options or typed & EXTENT):
        asked["nodes"] = nodes
    named = (f"--{name}={value}" for name, value in asked.items())
    warning = warning_seconds(Policy(save_within=chosen.get("save_within", Policy().save_within)))
    late = warned_late(script, options["sbatch_args"], warning)
    if late:
        click.echo(f"warning: {late}", err=True)
    arguments = (*missing(script, warning), *named, *options["sbatch_args"])
    request = Submission(script, arguments, tuple(options["command"][1:]), (*words, f"--run-dir={run_dir}"))
    return request, run_dir, nodes or 2


def _asks_for(script: Script, name: str) -> bool:
    """Do the script's own lines ask for this, by whatever words?"""
    return not script.options.keys().isdisjoint({name} | OTHER_WORDS.get(name, set()))


def _source(context: click.Context, name: str) -> str:
    source = context.get_parameter_source(name)
    return source.name if isinstance(source, ParameterSource) else ""


def _words(item: click.Parameter, value: Any) -> list[str]:
    """An option as it was typed; those that the job needs no word of are left out."""
    if not isinstance(item, click.Option) or item.name in ("cluster", "dry_run", "run_dir", "runs"):
        return []
    if item.is_flag:
        return [item.opts[0]] if value else list(item.secondary_opts[:1])
    values = value if item.multiple else [value]
    return [f"{item.opts[0]}={one}" for one in values]


def _run_dir(script: Script, options: dict[str, Any], chosen: dict[str, Any]) -> str:
    if chosen.get("run_dir"):
        return str(Path(chosen["run_dir"]).absolute())
    runs = Path(chosen.get("runs") or options["runs"]).absolute()
    return f"{runs}/{chosen.get('name') or folder_name(script.name)}-%j"


def _nodes(script: Script, chosen: dict[str, Any], typed: bool) -> int:
    """The nodes that the run needs, or those of the script where nothing says how many replicas there are."""
    asked = script.options.get("nodes", "")
    number = int(asked) if asked.isdigit() else 0
    if not chosen.get("replicas") or chosen.get("cluster") == "local":
        return number
    needed: int = chosen["replicas"] * chosen.get("nodes_per_replica", 1) + chosen.get("spares", 0)
    if number and needed > number and not typed:
        raise UsageError(
            f"{script.path} asks Slurm for {number} nodes, and its # SLURM_FT lines need {needed}",
            "nodes = replicas x nodes-per-replica + spares",
        )
    return needed if typed else max(number, needed)
