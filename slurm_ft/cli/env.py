"""`slurm-ft env`: what becomes of variables on their way into a job, a replica's step and a rank.

Values are not printed: a user's environment holds tokens and passwords.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import click

from slurm_ft import config, env
from slurm_ft.agent.environ import Place, rank_environment
from slurm_ft.cli import common
from slurm_ft.submit.crossing import into_job


class Row(NamedTuple):
    """What happens to one variable on its way into `into`: dropped, set, set-if-unset or extended."""

    into: str
    variable: str
    what: str
    why: str


@common.command("env", examples=("slurm-ft env", "slurm-ft env --into rank --json"))
@click.option("--into", type=click.Choice(["job", "step", "rank"]), help="Only what happens on the way into this.")
@common.json_option
def command(into: str | None, as_json: bool) -> None:
    """Show which of your variables are dropped, and which are set, on the way into a job and its ranks.

    A variable that is not listed crosses as it is. `job` is from this shell into the job that `slurm-ft submit`
    makes; `step` from the job into a replica's step; `rank` from the step into a rank.
    """
    rows = [row for row in (*_job(os.environ), *_step(os.environ), *_rank()) if into in (None, row.into)]
    if as_json:
        common.print_json({"schema": 1, "variables": [row._asdict() for row in rows]})
        return
    width = max((len(row.variable) for row in rows), default=8)
    click.echo(f"{'INTO':<5} {'VARIABLE':<{width}} {'WHAT':<13} WHY")
    for row in rows:
        click.echo(f"{row.into:<5} {row.variable:<{width}} {row.what:<13} {row.why}")


def _job(surroundings: Mapping[str, str]) -> Iterator[Row]:
    for name, why in sorted(into_job(surroundings).items()):
        yield Row("job", name, "dropped", why)
    for name, item in config.settings(surroundings, Path.cwd()).network.items():
        yield Row("job", name, "set-if-unset", item.origin)


def _step(surroundings: Mapping[str, str]) -> Iterator[Row]:
    from slurm_ft.launch.srun import KEPT, step_environment

    after = step_environment(surroundings, "")
    gone = (
        sorted(set(surroundings) - set(after)) if "SLURM_JOB_ID" in surroundings else ["SLURM_*", "SRUN_*", "SBATCH_*"]
    )
    kept = ", ".join(sorted(KEPT))
    for name in gone:
        yield Row("step", name, "dropped", f"each option of a step is written out; kept: {kept}")
    for name in sorted(set(step_environment({}, ""))):
        yield Row("step", name, "set", MEANINGS.get(name, "tells srun's own failure from the program's"))


MEANINGS = {item.name: item.meaning for item in env.VARIABLES}


def _rank() -> Iterator[Row]:
    """What an agent sets, found by trying it on an empty environment and on one that has the names already."""
    place = Place("", 0, 1, 1, 1, 0, 0, 1, 1, "host", 1, "", "lighthouse", "")
    names = rank_environment({}, place, {}, ())
    with_own = rank_environment(dict.fromkeys(names, "own"), place, {}, ())
    for name in sorted(names):
        what = "set-if-unset" if with_own[name] == "own" else "extended" if "own" in with_own[name] else "set"
        yield Row("rank", name, what, MEANINGS.get(name, WORDS.get(name, "-")))


WORDS = {
    "OMP_NUM_THREADS": "1: ranks share the host's cores",
    "PYTHONUNBUFFERED": "1: what a rank prints is in its log at once",
    "RES_OPTIONS": "a question to the nameserver that is lost costs 1 s and not 5",
    "RUST_LOG": "warn: torchft's Rust half is talkative",
    "THP_MEM_ALLOC_ENABLE": "1: large pages for torch on the host; a dead rank is gone sooner",
    "no_proxy": "the replica's hosts: torchft speaks HTTP between them",
    "NO_PROXY": "the replica's hosts: torchft speaks HTTP between them",
}
