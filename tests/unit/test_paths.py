import json
import os
import stat
import threading
from pathlib import Path

import pytest

from slurm_ft import paths as module
from slurm_ft.errors import RunFolderError
from slurm_ft.paths import RunPaths, read_json, write_atomic, write_json


def test_every_file_of_a_run_lies_in_its_folder(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "my run (v2)")
    files = [value for value in vars(paths).values() if isinstance(value, Path)]
    files += [paths.rank_log(0, 1, 2), paths.step_log(0, 1), paths.error(0, 1, 2)]
    assert all(file.is_relative_to(paths.root) for file in files)


def test_no_two_ranks_attempts_or_replicas_share_a_file(tmp_path: Path) -> None:
    paths, places = RunPaths(tmp_path), [(1, 11, 1), (11, 1, 1), (1, 1, 11), (1, 1, 1)]
    assert len({paths.rank_log(*place) for place in places}) == 4
    assert len({paths.error(*place) for place in places}) == 4


def test_a_relative_folder_is_made_absolute_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = RunPaths("runs/x")
    monkeypatch.chdir("/")
    assert paths.root == tmp_path / "runs/x"


def test_the_secret_folder_is_the_owners_alone_even_if_it_was_open_before(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    paths.secret.mkdir(mode=0o755)
    paths.create()
    assert stat.S_IMODE(paths.secret.stat().st_mode) == 0o700
    paths.create()


@pytest.mark.parametrize("place", ["file/run", "file"])
def test_a_folder_that_cannot_be_made_is_one_sentence_with_a_hint(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunFolderError, match="cannot be written") as caught:
        RunPaths(tmp_path / place).create()
    assert "--run-dir" in caught.value.hint
    assert caught.value.exit_code == 2
    assert (tmp_path / "file").read_text() == "mine"


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path, over = tmp_path / "state.json", threading.Event()
    values = [{"all": "a" * 300_000}, {"all": "b" * 10}]
    write_json(path, values[0])

    def write() -> None:
        for number in range(60):
            write_json(path, values[number % 2])
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not over.is_set():
        assert read_json(path) in values
    writer.join()


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    write_atomic(path, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["state.json"]


@pytest.mark.parametrize("mode", [0o644, 0o600])
def test_the_mode_is_what_was_asked_for_whatever_the_umask(tmp_path: Path, mode: int) -> None:
    previous = os.umask(0o077)
    try:
        write_atomic(tmp_path / "file", "", mode)
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_json_is_readable_by_people_too(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"b": 1, "a": [2]})
    text = (tmp_path / "x.json").read_text()
    assert list(json.loads(text)) == ["b", "a"]
    assert text.endswith("}\n") and len(text.splitlines()) > 2


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "there is no"), (b"", "cannot be read"), (b"{", "cannot be read"), (b"[1]", "holds no object"),
     (b"\xff", "cannot be read")],
)  # fmt: skip
def test_a_json_file_that_is_missing_or_damaged_says_so(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(RunFolderError, match=words) as caught:
        read_json(tmp_path / "state.json")
    assert "state.json" in caught.value.message
    assert caught.value.hint


def test_a_json_path_that_is_a_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="cannot be read"):
        read_json(tmp_path)
