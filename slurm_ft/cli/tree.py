"""The click tree as plain words, for everything that is written from it: pages of docs, man pages.

Pure readers: nothing here runs a command.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

from slurm_ft.cli import COMMANDS, cli


def every_command() -> Iterator[tuple[str, click.Command]]:
    """(`submit`, its command) for each command, and (`group verb`, its command) for those in a group."""
    context = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        yield name, command
        if isinstance(command, click.Group):
            yield from ((f"{name} {verb}", item) for verb, item in command.commands.items())


def synopsis(name: str, command: click.Command) -> str:
    """`slurm-ft logs [OPTIONS] [RUN]`."""
    words = [argument_word(item) for item in command.params if isinstance(item, click.Argument)]
    if isinstance(command, click.Group):
        words.append("|".join(command.commands))
    return " ".join(["slurm-ft", name, *(["[OPTIONS]"] if options(command) else []), *words])


def argument_word(item: click.Argument) -> str:
    if item.metavar:
        return item.metavar
    return "-- COMMAND..." if item.nargs == -1 else (item.name or "").upper()


def options(command: click.Command) -> list[click.Option]:
    return [item for item in command.params if isinstance(item, click.Option)]


def option_names(item: click.Option) -> str:
    """`-A, --account TEXT`, or `--zygote/--no-zygote`."""
    names = "/".join([", ".join(sorted(item.opts, key=len)), *item.secondary_opts])
    return names if item.is_flag else f"{names} {_value_word(item)}"


def option_help(item: click.Option) -> tuple[str, str]:
    """An option's sentence, and its default as one would type it (or nothing)."""
    words = re.sub(r" *\[default: (.*)\]$", r" Default: \1.", " ".join((item.help or "").split()))
    if item.required:
        words += " Required."
    shown = item.show_default and item.default is not None and not words.endswith(" Required.")
    return words.strip(), _default_word(item) if shown else ""


def paragraphs(command: click.Command) -> list[list[str]]:
    """The help: each paragraph in one line, and one that click is to leave as it is (it begins with \b) in its own."""
    return [_lines(text) for text in inspect.cleandoc(command.help or "").split("\n\n")]


def _lines(paragraph: str) -> list[str]:
    first, *rest = paragraph.splitlines() or [""]
    return rest if first == "\b" else [" ".join(paragraph.split())]


def examples(command: click.Command) -> list[str]:
    lines = inspect.cleandoc(command.epilog or "").splitlines()
    return [line.strip() for line in lines if line.startswith("  ")]


def _default_word(item: click.Option) -> str:
    """For `--this/--not-this` the name that stands for the default."""
    if item.secondary_opts:
        return (item.opts if item.default else item.secondary_opts)[0]
    return str(item.default)


def _value_word(item: click.Option) -> str:
    if item.metavar:
        return item.metavar
    return "|".join(item.type.choices) if isinstance(item.type, click.Choice) else item.type.name.upper()
