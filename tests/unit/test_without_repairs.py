"""The rows of scripts/experiments/without_repairs are changes of the code as it is."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    loader = SourceFileLoader("without_repairs", str(ROOT / "scripts" / "experiments" / "without_repairs"))
    spec = importlib.util.spec_from_loader("without_repairs", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "without_repairs", module)
    loader.exec_module(module)
    return module


def test_each_row_finds_what_it_takes_out_and_the_test_that_must_then_fail(script: ModuleType) -> None:
    for row in script.ROWS:
        assert (ROOT / row.file).read_text(encoding="utf-8").count(row.old) == 1, row.name
        file, _, test = row.test.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), row.name
