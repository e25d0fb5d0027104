"""The completion scripts in the shells themselves. zsh's line editor is stood in for; bash and fish are whole."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_ft.cli import COMMANDS
from slurm_ft.cli.completion import script
from tests.debian import unpacked

BIN = str(Path(sys.executable).parent)


def shell(*argv: str, folder: Path, **environment: str) -> str:
    environ = {"PATH": f"{BIN}:/usr/bin:/bin", "HOME": str(folder), "LC_ALL": "C.UTF-8", "TERM": "dumb", **environment}
    done = subprocess.run(argv, env=environ, cwd=folder, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("titan-4711", "titan-4712", "other-1"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / "other-1" / "not-a-run").touch()
    for index, name in enumerate(("titan-4712", "titan-4711")):
        os.utime(tmp_path / "runs" / name, (1000 + index, 1000 + index))
    return tmp_path


def bash(folder: Path, *words: str) -> list[str]:
    code = script("bash") + 'shift 0; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _slurm_ft_completion slurm-ft\n'
    return shell(
        "bash", "--norc", "-c", code + "printf '%s\\n' \"${COMPREPLY[@]}\"", "-", *words, folder=folder
    ).split()


def test_bash_completes_commands_options_choices_and_runs(folder: Path) -> None:
    assert bash(folder, "slurm-ft", "sta") == ["status"]
    assert bash(folder, "slurm-ft", "") == list(COMMANDS)
    assert bash(folder, "slurm-ft", "submit", "--min") == ["--min-replicas"]
    assert bash(folder, "slurm-ft", "submit", "--cluster", "l") == ["local"]
    assert bash(folder, "slurm-ft", "report", "titan") == ["titan-4711", "titan-4712"]


def test_a_word_that_is_no_command_completes_to_nothing_and_says_nothing(folder: Path) -> None:
    assert bash(folder, "slurm-ft", "stauts", "--f") == []


def find(program: str, *packages: str) -> tuple[str, Path]:
    """A shell that is installed, or its package's, and the root folder of it."""
    if installed := shutil.which(program):
        return installed, Path("/")
    root = unpacked(*packages)
    return next(str(place) for place in (root / "bin" / program, root / "usr/bin" / program) if place.exists()), root


def test_zsh_completes_commands_with_their_lines(folder: Path) -> None:
    program, root = find("zsh", "zsh")
    modules = next(root.glob("usr/lib/*/zsh/*/"), root)
    stand_ins = "compdef() { :; }; _describe() { print -rl -- $completions_with_descriptions; }; compadd() { :; }\n"
    code = f"module_path=({modules} $module_path)\n{stand_ins}{script('zsh')}\nwords=(slurm-ft sta); CURRENT=2; "
    out = shell(program, "-f", "-c", code + "_slurm_ft_completion", folder=folder)
    assert out.strip() == f"status:{COMMANDS['status'][1]}"


def test_fish_completes_commands_and_runs(folder: Path) -> None:
    program, root = find("fish", "fish", "fish-common", "libpcre2-32-0")
    libraries = ":".join(str(place) for place in root.glob("usr/lib/*-linux-gnu"))
    for line, wanted in (("slurm-ft sta", ["status"]), ("slurm-ft report other", ["other-1"])):
        code = f'{script("fish")}\ncomplete -C "{line}"'
        out = shell(program, "--no-config", "-c", code, folder=folder, LD_LIBRARY_PATH=libraries)
        assert [item.split("\t")[0] for item in out.splitlines()] == wanted
