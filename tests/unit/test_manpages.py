"""Man pages say what the help says, and man reads them without a warning."""

import shutil
import subprocess
from pathlib import Path

import click
import pytest

from slurm_ft.cli import COMMANDS, manpages


def test_there_is_a_page_for_slurm_ft_and_for_each_command(tmp_path: Path) -> None:
    names = {path.name for path in manpages.write(tmp_path)}
    assert {"slurm-ft.1", *(f"slurm-ft-{name}.1" for name in COMMANDS)} <= names
    assert {path.name for path in (tmp_path / "man1").iterdir()} == names


def test_words_that_roff_would_take_for_its_own_stay_words() -> None:
    assert manpages.text(".SH is no heading") == "\\&.SH is no heading"
    assert manpages.text("a\\nb --c") == "a\\enb \\-\\-c"
    assert manpages.text("see `x`") == "see \\fBx\\fR"


def test_a_command_in_a_group_has_a_page_that_names_the_group() -> None:
    verb = click.Command("show", help="Show it.")
    roff = manpages.page("things show", verb)
    assert '.TH "SLURM\\-FT\\-THINGS\\-SHOW" 1' in roff
    assert "\\fBslurm\\-ft\\-things\\fR(1)" in roff
    assert "slurm\\-ft\\-things\\-show" in manpages.page(
        "things", click.Group("things", {"show": verb}, help="Things.")
    )


@pytest.mark.skipif(not shutil.which("man"), reason="there is no man program here")
def test_man_shows_each_page_without_a_warning(tmp_path: Path) -> None:
    manpages.write(tmp_path)
    environ = {"PATH": "/usr/bin:/bin", "MANPATH": str(tmp_path), "LC_ALL": "C.UTF-8", "MANWIDTH": "80"}
    argv = ["man", "--warnings", "-P", "cat", "slurm-ft-submit", "slurm-ft"]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "--min-replicas INTEGER" in done.stdout
    assert "SLURM_FT_RUNS" in done.stdout
