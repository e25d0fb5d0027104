"""Modulefiles: both formats say the same, and no prefix breaks them. The real module systems: tests/centre."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import slurm_ft
from slurm_ft import modulefile
from slurm_ft.cli.module import command
from slurm_ft.errors import UsageError

AWKWARD = r'/opt/a b/${HOME}[x]"y"\z'


def settings(text: str) -> list[tuple[str, ...]]:
    """(what, variable) in the order in which a modulefile does it."""
    lua = re.findall(r'^(setenv|prepend_path|append_path)\("(\w+)"', text, re.MULTILINE)
    tcl = re.findall(r"^(setenv|prepend-path|append-path) (\w+)", text, re.MULTILINE)
    return [(what.replace("-", "_"), name) for what, name in lua + tcl]


def test_both_formats_set_the_same_and_no_library_or_python_path() -> None:
    found = settings(modulefile.tcl("/opt/x"))
    assert found == settings(modulefile.lua("/opt/x"))
    assert {name for _, name in found} == {"SLURM_FT_ROOT", "PATH", "MANPATH", "XDG_DATA_DIRS"}


def test_both_formats_have_whatis_help_and_conflict() -> None:
    for text in (modulefile.tcl("/opt/x"), modulefile.lua("/opt/x")):
        assert text.count("whatis") == 3
        assert "help" in text.lower()
        assert "conflict" in text


def test_what_a_module_system_would_read_as_code_is_quoted() -> None:
    assert modulefile.tcl_word(AWKWARD) == r'"/opt/a b/\$\{HOME\}\[x\]\"y\"\\z"'
    assert modulefile.lua_word(AWKWARD) == r'"/opt/a b/${HOME}[x]\"y\"\\z"'


@pytest.mark.parametrize("prefix", ["opt/x", "/opt:x", "/opt/x\n"])
def test_a_prefix_that_cannot_be_on_a_path_is_refused(prefix: str) -> None:
    for form in modulefile.FORMATS.values():
        with pytest.raises(UsageError):
            form(prefix)


def test_the_command_prints_one_format_or_writes_both(tmp_path: Path) -> None:
    run = CliRunner().invoke
    assert run(command, ["--prefix", "/opt/x", "--format", "lua"]).stdout == modulefile.lua("/opt/x")
    assert run(command, ["--prefix", "/opt/x"], env={"LMOD_CMD": None}).stdout == modulefile.tcl("/opt/x")
    assert run(command, ["--prefix", "/opt/x"], env={"LMOD_CMD": "/lmod"}).stdout == modulefile.lua("/opt/x")
    assert run(command, ["--prefix", "/opt/x", "--write", str(tmp_path), "--dry-run"]).exit_code == 0
    assert list(tmp_path.iterdir()) == []
    assert run(command, ["--prefix", "/opt/x", "--write", str(tmp_path)]).exit_code == 0
    version = slurm_ft.__version__
    assert {path.name for path in (tmp_path / "slurm-ft").iterdir()} == {version, f"{version}.lua"}
