"""`slurm-ft inject`: break something of a running run, once or again and again, to see it repaired."""

from __future__ import annotations

import inspect
import json
import random
import re

import click

from slurm_ft import faults
from slurm_ft.cli import common
from slurm_ft.errors import UsageError
from slurm_ft.faults import FAULTS, Target
from slurm_ft.observe import campaign, requests
from slurm_ft.observe.campaign import Blow
from slurm_ft.observe.requests import Patience, Watch
from slurm_ft.paths import RunPaths, read_json
from slurm_ft.spec import RunSpec

WAIT_SECONDS = 60.0
FOR_SECONDS = 600.0
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def _duration(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Seconds, of a number with or without s, m or h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", value or "")
    if value is None:
        return None
    if not found or float(found[1]) == 0:
        raise click.BadParameter(f"`{value}` is not a duration; write for example 30s, 10m or 1h", ctx, param)
    return float(found[1]) * _UNITS[found[2]]


def _checked_kinds(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        try:
            faults.parse(value)
        except UsageError as error:
            raise click.BadParameter(f"{error.message}; {error.hint}", ctx, param) from None
    return values


def _fault_list() -> str:
    rows = [
        f"  {'exit:N' if name == 'exit' else name:<13} {fault.target}: {fault.what}"
        + (f" ({fault.lasts:g} s)" if fault.lasts else "")
        for name, fault in FAULTS.items()
    ]
    return "\b\nKinds, what each strikes, and how:\n" + "\n".join(rows)


@common.command(
    "inject",
    examples=(
        "slurm-ft inject --replica 2 --kind kill",
        "slurm-ft inject titan-4711 --every 30s --for 10m --seed 7",
    ),
)
@common.run_argument
@click.option("--replica", type=click.IntRange(min=0), metavar="R", help="The replica.")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
              help="The rank in it. A fault of a host strikes the host of this rank.")  # fmt: skip
@click.option("--kind", "kinds", callback=_checked_kinds, multiple=True, metavar="KIND",
              help="What happens; see the list. With --every one of those given, or of all that need no spare, "
              "no Slurm and no memory limit.")  # fmt: skip
@click.option("--at-step", type=click.IntRange(min=0), metavar="N", help="Wait for this training step of the replica.")
@click.option(
    "--wait", type=click.FloatRange(min=0), metavar="S",
    help=f"Wait up to S seconds for the run and the step.  [default: {WAIT_SECONDS:g} with --at-step, else 0]",
)  # fmt: skip
@click.option(
    "--seconds",
    callback=_duration,
    metavar="T",
    help="How long a fault lasts that ends by itself.  [default: see the list]",
)
@click.option("--every", callback=_duration, metavar="T", help="Strike again and again, on average every T.")
@click.option("--for", "duration", callback=_duration, metavar="T", default="10m", show_default=True,
              help="End a campaign (--every) after T.")  # fmt: skip
@click.option("--seed", type=int, metavar="N", help="Of a campaign's choices; a new one, and told, by default.")
@common.dry_run_option
def command(
    run: str | None,
    runs_folder: str,
    replica: int | None,
    rank: int,
    kinds: tuple[str, ...],
    at_step: int | None,
    wait: float | None,
    seconds: float | None,
    every: float | None,
    duration: float,
    seed: int | None,
    dry_run: bool,
) -> None:
    """Break something of a running run on purpose, to see it repaired.

    Once, the command ends when the fault has struck; it does not wait for the repair. With --every it strikes
    healthy replicas at random, never the last healthy one, until --for is over or the run has ended.
    """
    patience = Patience(wait if wait is not None else WAIT_SECONDS if at_step is not None else 0.0)
    if every is None:
        kind = _checked_once(kinds, replica)
        paths = requests.await_run(run, runs_folder, patience)
        _once(paths, replica, rank, kind, seconds, at_step, patience, dry_run)
        return
    if replica is not None or at_step is not None or seconds is not None:
        raise UsageError("--every strikes replicas at random", "leave out --replica, --rank, --at-step and --seconds")
    chosen = seed if seed is not None else random.SystemRandom().randrange(1 << 31)
    strikes = list(faults.schedule(chosen, kinds or faults.BY_DEFAULT, every, duration))
    common.say(f"seed {chosen}: {len(strikes)} strikes in {duration:g} s")
    if dry_run:
        for strike in strikes:
            click.echo(f"{strike.at:8.1f} s  {strike.kind}")
        return
    paths = requests.await_run(run, runs_folder, patience)
    watch = Watch(paths)
    requests.await_step(watch, None, None, patience)
    replica_spec = RunSpec.from_json(read_json(paths.spec)).replica
    shape = campaign.Shape(replica_spec.ranks, replica_spec.hosts)
    campaign.run(strikes, watch, shape, campaign.asking(paths, watch), _tell)


def _checked_once(kinds: tuple[str, ...], replica: int | None) -> str:
    if len(kinds) != 1:
        raise UsageError(f"{len(kinds)} kinds of fault are given", "give one --kind, or --every for many")
    target = faults.parse(kinds[0])[0].target
    if target is not Target.RUN and replica is None:
        raise UsageError(f"`{kinds[0]}` strikes a {target} of a replica", "say which with --replica")
    return kinds[0]


def _once(
    paths: RunPaths,
    replica: int | None,
    rank: int,
    kind: str,
    seconds: float | None,
    at_step: int | None,
    patience: Patience,
    dry_run: bool,
) -> None:
    request = requests.injection(replica, rank, kind, seconds)
    if dry_run:
        common.say(f"would write {requests.request_path(paths, request)}:")
        click.echo(json.dumps(request))
        return
    watch = Watch(paths)
    requests.await_step(watch, replica, at_step, patience)
    requests.inject(paths, request, watch, Patience(requests.ANSWER_SECONDS))
    common.say(f"{kind}: {_whom(kind, replica, rank)} of run {paths.root.name} was struck")


def _whom(kind: str, replica: int | None, rank: int) -> str:
    target = faults.parse(kind)[0].target
    if target is Target.RUN:
        return f"the {kind}" if kind in ("controller", "lighthouse") else "the folder"
    return f"rank {rank} of replica {replica}" if target is Target.RANK else f"a host of replica {replica}"


def _tell(blow: Blow) -> None:
    where = _whom(blow.strike.kind, blow.replica, blow.rank) if blow.replica is not None else "the run"
    outcome = f"not struck: {blow.why_not}" if blow.why_not else f"struck {where}"
    common.say(f"{blow.strike.at:8.1f} s  {blow.strike.kind}: {outcome}")


command.help = f"{inspect.cleandoc(command.help or '')}\n\n{_fault_list()}"
