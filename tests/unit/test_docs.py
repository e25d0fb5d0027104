"""The documentation is true where a machine can tell: links, commands, options, messages, generated pages."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import click
import pytest

from slurm_ft import errors
from slurm_ft.cli import COMMANDS, cli
from slurm_ft.events import Kind
from slurm_ft.train import titan

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = {"runs", "build", "dist", "node_modules"}
TEXT = {".md", ".py", ".sh", ".cfg", ".toml", ".txt", ".j2", ".json", ".jsonl", ".yml", ".yaml", ""}


def files() -> list[Path]:
    """The project's own text files, without what tools leave behind."""
    found = []
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        hidden = any(part.startswith(".") and part not in (".ci", ".gitignore") for part in parts)
        made = any(part in SKIPPED or part == "__pycache__" or part.endswith(".egg-info") for part in parts)
        if not hidden and not made and path.is_file() and path.suffix in TEXT:
            found.append(path)
    return found


FILES = files()
PAGES = sorted(path for path in FILES if path.suffix == ".md")
page = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def prose_and_code(path: Path) -> tuple[str, list[str]]:
    """A page's text without its code, and its code: blocks (fenced or indented) and `spans`."""
    prose, code, fenced = [], [], False
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            code.append(line.strip())
        else:
            code += re.findall(r"`([^`]+)`", line)
            prose.append(re.sub(r"`[^`]+`", "", line))
    return "\n".join(prose), code


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as the usual viewers make them."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@page
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    prose, _ = prose_and_code(path)
    for target in re.findall(r"\]\(([^)]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        assert there.exists(), f"{path.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{path.name} links to {target}"


def command_lines(path: Path) -> Iterator[tuple[str, list[str]]]:
    """(command, words after it) for each `slurm-ft COMMAND ...` in the code of a page."""
    joined = "\n".join(prose_and_code(path)[1]).replace("\\\n", " ")
    for line in joined.splitlines():
        for match in re.finditer(r"(?:^|[\s(])slurm-ft ([a-z][\w-]*)(?!:)\b([^#;|&)]*)", line):
            try:
                words = shlex.split(match[2])
            except ValueError:
                words = match[2].split()
            yield match[1], words


def known_options(command: click.Command) -> set[str]:
    return {name for item in command.params for name in (*item.opts, *item.secondary_opts)} | {"-h", "--help"}


def check_options(command: click.Command, words: list[str], where: str) -> None:
    for word in words:
        if word == "--":
            return
        if word.startswith("-"):
            assert word.partition("=")[0] in known_options(command), f"{where}: no option {word}"


@page
def test_every_command_and_option_in_the_docs_exists(path: Path) -> None:
    for name, words in command_lines(path):
        assert name in COMMANDS, f"{path.name} names `slurm-ft {name}`"
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        check_options(command, words, f"{path.name}: slurm-ft {name}")
        if "titan" in words:
            check_options(titan.command, words[words.index("titan") + 1 :], f"{path.name}: titan")


def test_the_commands_are_looked_for_where_they_are_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Use `slurm-ft stop --now`.\n\n    slurm-ft submit \\\n        --replicas 2 -- titan --steps 60\n")
    assert list(command_lines(page)) == [
        ("stop", ["--now"]),
        ("submit", ["--replicas", "2", "--", "titan", "--steps", "60"]),
    ]
    with pytest.raises(AssertionError, match="no option --now"):
        test_every_command_and_option_in_the_docs_exists(page)


def make_docs() -> ModuleType:
    loader = SourceFileLoader("make_docs", str(ROOT / "scripts" / "make_docs"))
    spec = importlib.util.spec_from_loader("make_docs", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_the_pages_that_are_made_from_the_code_are_current() -> None:
    stale = make_docs().stale(ROOT / "docs")
    assert not stale, "run scripts/make_docs"


def test_a_page_that_is_not_current_is_noticed(tmp_path: Path) -> None:
    module = make_docs()
    for name, make in module.PAGES.items():
        (tmp_path / name).write_text(make(), encoding="utf-8")
    assert module.stale(tmp_path) == []
    (tmp_path / "commands.md").write_text("old", encoding="utf-8")
    (tmp_path / "environment.md").unlink()
    assert {path.name for path in module.stale(tmp_path)} == {"commands.md", "environment.md"}


def test_the_error_tree_in_the_docs_is_that_of_the_classes() -> None:
    drawn = dict(re.findall(r"(\w+) {2,}(\d+) {2,}", errors.__doc__ or ""))
    classes = [item for item in vars(errors).values() if isinstance(item, type) and item.__module__ == errors.__name__]
    assert drawn == {item.__name__: str(item.exit_code) for item in classes if issubclass(item, errors.SlurmFTError)}


def test_the_readme_names_the_two_commands_and_they_are_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for script in ("scripts/quickstart", "scripts/test"):
        assert f"    {script} " in text
        assert (ROOT / script).stat().st_mode & 0o111


def test_every_page_is_reached_from_the_readme() -> None:
    reached, left = set(), [ROOT / "README.md"]
    while left:
        path = left.pop()
        if path in reached or path.suffix != ".md" or not path.exists():
            continue
        reached.add(path)
        targets = re.findall(r"\]\(([^)#:]+)\)", prose_and_code(path)[0])
        left += [(path.parent / target).resolve() for target in targets]
    assert not [path for path in PAGES if path.is_relative_to(ROOT / "docs") and path not in reached]


def test_every_kind_of_event_is_explained() -> None:
    _, code = prose_and_code(ROOT / "docs" / "how-it-works.md")
    assert set(Kind) <= set(code)


FOREIGN = ("srun: error: ", "Node failure on", "Unable to reset NCCL", "terminate called", "Requested node")


def test_the_messages_that_are_explained_are_those_of_the_code() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("slurm_ft/**/*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # a sentence over two lines
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    unknown = []
    for cell in re.findall(r"^\| (`.*?) \| ", text, re.MULTILINE):
        for message in re.findall(r"`([^`]+)`", cell):
            for piece in re.split(r"\.\.\.|\b[14] ", message.removeprefix("warning: ")):
                if len(piece.strip(" :;,")) > 4 and not any(word in piece for word in FOREIGN):
                    unknown += [message] if piece.strip() not in source else []
    assert not unknown


def test_nothing_of_the_machine_it_was_made_on_is_in_the_files() -> None:
    # Put together here, since this file is one of those that are searched.
    places = [f"/{name}/" for name in ("work", "farm", "root")]
    hosts = [".".join(parts) for parts in (("pypi", "org"), ("files", "pythonhosted", "org"), ("deb", "debian", "org"))]
    wanted = re.compile("|".join(re.escape(word) for word in (*places, *hosts, "index" + "-url")))
    found = []
    for path in FILES:
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if wanted.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert not found
