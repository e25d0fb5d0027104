"""The host library, built once per session and loaded into the test process."""

import os

import pytest

from slurm_ft.native import Library, load
from tests.native import workshop


@pytest.fixture(scope="session")
def host() -> Library:
    path = workshop.library("host")
    return load("host", {**os.environ, "SLURM_FT_NATIVE_LIB": str(path.parent)})
