import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft.errors import UsageError
from slurm_ft.observe import text


def test_a_wide_character_takes_two_cells_and_a_combining_one_none() -> None:
    assert text.width("für") == 3
    assert text.width("学習") == 4
    assert text.width("e\u0301") == 1


def test_columns_line_up_below_wide_names() -> None:
    lines = text.table(("NAME", "STEP"), [["学習", "1"], ["Versuch_für_Öl", "20"]], right=("STEP",))
    assert lines == ["NAME           STEP", "学習              1", "Versuch_für_Öl   20"]
    assert len({text.width(line) for line in lines}) == 1


@given(st.text(max_size=30), st.integers(min_value=0, max_value=20))
def test_fit_never_exceeds_the_width(words: str, cells: int) -> None:
    assert text.width(text.fit(text.clean(words), cells)) <= max(cells, 0)


@given(st.lists(st.lists(st.text(max_size=8), min_size=2, max_size=2), max_size=5))
def test_no_row_of_a_table_can_break_its_line_or_move_the_cursor(rows: list[list[str]]) -> None:
    lines = text.table(("A", "B"), rows)
    assert len(lines) == len(rows) + 1
    assert all(char.isprintable() or not char.isascii() for line in lines for char in line)
    assert not any("\x1b" in line or "\x9b" in line for line in lines)


@pytest.mark.parametrize(
    ("seconds", "words"), [(None, "-"), (5.9, "0:05"), (65, "1:05"), (7200, "2:00:00"), (93600, "1-02:00:00")]
)
def test_elapsed_is_written_as_squeue_writes_it(seconds: float | None, words: str) -> None:
    assert text.elapsed(seconds) == words


def test_short_spans_keep_the_digits_that_matter() -> None:
    assert [text.short(value) for value in (0.0004, 0.02, 1.44, 95.2)] == ["0.4ms", "0.02s", "1.4s", "95s"]


def test_times_are_iso_8601_in_utc_and_nonsense_is_none() -> None:
    assert text.iso(1_700_000_000.25) == "2023-11-14T22:13:20.250Z"
    assert text.iso(None) is None
    assert text.iso(1e300) is None


def test_a_selector_names_numbers_and_ranges() -> None:
    assert text.selected("1,3,5-8") == {1, 3, 5, 6, 7, 8}


@pytest.mark.parametrize("wrong", ["", "a", "1,", "-3", "1--2", "1 2"])
def test_a_wrong_selector_is_told(wrong: str) -> None:
    with pytest.raises(UsageError):
        text.selected(wrong)


def test_hosts_are_in_bracket_form_and_odd_names_as_they_are() -> None:
    assert text.hostlist(["node1", "node2", "node3"]) == "node[1-3]"
    assert text.hostlist(["a b", "c"]) == "a b,c"
    assert text.hostlist([]) == "-"


def test_format_chooses_columns_or_adds_to_them() -> None:
    assert text.pick(("A", "B"), None) == ["A", "B"]
    assert text.pick(("A", "B"), "b") == ["B"]
    assert text.pick(("A", "B"), "+c,d") == ["A", "B", "C", "D"]


def test_an_unknown_column_lists_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        text.cells(["C"], {"A": "1", "B": "2"})
    assert caught.value.hint == "columns: A, B"
