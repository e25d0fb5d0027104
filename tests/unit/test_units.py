"""Times and memory: every spelling of Slurm's means one number, and garbage means an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft.errors import UsageError
from slurm_ft.slurm.units import NoTime, format_memory, format_time, parse_memory, parse_time, read_memory, read_time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("30:00", 1800),
        ("1:30:00", 5400),
        ("2-12", 216000),
        ("2-12:30", 217800),
        ("1-00:00:00", 86400),
        ("0:45", 45),
        ("1:90:00", 9000),
        (" 60 ", 3600),
        ("0", None),
        ("0:00", None),
        ("0-0", None),
        ("UNLIMITED", None),
        ("infinite", None),
        ("INFINITE", None),
    ],
)
def test_rw47_a_time_limit_is_read_in_every_spelling_of_sbatch(text: str, seconds: int | None) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize(
    "text",
    (
        *("", "abc", "-5", "1.5", ":30", "1:2:3:4", "2-", "-2", "2-12:", "1h", "90 min", "١", "1e3", "9999999999-0"),
        *("Partition_Limit", "NOT_SET", "INVALID", "N/A"),
    ),
)
def test_rw47_garbage_is_an_error_and_never_zero_or_no_limit(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_time(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("29:59", 1799),
        ("1-00:00:00", 86400),
        ("0:00", 0),
        ("UNLIMITED", NoTime.UNLIMITED),
        ("infinite", NoTime.UNLIMITED),
        ("Partition_Limit", NoTime.PARTITION_LIMIT),
        ("NOT_SET", NoTime.UNKNOWN),
        ("INVALID", NoTime.UNKNOWN),
        ("N/A", NoTime.UNKNOWN),
        ("", NoTime.UNKNOWN),
        ("a word of a later Slurm", NoTime.UNKNOWN),
    ],
)
def test_rw47_an_answer_of_slurm_keeps_no_limit_no_time_and_unknown_apart(text: str, meaning: int | NoTime) -> None:
    assert read_time(text) == meaning


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(45, "0:00:45"), (1800, "0:30:00"), (86399, "23:59:59"), (217800, "2-12:30:00"), (None, "UNLIMITED")],
)
def test_a_limit_is_written_in_a_form_that_cannot_be_misread(seconds: int | None, text: str) -> None:
    assert format_time(seconds) == text


@given(st.none() | st.integers(1, 10**9))
def test_a_limit_that_is_written_is_read_back(seconds: int | None) -> None:
    assert parse_time(format_time(seconds)) == seconds


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_limit_of_no_time_is_never_written_because_slurm_reads_it_as_no_limit(seconds: int) -> None:
    with pytest.raises(UsageError, match="leaves no time"):
        format_time(seconds)


@pytest.mark.parametrize(
    ("text", "up", "down"),
    [
        ("4G", 4096, 4096),
        ("4GiB", 4096, 4096),
        ("4096M", 4096, 4096),
        ("2.5G", 2560, 2560),
        ("24G", 24576, 24576),
        ("24GB", 22889, 22888),
        ("4 gb", 3815, 3814),
        ("2500", 2500, 2500),
        ("512000K", 500, 500),
        ("1t", 1048576, 1048576),
        ("1.5", 2, 1),
        ("0", 0, 0),
        ("0G", 0, 0),
    ],
)
def test_rw56_memory_is_read_by_one_rule_and_rounded_to_the_safe_side(text: str, up: int, down: int) -> None:
    assert parse_memory(text) == up
    assert parse_memory(text, round_up=False) == down


@pytest.mark.parametrize(
    "text", ["", "G", "-4G", "4P", "4X", "4B", "4iB", "1e3M", "4,5G", "4G4", ".5G", "nan", "9" * 5000]
)
def test_rw56_text_that_is_not_memory_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_memory(text)
    assert caught.value.hint


def test_rw56_a_limit_is_never_rounded_down_to_zero_because_zero_means_the_whole_node() -> None:
    assert parse_memory("1K") == 1
    with pytest.raises(UsageError, match="less than 1 MiB"):
        parse_memory("1K", round_up=False)


@given(st.integers(0, 2**40))
def test_memory_that_is_written_is_a_whole_number_and_read_back(mib: int) -> None:
    assert parse_memory(format_memory(mib)) == mib


def test_zero_memory_stays_zero_and_less_is_refused() -> None:
    assert format_memory(0) == "0"
    with pytest.raises(UsageError):
        format_memory(-1)


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("4000M", 4000),
        ("1.50G", 1536),
        ("532K", 1),
        ("0", 0),
        ("1048577", 2),
        ("4Gn", 4096),
        ("2Gc", 2048),
        ("4000M?", 4000),
        ("2T", 2 * 1024 * 1024),
        ("", None),
        ("N/A", None),
        ("-1", None),
        ("4GB", None),
    ],
)
def test_memory_as_slurm_prints_it_is_mib_and_nothing_is_taken_for_zero(text: str, mib: int | None) -> None:
    assert read_memory(text) == mib
