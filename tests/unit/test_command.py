import ast
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_ft.agent.command import BOOTSTRAP, expand_titan, is_python, program_index, rank_argv

HERE = "/opt/venv/bin/python"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python x.py --lr 1", "python B x.py --lr 1"),
        ("/usr/bin/python3.11 x.py", "/usr/bin/python3.11 B x.py"),
        ("python3 -m pkg.mod -c 3", "python3 B -m pkg.mod -c 3"),
        ("python3.13t x.py", "python3.13t B x.py"),
        ("python -c pass a", "python B -c pass a"),
        ("python -u -OO x.py", "python -u -OO B x.py"),
        ("python -W ignore x.py", "python -W ignore B x.py"),
        ("python -Wignore x.py", "python -Wignore B x.py"),
        ("python -uW ignore x.py", "python -uW ignore B x.py"),
        ("python -X dev -X importtime -m mod", "python -X dev -X importtime B -m mod"),
        ("python -Xdev x.py -m y", "python -Xdev B x.py -m y"),
        ("titan --steps 60", f"{HERE} B -m slurm_ft.train.titan --steps 60"),
        ("titan", f"{HERE} B -m slurm_ft.train.titan"),
    ],
)
def test_our_bootstrap_comes_in_front_of_a_python_program(command: str, expected: str) -> None:
    assert list(rank_argv(shlex.split(command), HERE, "B")) == shlex.split(expected)


@pytest.mark.parametrize(
    "command",
    ["./train", "bash -c 'python x.py'", "/opt/titan/titan x", "torchrun x.py", "mypython x.py", "python-config",
     "python", "python --version", "python -V", "python -", "python -u", "python -W", "python -mpkg", "python -um pkg",
     "python -cpass", "python --check-hash-based-pycs always x.py", "python2 x.py", "x.py"],
)  # fmt: skip
def test_any_other_command_stays_as_it_is(command: str) -> None:
    assert list(rank_argv(shlex.split(command), HERE, "B")) == shlex.split(command)


def test_titan_is_our_adapter_only_as_the_first_word() -> None:
    assert expand_titan(("echo", "titan"), HERE) == ("echo", "titan")
    assert expand_titan((), HERE) == ()


def test_the_bootstrap_is_a_file_of_the_standard_library_alone() -> None:
    tree = ast.parse(Path(BOOTSTRAP).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= {*sys.stdlib_module_names}


words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)


@given(st.lists(words, min_size=1).map(tuple))
def test_no_word_of_a_command_is_lost_changed_or_moved(command: tuple[str, ...]) -> None:
    argv = list(rank_argv(command, HERE, "\0"))
    without = [word for word in argv if word != "\0"]
    assert argv.count("\0") <= 1
    assert tuple(without) in (command, expand_titan(command, HERE))


flags = st.lists(st.sampled_from(["-u", "-B", "-Wignore", "-W ignore", "-X dev", "-Xutf8", "-uB", "-sW ignore", "-E"]))


@settings(max_examples=8)
@given(flags)
def test_python_itself_agrees_where_the_program_starts(chosen: list[str]) -> None:
    command = [sys.executable, *shlex.split(" ".join(chosen)), "-c", "import sys; print(sys.argv)", "-m", "x"]
    index = program_index(command)
    assert index is not None
    assert command[index] == "-c"
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    assert ast.literal_eval(out) == ["-c", *command[index + 2 :]]


@pytest.mark.parametrize("name", ["python", "python3", "python3.9", "python3.13t", "/a b/python3"])
def test_a_python_is_known_by_its_name(name: str) -> None:
    assert is_python(name)
