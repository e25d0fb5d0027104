from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local.running import Run, a_run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run on this machine that a test starts. No process of it is left after the test."""
    with a_run(tmp_path) as found:
        yield found
