"""What the commands share: their decorator, the RUN argument, and how they print.

Data goes to stdout, words to stderr. A command is declared with `@command("name", examples=(...))`, so that
every help has `-h` and ends with two examples.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from slurm_ft import config, env

PARAMETERS = {"runs": ("runs", "runs_folder"), "time": ("time_limit",)}
"""The parameters of commands that stand for a setting, where they are called differently."""

F = TypeVar("F", bound=Callable[..., Any])


def command(name: str, examples: tuple[str, str], **settings: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Declare a command whose help ends with two examples."""
    epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in examples)
    context = {"help_option_names": ["-h", "--help"], **settings.pop("context_settings", {})}
    return click.command(name, epilog=epilog, context_settings=context, **{"cls": Configured, **settings})


class Configured(click.Command):
    """A command whose defaults are the settings of the site, the user and the project, those in `keys`."""

    keys: tuple[str, ...] = ("runs",)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = args[: args.index("--")] if "--" in args else args
        wanted = {
            item.name: key for item in self.params for key in self.keys if item.name in PARAMETERS.get(key, (key,))
        }
        if wanted and not ctx.resilient_parsing and not {"-h", "--help"} & set(own):
            chosen = config.settings(os.environ, Path.cwd()).defaults()
            ctx.default_map = {name: chosen[key] for name, key in wanted.items() if name and key in chosen}
        return super().parse_args(ctx, args)


def run_argument(function: F) -> F:
    """The optional RUN and `--runs DIR`."""
    function = click.argument("run", required=False, metavar="[RUN]", shell_complete=_complete_run)(function)
    return runs_option(function)


def _complete_run(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The runs whose names begin so, newest first."""
    folder = ctx.params.get("runs_folder") or os.environ.get(env.RUNS) or "runs"
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
        found.sort(key=lambda entry: entry.stat().st_mtime, reverse=True)
    except OSError:
        return []
    return [entry.name for entry in found if entry.name.startswith(incomplete)]


def runs_option(function: F) -> F:
    return click.option(
        "--runs", "runs_folder", metavar="DIR", default="runs", show_default=True,
        help=f"The folder that holds the run folders (or ${env.RUNS}).",
    )(function)  # fmt: skip


def json_option(function: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def dry_run_option(function: F) -> F:
    return click.option("--dry-run", is_flag=True, help="Print what would be done and do nothing.")(function)


def print_json(value: Mapping[str, Any]) -> None:
    click.echo(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False))


def say(words: str) -> None:
    """Words for people: stderr."""
    click.echo(words, err=True)


def coloured() -> bool:
    """May stdout be coloured? Only a terminal, and not when NO_COLOR is set (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
