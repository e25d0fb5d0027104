"""Which library is chosen, and what is said when none fits."""

import re
from pathlib import Path

import pytest

from slurm_ft.native import InvalidUse, Library, NativeError, Status, Unavailable, load
from slurm_ft.native.errors import CLASSES, error_of
from slurm_ft.native.library import SIGNATURES, allowed
from tests.native import workshop


@pytest.mark.parametrize(
    ("word", "order"),
    [
        ("auto", ("rocm", "cuda", "host")),
        ("", ("rocm", "cuda", "host")),
        ("host, ROCM", ("rocm", "host")),
        ("cuda", ("cuda",)),
    ],
)
def test_gpu_platform_restricts(word: str, order: tuple[str, ...]) -> None:
    assert allowed({"GPU_PLATFORM": word}) == order


def test_a_word_that_is_no_platform_is_refused() -> None:
    with pytest.raises(NativeError, match="no platform vulkan"):
        load(environ={"GPU_PLATFORM": "host,vulkan"})


def test_all_reasons_are_given(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"rocm: .*; cuda: .*; host: its library was not built"):
        load(environ={"SLURM_FT_NATIVE_LIB": str(tmp_path)})


def test_a_library_of_another_abi_or_none_at_all_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.cpp").write_text('extern "C" int sft_abi() { return 999; }\n')
    other = workshop.make(tmp_path / "libslurm_ft_host.so", ["-shared", "-fPIC", str(tmp_path / "other.cpp")])
    with pytest.raises(Unavailable, match="ABI 999"):
        Library(other)
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(Unavailable, match=r"text\.so"):
        Library(tmp_path / "text.so")


def test_the_face_and_the_header_name_the_same_functions_and_statuses() -> None:
    text = (workshop.NATIVE / "include" / "slurm_ft_native.h").read_text(encoding="utf-8")
    declared = set(re.findall(r"^SFT_API [a-z ]+\*? ?(sft_\w+)\(", text, re.MULTILINE))
    assert declared == {*SIGNATURES, "sft_abi", "sft_platform", "sft_last_error"}
    for status in Status:
        assert f"SFT_{status.name} = {status.value}" in text


def test_a_status_that_is_not_known_is_an_internal_error() -> None:
    assert error_of(99, "text").status is Status.INTERNAL
    assert type(error_of(2, "text")) is InvalidUse and CLASSES[Status.BAD_HANDLE] is InvalidUse
