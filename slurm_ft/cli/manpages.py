"""Man pages from the click tree, so that `man slurm-ft-submit` says what `slurm-ft submit -h` says.

    python -m slurm_ft.cli.manpages FOLDER

writes FOLDER/man1/slurm-ft.1 and one page a command. `page` and `overview` are pure and give roff of the
`man` macros, which every man program reads. The pages hold no date, so the same code gives the same bytes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import click

from slurm_ft import __version__, env, errors
from slurm_ft.cli import COMMANDS, cli, tree
from slurm_ft.observe.words import exit_meaning


def text(words: str) -> str:
    """Words as roff takes them literally: on one line, no letter of it a request or an escape."""
    escaped = words.replace("\\", "\\e").replace("-", "\\-")
    # Code in back-ticks is shown bold, as man pages have it.
    escaped = re.sub(r"`([^`]+)`", r"\\fB\1\\fR", escaped)
    return "\\&" + escaped if escaped.startswith((".", "'")) else escaped


def page(name: str, command: click.Command) -> str:
    """The page of one command; `name` may be `group verb`."""
    title = f"slurm-ft-{name.replace(' ', '-')}"
    about = tree.paragraphs(command)
    line = COMMANDS[name][1] if name in COMMANDS else about[0][0]
    lines = [*_head(title, line), ".SH SYNOPSIS", f".B {text(tree.synopsis(name, command))}"]
    lines += [".SH DESCRIPTION", *(part for words in about for part in _paragraph(words))]
    if found := tree.options(command):
        lines += [".SH OPTIONS", *_options(found)]
    if shown := tree.examples(command):
        lines += [".SH EXAMPLES", ".nf", *map(text, shown), ".fi"]
    lines += [".SH SEE ALSO", _see("slurm-ft", *(f"slurm-ft-{other}" for other in _relatives(name, command)))]
    return "\n".join(lines) + "\n"


def overview() -> str:
    """The page `slurm-ft`: its commands, variables and exit codes."""
    lines = [*_head("slurm-ft", "keep a distributed PyTorch training alive inside one Slurm allocation")]
    lines += [".SH SYNOPSIS", ".B slurm\\-ft", "COMMAND [OPTIONS]", ".SH COMMANDS"]
    lines += _terms((f"slurm-ft-{name}", line) for name, (_, line) in COMMANDS.items())
    lines += [".SH ENVIRONMENT", *_terms((item.name, item.meaning) for item in env.VARIABLES if item.set_by == "user")]
    codes = sorted(value for name, value in vars(errors).items() if name.startswith("EXIT_"))
    rows = [(str(code), exit_meaning(code)) for code in codes]
    lines += [".SH EXIT STATUS", *_terms([*rows, ("128 + n", "ended by signal n")])]
    lines += [".SH EXAMPLES", ".nf", *map(text, tree.examples(cli)), ".fi"]
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """Every page by its file's name."""
    made = {f"slurm-ft-{name.replace(' ', '-')}.1": page(name, command) for name, command in tree.every_command()}
    return {"slurm-ft.1": overview(), **made}


def write(folder: Path) -> list[Path]:
    """Write all pages below `folder`, which is then fit for MANPATH; gives their paths."""
    section = folder / "man1"
    section.mkdir(parents=True, exist_ok=True)
    written = []
    for name, roff in pages().items():
        (section / name).write_text(roff, encoding="utf-8")
        written.append(section / name)
    return written


def _head(title: str, line: str) -> list[str]:
    upper = text(title.upper())
    return [
        f'.TH "{upper}" 1 "" "slurm\\-ft {__version__}" "User Commands"',
        ".SH NAME",
        f"{text(title)} \\- {text(line)}",
    ]


def _paragraph(lines: list[str]) -> list[str]:
    return [".PP", ".nf", *map(text, lines), ".fi"] if len(lines) > 1 else [".PP", *map(text, lines)]


def _options(found: Iterable[click.Option]) -> list[str]:
    rows = []
    for item in found:
        words, default = tree.option_help(item)
        rows.append((tree.option_names(item), f"{words} Default: {default}.".strip() if default else words))
    return _terms([*rows, ("-h, --help", "Show the help and leave.")])


def _terms(rows: Iterable[tuple[str, str]]) -> list[str]:
    return [line for term, words in rows for line in (".TP", f".B {text(term)}", text(words or "-"))]


def _relatives(name: str, command: click.Command) -> list[str]:
    """The group above a command, and the commands below a group, as page names."""
    above = [name.partition(" ")[0]] if " " in name else []
    below = [f"{name}-{verb}" for verb in command.commands] if isinstance(command, click.Group) else []
    return above + below


def _see(*titles: str) -> str:
    return ", ".join(f"\\fB{text(title)}\\fR(1)" for title in titles)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m slurm_ft.cli.manpages FOLDER")
    write(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
