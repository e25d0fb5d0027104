"""Whatever the docs tell people to type is understood by the program: not only the names of options, but their
values, arguments and subcommands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from slurm_ft.cli import cli
from tests.unit.test_docs import PAGES, ROOT

ENDS = {"|", "||", "&&", ";", ">", ">>", "#", "&"}


def typed(path: Path) -> list[str]:
    """The lines of a page's code blocks that call slurm-ft, with continued ones joined."""
    joined = path.read_text(encoding="utf-8").replace("\\\n", " ")
    lines, fenced = [], False
    for line in joined.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            lines.append(line.strip())
    return [line for line in lines if re.search(r"(^|[\s(])slurm-ft [a-z-]", line)]


def words(line: str) -> list[str]:
    """The words after `slurm-ft`, up to what the shell takes for itself or an explanation behind wide blanks."""
    rest = line[re.search(r"(^|[\s(])slurm-ft ", line).end() :]  # type: ignore[union-attr]
    rest = re.split(r" {3,}|  # |\)(?=[\s\"]|$)", rest)[0]
    found = shlex.split(rest, comments=True)
    return found[: next((n for n, word in enumerate(found) if word in ENDS or word.startswith((">", "2>"))), None)]


def parses(arguments: list[str]) -> None:
    """Raises click.ClickException for what the program would not understand. Runs nothing."""
    command: click.Command = cli
    context = click.Context(cli, info_name="slurm-ft")
    if arguments[:1] in (["--version"], ["-h"], ["--help"]):
        return
    while isinstance(command, click.Group):
        name, found, arguments = command.resolve_command(context, arguments)
        assert found is not None
        command = found
        context = click.Context(command, info_name=name, parent=context)
    if set(arguments) & {"-h", "--help"}:
        return
    command.make_context(context.info_name, list(arguments), parent=context.parent)


SYNOPSIS = re.compile(r"\[OPTIONS\]|\w\|\w|COMMAND| \.\.\. ")
LINES = [(path, line) for path in PAGES for line in typed(path) if not SYNOPSIS.search(line)]


@pytest.mark.parametrize(("path", "line"), LINES, ids=[f"{path.name}: {line[:60]}" for path, line in LINES])
def test_what_the_docs_say_to_type_is_understood(
    path: Path, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    try:
        parses(words(line))
    except click.ClickException as error:
        pytest.fail(f"{path.relative_to(ROOT)}: {line}: {error.format_message()}")


def test_the_lines_of_the_recipes_are_among_them_and_a_wrong_one_is_noticed() -> None:
    assert sum(path.name == "recipes.md" for path, _ in LINES) > 25
    assert words('job=$(slurm-ft submit --parsable -- python "a b.py")') == [
        "submit",
        "--parsable",
        "--",
        "python",
        "a b.py",
    ]
    assert words("slurm-ft status            # of the newest run") == ["status"]
    assert words("slurm-ft check --all --hosts || exit 75") == ["check", "--all", "--hosts"]
    for wrong in (["submit", "--replicas", "four", "--", "x"], ["nothing"], ["check", "surplus"], ["check", "--now"]):
        with pytest.raises(click.ClickException):
            parses(wrong)
