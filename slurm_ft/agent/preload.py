"""What a zygote imports ahead for a command. Pure, but for reading the script.

`titan` says it itself. Of a script, what it imports at its top level counts, as far as it is known to be slow
and safe to import before a fork. Other programs have no zygote.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from slurm_ft.agent.command import is_python, program_index
from slurm_ft.train import titan

KNOWN = frozenset({"torch", "torchft", "numpy", "datasets", "tokenizers"})
ALWAYS_WITH_TORCH = "torch._dynamo"
"""Imported by torch itself at the first optimizer step, where it costs as much again."""

OUR_TRAINING = "slurm_ft.train"
"""What stands behind `keep` imports torch's DTensor, which is slow too."""

GPU_DEVICES = ("/dev/kfd", "/dev/nvidiactl")


def host_has_gpu() -> bool:
    return any(Path(device).exists() for device in GPU_DEVICES)


def modules_for(command: Sequence[str], gpu: bool) -> tuple[str, ...]:
    """The modules to import ahead for this command; none means that it has no use for a zygote."""
    if command[0] == "titan":
        return titan.PRELOAD if gpu else titan.PRELOAD_WITHOUT_GPU
    index = program_index(command) if is_python(command[0]) else None
    if index is None or command[index].startswith("-"):
        return ()
    try:
        tree = ast.parse(Path(command[index]).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ()  # the rank will say what is wrong with it
    imported = list(_imports(tree.body))
    found = [name for name in imported if name.partition(".")[0] in KNOWN]
    if any(name.startswith(OUR_TRAINING) for name in imported) and "torch" in found:
        found.append(f"{OUR_TRAINING}.kept")
    if any(name.partition(".")[0] in ("torch", "torchft") for name in found):
        found.append(ALWAYS_WITH_TORCH)
    return tuple(dict.fromkeys(found))


def _imports(body: Sequence[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module
        elif isinstance(statement, ast.Try):
            yield from _imports(statement.body)
