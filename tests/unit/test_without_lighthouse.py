"""What is said where no Lighthouse can be started. Real ones are in tests/train/test_lighthouse.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_ft.controller import lighthouse


@pytest.mark.parametrize(
    ("command", "replicas", "said"),
    [
        (("python", "train.py"), 2, True),
        (("/opt/env/bin/python3.12", "-m", "train"), 16, True),
        (("python", "train.py"), 1, False),
        (("./train.sh",), 2, False),
    ],
)
def test_python_programs_that_cannot_meet_are_told_of(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], replicas: int, said: bool
) -> None:
    assert lighthouse.lack(command, replicas, {}) == ""
    monkeypatch.setattr(lighthouse, "extension_path", lambda: None)
    assert ("pip install --no-deps torchft" in lighthouse.lack(command, replicas, {})) is said
    assert lighthouse.lack(command, replicas, {"TORCHFT_LIGHTHOUSE": "http://theirs:1"}) == ""


def test_an_installation_without_torchft_has_no_extension(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert lighthouse.extension_path() is not None
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(__import__("sys").modules, "torchft", raising=False)
    assert lighthouse.extension_path() is None
