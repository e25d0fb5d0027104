"""`slurm-ft module`: the modulefile of this installation."""

from __future__ import annotations

import os
from pathlib import Path

import click

from slurm_ft import __version__, modulefile
from slurm_ft.cli import common


@common.command(
    "module",
    examples=("slurm-ft module --format lua", "slurm-ft module --write /opt/modulefiles --prefix /opt/slurm-ft"),
)
@click.option(
    "--format",
    "form",
    type=click.Choice(list(modulefile.FORMATS)),
    help="tcl for Environment Modules, lua for Lmod.  [default: lua where Lmod is loaded, else tcl]",
)
@click.option("--prefix", type=click.Path(), help="The installation to load.  [default: this one]")
@click.option(
    "--write",
    "folder",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Write both formats below FOLDER, as slurm-ft/VERSION, instead.",
)
@common.dry_run_option
def command(form: str | None, prefix: str | None, folder: Path | None, dry_run: bool) -> None:
    """Print the modulefile that loads an installation of slurm-ft.

    It sets PATH, MANPATH, SLURM_FT_ROOT and where shells look for completions, and nothing else. The prefix must
    hold bin/slurm-ft.
    """
    prefix = os.path.abspath(prefix) if prefix else modulefile.own_prefix()
    if folder is None:
        form = form or ("lua" if "LMOD_CMD" in os.environ else "tcl")
        click.echo(modulefile.FORMATS[form](prefix), nl=False)
        return
    if dry_run:
        click.echo(f"# would write {folder / modulefile.NAME}/{__version__} and .lua, for {prefix}")
        return
    for path in modulefile.write(folder, prefix):
        common.say(f"wrote {path}")
