import io
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft.errors import RunFolderError, UsageError
from slurm_ft.observe import logs
from slurm_ft.observe.logs import Log, Reader, Target
from slurm_ft.paths import RunPaths


def write(paths: RunPaths, replica: int, attempt: int, rank: int, content: bytes) -> Path:
    path = paths.rank_log(replica, attempt, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(content)
    return path


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path)
    write(paths, 0, 1, 0, b"zero\n")
    write(paths, 0, 1, 1, b"one\n")
    write(paths, 2, 1, 0, b"old\n")
    write(paths, 2, 2, 0, b"new\nd\xe9j\xe0\nhalf")
    return paths


def shown(paths: RunPaths, target: Target, lines: int | None = None) -> bytes:
    out = io.BytesIO()
    logs.show(logs.find(paths, target), out, lines)
    return out.getvalue()


def test_the_last_attempt_is_shown_byte_for_byte_and_its_last_line_is_ended(paths: RunPaths) -> None:
    assert shown(paths, Target.parse("2")) == b"new\nd\xe9j\xe0\nhalf\n"


def test_lines_of_several_ranks_are_labelled(paths: RunPaths) -> None:
    assert shown(paths, Target.parse("0")) == b"0/0 | zero\n0/1 | one\n"
    assert shown(paths, Target.parse("0/1")) == b"one\n"


def test_an_attempt_can_be_named(paths: RunPaths) -> None:
    assert shown(paths, Target.parse("2", attempt=1)) == b"old\n"


def test_a_log_that_is_not_there_is_told_with_what_there_is(paths: RunPaths) -> None:
    with pytest.raises(RunFolderError) as caught:
        logs.find(paths, Target.parse("7/0"))
    assert "replica 7, rank 0" in caught.value.message
    assert "2 (attempt 1 to 2)" in caught.value.hint
    with pytest.raises(RunFolderError) as caught:
        logs.find(RunPaths(paths.root / "none"), Target())
    assert "no rank has started" in caught.value.hint


def test_a_wrong_target_is_told() -> None:
    for wrong in ("x", "1/", "/2", "1/2/3"):
        with pytest.raises(UsageError):
            Target.parse(wrong)


@given(st.lists(st.binary(max_size=5), max_size=12), st.integers(0, 6), st.booleans(), st.integers(1, 7))
def test_the_last_lines_are_those_that_tail_gives(content: list[bytes], count: int, ended: bool, block: int) -> None:
    text = b"\n".join(part.replace(b"\n", b"") for part in content) + (b"\n" if ended else b"")
    whole = text.removesuffix(b"\n").split(b"\n") if text else []
    expected = b"\n".join(whole[-count:]) if count else b""
    before, logs.BLOCK = logs.BLOCK, block
    try:
        file = io.BytesIO(text)
        file.seek(logs.tail_position(file, count))
        assert file.read().removesuffix(b"\n") == expected
    finally:
        logs.BLOCK = before


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=6))
def test_a_growing_log_loses_and_doubles_no_byte(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("log") / "0.log"
    reader = Reader(Log(0, 1, 0, path))
    seen, at = b"", 0
    for cut in [*sorted(cuts), len(content)]:
        with path.open("ab") as file:
            file.write(content[at:cut])
        at = max(at, min(cut, len(content)))
        seen += b"".join(reader.news())
    seen += b"".join(reader.news(last=True))
    assert seen.removesuffix(b"\n") == content.removesuffix(b"\n")


def follow(paths: RunPaths, target: Target, *steps: Callable[[], object], **options: int) -> bytes:
    """Follow while these things happen, one at each wait, and end after the last."""
    left, out = list(steps), io.BytesIO()
    logs.follow(paths, target, out, lambda: not left, wait=lambda seconds: left.pop(0)() and None, **options)
    return out.getvalue()


def test_following_keeps_lines_whole_and_goes_on_with_a_new_attempt(paths: RunPaths) -> None:
    out = follow(
        paths,
        Target.parse("2/0"),
        lambda: write(paths, 2, 2, 0, b" line\n"),
        lambda: write(paths, 2, 2, 0, b"cut off by a kill"),
        lambda: write(paths, 2, 3, 0, b"third\n"),
    )
    assert out == b"new\nd\xe9j\xe0\nhalf line\ncut off by a kill\nthird\n"


def test_following_waits_for_logs_that_are_not_there_yet(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert follow(paths, Target(), lambda: write(paths, 0, 1, 0, b"a\n")) == b"0/0 | a\n"


def test_following_shows_only_the_end_of_what_is_there(paths: RunPaths) -> None:
    write(paths, 0, 1, 0, b"more\n")
    out = follow(paths, Target.parse("0/0"), lambda: write(paths, 0, 1, 0, b"and more\n"), lines=1)
    assert out == b"more\nand more\n"


def test_a_log_that_was_cut_short_is_read_from_its_start_again(paths: RunPaths) -> None:
    def cut() -> None:
        paths.rank_log(0, 1, 0).write_bytes(b"z\n")

    assert follow(paths, Target.parse("0/0"), cut) == b"zero\nz\n"


def test_a_log_that_vanishes_is_no_error(paths: RunPaths) -> None:
    assert follow(paths, Target.parse("0/0"), lambda: paths.rank_log(0, 1, 0).unlink()) == b"zero\n"


def test_a_line_without_end_is_shown_in_pieces(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LONGEST_LINE", 10)
    path = write(paths, 5, 1, 0, b"x" * 25)
    assert b"".join(Reader(Log(5, 1, 0, path)).news()) == b"x" * 25 + b"\n"
