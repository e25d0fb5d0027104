"""The HIP twins are what hipify makes of the sources, and no CUDA name is left in them that nobody defines."""

from pathlib import Path
from typing import Any

import pytest

from tests.native import workshop

hipify: Any = workshop.load_file(workshop.ROOT / "scripts" / "hipify", "slurm_ft_hipify")


def test_the_twins_are_current() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.__version__.startswith(f"{hipify.TORCH}."):
        pytest.skip(f"torch is {torch.__version__}, the twins were made with {hipify.TORCH}")
    assert hipify.problems() == [], "run scripts/hipify"


@pytest.mark.parametrize("target", hipify.TWINS.values())
def test_no_name_is_left_over(target: str) -> None:
    """Also without torch: the tool itself says nothing about what it leaves."""
    text = (workshop.NATIVE / target).read_text(encoding="utf-8")
    left = hipify.leftovers(text)
    assert left <= hipify.known() | hipify.CUDA_ONLY


def test_each_name_in_the_list_is_needed() -> None:
    """A line that no twin needs any more would hide a later mistake."""
    left: set[str] = set()
    for target in hipify.TWINS.values():
        left |= hipify.leftovers((workshop.NATIVE / target).read_text(encoding="utf-8"))
    assert hipify.known() <= left


def test_leftovers_are_found_in_code_and_only_there() -> None:
    text = 'cuMemNew(x); // cuMemOld\n"cuText" /* CU_A_B */ hipMemNew(CU_MEM_X, CUresult(), cudaFree, CUDA_SUCCESS);'
    assert hipify.leftovers(text) == {"cuMemNew", "CU_MEM_X", "CUresult", "cudaFree", "CUDA_SUCCESS"}


def test_a_stale_twin_is_noticed(tmp_path: Path) -> None:
    pytest.importorskip("torch.utils.hipify", reason="torch is not installed")
    for target in hipify.TWINS.values():
        (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / target).write_text((workshop.NATIVE / target).read_text(encoding="utf-8") + "cuNew();\n")
    found = " ".join(hipify.problems(tmp_path))
    assert "is not what scripts/hipify makes" in found and "still has cuNew" in found
