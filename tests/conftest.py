"""Settings that all tests share. Helpers are in `tests.waiting` and `tests.world`."""

import hypothesis
import pytest

# A loaded machine is slow, and a failure must be the same when it is looked for again.
hypothesis.settings.register_profile("slurm-ft", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.load_profile("slurm-ft")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slurm-root", default="", metavar="DIR", help="run the cluster tests on the Slurm in DIR/bin and DIR/sbin"
    )
