"""`slurm-ft templates`: sbatch scripts to start from, as they lie in sbatch_templates/."""

from __future__ import annotations

import difflib
from importlib.resources import files
from pathlib import Path

import click

from slurm_ft.cli import common
from slurm_ft.errors import UsageError

EPILOG = """\b
Examples:
  slurm-ft templates list
  slurm-ft templates copy any_script
"""


def names() -> list[str]:
    folder = files("slurm_ft").joinpath("sbatch_templates")
    return sorted(item.name.removesuffix(".sbatch") for item in folder.iterdir() if item.name.endswith(".sbatch"))


def text(name: str) -> str:
    """A template's text. Raises UsageError with the ones that there are."""
    if name not in (known := names()):
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean `{close[0]}`?" if close else f"templates: {', '.join(known)}"
        raise UsageError(f"there is no template `{name}`", hint)
    return files("slurm_ft").joinpath(f"sbatch_templates/{name}.sbatch").read_text(encoding="utf-8")


def summary(name: str) -> str:
    """The first sentence of a template's comment."""
    lines = [line[2:] for line in text(name).splitlines()[1:] if line.startswith("# ")]
    return " ".join(lines).split(". ")[0].rstrip(".")


def _complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in names() if name.startswith(incomplete)]


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """sbatch scripts to start from.

    Each can be submitted with `sbatch` or with `slurm-ft submit`, whose options win over the script's lines.
    """


@common.command("list", examples=("slurm-ft templates list", "slurm-ft templates list | grep titan"))
def list_them() -> None:
    """List the templates, each with one sentence."""
    width = max(map(len, names()))
    for name in names():
        click.echo(f"{name:<{width}}  {summary(name)}")


@common.command("show", examples=("slurm-ft templates show chain", "slurm-ft templates show chain > my_job.sbatch"))
@click.argument("name", shell_complete=_complete)
def show(name: str) -> None:
    """Print a template."""
    click.echo(text(name), nl=False)


@common.command("copy", examples=("slurm-ft templates copy any_script", "slurm-ft templates copy chain my_job.sbatch"))
@click.argument("name", shell_complete=_complete)
@click.argument("target", required=False, type=click.Path(path_type=Path), metavar="[FILE]")
@common.dry_run_option
def copy(name: str, target: Path | None, dry_run: bool) -> None:
    """Copy a template to FILE, or into the current folder. Nothing is overwritten."""
    content = text(name)
    target = target or Path(f"{name}.sbatch")
    target = target / f"{name}.sbatch" if target.is_dir() else target
    if dry_run:
        click.echo(f"# would write {target}")
        return
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(content)
    except FileExistsError:
        raise UsageError(f"`{target}` is there already", "name another file") from None
    except OSError as error:
        raise UsageError(f"`{target}` cannot be written: {error.strerror}", "name another file") from None
    common.say(f"wrote {target}; submit it with `slurm-ft submit {target}`")


for verb in (list_them, show, copy):
    command.add_command(verb)
