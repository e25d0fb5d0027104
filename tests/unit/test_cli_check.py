"""`slurm-ft check --native`: silent when all is well, one line for each fault otherwise."""

import json

from click.testing import CliRunner

from slurm_ft.cli import check
from slurm_ft.native.probes import Gpu
from slurm_ft.native.report import Platform, Report, faults

WELL = Report("host", (Platform("host"), Platform("cuda", "not built"), Platform("rocm", "not built")))


def test_a_host_without_gpus_needs_only_the_host_library() -> None:
    assert faults(WELL) == []


def test_a_missing_host_library_is_a_fault() -> None:
    (fault,) = faults(Report("", (Platform("host", "not built"),)))
    assert fault == "the native library for host cannot be used: not built"


def test_gpus_without_their_library_are_a_fault() -> None:
    gpu = Gpu("0000:c1:00.0", "MI300X", 1, 0, "rocm")
    (fault,) = faults(Report("host", WELL.platforms, (gpu,)))
    assert fault == "there are rocm GPUs and their native library cannot be used: not built"


def test_faults_are_printed_and_the_exit_code_says_so() -> None:
    environment = {"SLURM_FT_NATIVE_LIB": "/nonexistent"}
    result = CliRunner().invoke(check.command, ["--native"], env=environment)
    assert result.exit_code == 1
    assert result.output.startswith("ERROR: the native library for host cannot be used")
    assert json.loads(CliRunner().invoke(check.command, ["--native", "--json"], env=environment).output)["faults"]
