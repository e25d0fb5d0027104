"""From the command a user gave to the argv of a rank. Pure.

titan ARGS            our torchtitan adapter: `python -m slurm_ft.train.titan ARGS`
python ... x.py       the same Python, with our bootstrap in front of the program
anything else         as it is; it is supervised, but nothing inside it is observed
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import slurm_ft.train

BOOTSTRAP = str(Path(slurm_ft.train.__file__).with_name("bootstrap.py"))

_PYTHON = re.compile(r"python(3(\.\d+)?)?t?")
_WITH_VALUE = frozenset("WX")
_STOPS = frozenset("cm")


def expand_titan(command: Sequence[str], python: str) -> tuple[str, ...]:
    """The command with `titan` spelt out."""
    if command and command[0] == "titan":
        return (python, "-m", "slurm_ft.train.titan", *command[1:])
    return tuple(command)


def is_python(program: str) -> bool:
    return _PYTHON.fullmatch(Path(program).name) is not None


def program_index(command: Sequence[str]) -> int | None:
    """Where the program starts in a Python command line: at `-c`, `-m` or the script.

    None when it has none, as in `python --version`, or when it is read from standard input.
    """
    index = 1
    while index < len(command):
        word = command[index]
        if word == "-" or word.startswith("--"):
            return None
        if not word.startswith("-"):
            return index
        for position, letter in enumerate(word[1:], 1):
            if letter in _STOPS:
                # `-um mod` holds flags before the letter: only a lone `-m` or `-c` can be handed on.
                return index if position == 1 and len(word) == 2 else None
            if letter in _WITH_VALUE:
                index += position == len(word) - 1
                break
        index += 1
    return None


def rank_argv(command: Sequence[str], python: str, bootstrap: str = BOOTSTRAP) -> tuple[str, ...]:
    """The argv of a rank. `python` is the Python that slurm-ft itself runs on."""
    command = expand_titan(command, python)
    index = program_index(command) if is_python(command[0]) else None
    if index is None:
        return tuple(command)
    return (*command[:index], bootstrap, *command[index:])
