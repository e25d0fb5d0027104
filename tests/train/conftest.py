"""Runs of replicas for these tests. What cannot run here says why."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RUST_LOG", "error")

NEEDED = ("torch", "torchft", "torchtitan", "tokenizers")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if MISSING:
        reason = f"needs {', '.join(MISSING)}: pip install 'slurm-ft[train]'"
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes a `replicas.Run` in a folder of its own and ends all its processes after the test."""
    import replicas

    runs: list[Any] = []

    def make(count: int, **lighthouse: int) -> Any:
        folder = tmp_path / f"run{len(runs)}"
        folder.mkdir()
        runs.append(replicas.Run(folder, count, **lighthouse))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


@pytest.fixture
def in_fork() -> Callable[..., None]:
    """Runs a function of train_workers.py in a process that has torch, and fails with its traceback."""
    import replicas

    def call(function: Callable[..., None], *arguments: Any) -> None:
        here, there = multiprocessing.Pipe(duplex=False)
        process = replicas.CONTEXT.Process(target=replicas.call_and_tell, args=(there, function, arguments))
        process.start()
        there.close()
        failure = here.recv() if here.poll(replicas.DEADLINE) else "no answer within the deadline"
        process.kill() if failure else process.join()
        process.join()
        if failure:
            pytest.fail(failure, pytrace=False)

    return call
