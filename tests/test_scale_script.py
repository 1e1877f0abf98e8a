"""scripts/scale.py: the run that it makes is as large as asked for, its table is what was measured."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvtrace.ledger import read_run

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("scale", ROOT / "scripts" / "scale.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_run_is_whole_and_as_large_as_asked_for(scale: ModuleType, tmp_path: Path) -> None:
    records, requests = scale.make(tmp_path / "run", 5_000)
    run = read_run(tmp_path / "run")
    assert 5_000 <= records < 20_000 and len(run.requests) == requests
    assert sum(one.pairs for one in run.engines) == scale.LAYERS
    assert not run.incomplete


def test_the_table_says_how_the_time_grows(scale: ModuleType) -> None:
    small = scale.Row(1_000, 10, 64_000, 1.5, 100.0, 0.01)
    text = scale.page([small, small._replace(records=100_000, size=6_400_000, explain=15.0)])
    assert "| 1,000 | 10 | 0 MB | 1.5 s | 100 MiB | 0.01 s |" in text
    assert "to the power 0.50." in text
    assert "power" not in scale.page([small])
