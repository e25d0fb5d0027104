"""`slurm-ft inject`: break one rank of a running run, to see it repaired."""

from __future__ import annotations

import json
import re
import signal

import click

from slurm_ft.cli import common
from slurm_ft.observe import requests
from slurm_ft.observe.requests import Patience, Watch

WAIT_SECONDS = 60.0
KINDS = "kill|term|segv|stop|exit:N"


def _checked_kind(ctx: click.Context, param: click.Parameter, value: str) -> str:
    code = re.fullmatch(r"exit:(\d{1,3})", value)
    if value in ("kill", "term", "segv", "stop") or (code and int(code[1]) < 256):
        return value
    raise click.BadParameter(f"`{value}` is not one of {KINDS} with N from 0 to 255", ctx, param)


@common.command(
    "inject",
    examples=(
        "slurm-ft inject --replica 2 --kind kill",
        "slurm-ft inject titan-4711 --replica 2 --rank 0 --kind exit:3 --at-step 20",
    ),
)
@common.run_argument
@click.option("--replica", type=click.IntRange(min=0), required=True, metavar="R", help="The replica.")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="The rank in it.")
@click.option("--kind", callback=_checked_kind, required=True, metavar=KINDS, help="What happens to the rank.")
@click.option("--at-step", type=click.IntRange(min=0), metavar="N", help="Wait for this training step of the replica.")
@click.option(
    "--wait", type=click.FloatRange(min=0), metavar="S",
    help=f"Wait up to S seconds for the run and the step.  [default: {WAIT_SECONDS:g} with --at-step, else 0]",
)  # fmt: skip
@common.dry_run_option
def command(
    run: str | None,
    runs_folder: str,
    replica: int,
    rank: int,
    kind: str,
    at_step: int | None,
    wait: float | None,
    dry_run: bool,
) -> None:
    """Break one rank of a running run, to see it repaired.

    The rank gets a signal (`stop` halts it without ending it) or, with exit:N, leaves from within with that
    code. The command ends when the rank was hit; it does not wait for the repair.
    """
    patience = Patience(wait if wait is not None else WAIT_SECONDS if at_step is not None else 0.0)
    paths = requests.await_run(run, runs_folder, patience)
    request = requests.injection(replica, rank, kind)
    if dry_run:
        common.say(f"would write {requests.request_path(paths, request)}:")
        click.echo(json.dumps(request))
        return
    watch = Watch(paths)
    requests.await_step(watch, replica, at_step, patience)
    requests.inject(paths, request, watch, Patience(requests.ANSWER_SECONDS))
    common.say(f"{_done(kind)} rank {rank} of replica {replica} in run {paths.root.name}")


def _done(kind: str) -> str:
    names = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}
    return f"sent {names[kind].name} to" if kind in names else f"made to leave with {kind.partition(':')[2]}:"
