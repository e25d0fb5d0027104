"""A real Slurm for the tests of this folder: started once, gone with the test process, whatever ends it."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_ft.errors import LaunchError
from slurm_ft.testing import devcluster_config as config
from slurm_ft.testing.devcluster import DevCluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.cluster)


def wait_until(true: Callable[[], object], seconds: float = 15.0, what: str = "") -> None:
    """Poll until `true()` holds; fail when it does not in time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:.0f} s: {what or true}")
        time.sleep(0.02)


@pytest.fixture(scope="session")
def slurm_root(pytestconfig: pytest.Config) -> str:
    """The Slurm to test with, other than the machine's own (scripts/slurm_matrix); else ''."""
    return str(pytestconfig.getoption("--slurm-root"))


@pytest.fixture(scope="session")
def slurm_programs(slurm_root: str) -> None:
    try:
        config.find_programs(slurm_root=slurm_root)
    except LaunchError as error:
        pytest.skip(f"{error.message} ({error.hint})")


@pytest.fixture
def short_folder(slurm_programs: None) -> Iterator[Path]:
    """A place with a path short enough for sockets; a cluster that a test left there is ended."""
    parent = Path(tempfile.mkdtemp(prefix="sft-", dir="/tmp"))
    yield parent / "c"
    DevCluster(folder=parent / "c").down(grace=0)
    shutil.rmtree(parent)


@pytest.fixture(scope="session")
def devcluster(slurm_programs: None, slurm_root: str) -> Iterator[DevCluster]:
    """Four hosts with four pretended GPUs each. A test that kills a host revives it."""
    parent = Path(tempfile.mkdtemp(prefix="sft-", dir="/tmp"))
    shape: dict[str, Any] = {"hosts": 4, "gpus": 4, "node_timeout": 5, "slurm_root": slurm_root}
    with DevCluster(folder=parent / "c", die_with=os.getpid(), **shape) as cluster:
        yield cluster
    shutil.rmtree(parent)
