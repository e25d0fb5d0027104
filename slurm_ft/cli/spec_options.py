"""The options that `submit` and `run` share, and the RunSpec they make."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from slurm_ft import config
from slurm_ft.agent.command import expand_titan, is_python, program_index
from slurm_ft.env import KEEPER_MODES
from slurm_ft.errors import SpecError, UsageError
from slurm_ft.hostspec import HostSpec
from slurm_ft.spec import Budget, Policy, ReplicaSpec, RunSpec

F = TypeVar("F", bound=Callable[..., Any])

_DEFAULTS = Policy()
ORPHAN_TIMEOUT_HERE = 120.0
"""On one machine there is nobody else to bring up a head, and no shared file system to wait for."""

_OPTIONS = (
    click.option("--name", help="The run's name.  [default: the program's]"),
    click.option("--run-dir", type=click.Path(), help="The run folder.  [default: RUNS/NAME-JOBID]"),
    click.option("--runs", type=click.Path(), default="runs", show_default=True,
                 help="The folder that holds run folders."),
    click.option("--replicas", type=int, help="Replicas of the model that train together."),
    click.option("--min-replicas", type=int, default=1, show_default=True,
                 help="The fewest replicas with which the training goes on."),
    click.option("--nodes-per-replica", type=int, default=1, show_default=True, help="Hosts of one replica."),
    click.option("--ranks-per-node", type=int, help="Ranks on each host.  [default: its GPUs, or 1]"),
    click.option("--spares", type=int, default=0, show_default=True, help="Hosts held back for repairs."),
    click.option("--restarts-in-place", type=int, default=_DEFAULTS.in_place.restarts, show_default=True,
                 help=f"Repairs of a replica without Slurm, within {_DEFAULTS.in_place.seconds:.0f} s."),
    click.option("--restarts-by-step", type=int, default=_DEFAULTS.step.restarts, show_default=True,
                 help=f"Repairs by a new step on the same hosts, within {_DEFAULTS.step.seconds:.0f} s."),
    click.option("--hang-after", type=float, default=_DEFAULTS.hang_after, show_default=True, metavar="SECONDS",
                 help="Restart a replica that has stood still so long while its peers move; 0 never."),
    click.option("--save-within", type=float, default=_DEFAULTS.save_within, show_default=True, metavar="SECONDS",
                 help="Time for ranks that can save, before a stop or the time limit."),
    click.option("--save-signal", default="", metavar="SIGNAL",
                 help="Asks ranks that know nothing of slurm-ft to save, as in SIGUSR1.  [default: none]"),
    click.option("--requeue/--no-requeue", default=True, show_default=True,
                 help="Put the job back into the queue when it ends for its time limit."),
    click.option("--zygote/--no-zygote", default=True, show_default=True,
                 help="Fork ranks from a process that has done their imports."),
    click.option("--health-check", default="", metavar="COMMAND",
                 help="A command that fails on a host unfit to train, such as `slurm-ft check`."),
    click.option("--gpu-cpus", default="", metavar="LISTS",
                 help="The CPUs next to each GPU, in the GPUs' order, as `0-7 8-15`."),
    click.option("--keeper", type=click.Choice(list(KEEPER_MODES)), default="off", show_default=True,
                 help="Keep the state of ranks in memory that outlives them."),
    click.option("--env", "environment", multiple=True, metavar="NAME=VALUE", help="Set in every rank; repeatable."),
    click.option("--dry-run", is_flag=True, help="Show what would be done, and do nothing."),
    click.argument("command", nargs=-1, type=click.UNPROCESSED),
)  # fmt: skip


def spec_options(function: F) -> F:
    """Give a command the options of a RunSpec."""
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(_OPTIONS), function)


SETTINGS = ("health_check", "gpu_cpus")
"""The settings that options here stand for."""


def _host_spec(options: Mapping[str, Any], cluster: str) -> HostSpec:
    """What the options and the settings say of hosts. What a site set for its hosts says nothing of this machine:
    a local run takes what was typed."""
    settings = config.settings(os.environ, Path.cwd())
    if cluster == "local":
        source = click.get_current_context().get_parameter_source
        typed = {name: options[name] for name in SETTINGS if source(name) is ParameterSource.COMMANDLINE}
        return HostSpec(**typed, spare_check=settings.single["spare_check"].value)
    return HostSpec(
        gpu_cpus=options["gpu_cpus"],
        srun_args=settings.texts("srun_args"),
        scratch=settings.single["scratch"].value if "scratch" in settings.single else "",
        health_check=options["health_check"],
        spare_check=settings.single["spare_check"].value,
    )


def make_spec(options: Mapping[str, Any], cluster: str, replicas: int, ranks_per_node: int) -> RunSpec:
    """The RunSpec that these options ask for. Raises SpecError with all that is wrong."""
    command = tuple(options["command"])
    policy = Policy(
        min_replicas=options["min_replicas"],
        in_place=Budget(options["restarts_in_place"], _DEFAULTS.in_place.seconds),
        step=Budget(options["restarts_by_step"], _DEFAULTS.step.seconds),
        hang_after=options["hang_after"],
        save_within=options["save_within"],
        requeue=options["requeue"],
        orphan_timeout=ORPHAN_TIMEOUT_HERE if cluster == "local" else _DEFAULTS.orphan_timeout,
    )
    return RunSpec(
        name=options["name"] or default_name(command),
        replica=ReplicaSpec(
            command,
            options["nodes_per_replica"],
            ranks_per_node,
            pairs(options["environment"]),
            options["zygote"],
            _signal_name(options["save_signal"]),
            options["keeper"],
        ),
        replicas=replicas,
        spares=options["spares"],
        cluster=cluster,
        policy=policy,
        host=_host_spec(options, cluster),
    ).validate()


def _signal_name(text: str) -> str:
    """USR1, SIGUSR1 and usr1 are one signal."""
    word = text.upper()
    return f"SIG{word}" if word and not word.startswith("SIG") else word


def pairs(items: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE options as a dictionary. Raises SpecError for one without a `=`."""
    wrong = [item for item in items if not item.partition("=")[0] or "=" not in item]
    if wrong:
        raise SpecError([(f"--env `{item}` has no `=`", "write --env NAME=VALUE") for item in wrong])
    return dict(item.split("=", 1) for item in items)


def default_name(command: Sequence[str]) -> str:
    """A run's name from its command: the script's or the module's, else the program's."""
    if not command:
        return "run"
    word = command[0]
    index = program_index(command) if is_python(word) else None
    if index is not None:
        word = command[index + 1] if command[index] == "-m" and index + 1 < len(command) else command[index]
    return folder_name(Path(word).stem.rpartition(".")[2])


def folder_name(text: str) -> str:
    """A text with what is not fit for a folder's name replaced: a run is called so."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in text).strip("-") or "run"


def check_program(command: Sequence[str], python: str) -> None:
    """Raises UsageError when the program to run is not on this machine."""
    if command[0] == "titan" and importlib.util.find_spec("torchtitan") is None:
        raise UsageError("`titan` needs torchtitan, which is not installed", 'pip install "/path/to/slurm-ft[train]"')
    argv = expand_titan(command, python)
    if shutil.which(argv[0]) is None:
        raise UsageError(f"there is no program `{argv[0]}` here", "check its spelling, the PATH and loaded modules")
    index = program_index(argv) if is_python(argv[0]) else None
    if index is not None and not argv[index].startswith("-") and not Path(argv[index]).exists():
        raise UsageError(f"there is no script `{argv[index]}`", f"paths are taken from {Path.cwd()}")
