"""Settings that all tests share. Helpers are in `tests.waiting` and `tests.world`."""

import os

import hypothesis
import pytest

# As in a rank (slurm_ft/agent/environ.py): torch asks a nameserver at each connection.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")

# A loaded machine is slow, and a failure must be the same when it is looked for again.
hypothesis.settings.register_profile("slurm-ft", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.load_profile("slurm-ft")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slurm-root", default="", metavar="DIR", help="run the cluster tests on the Slurm in DIR/bin and DIR/sbin"
    )
