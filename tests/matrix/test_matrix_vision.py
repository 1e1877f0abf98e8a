"""torchvision of the row with images: fetched into a folder of its own, or the row says why not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from matrix_rows import measure, tables, vision


def pip(monkeypatch: pytest.MonkeyPatch, code: int, said: str = "") -> list[list[str]]:
    """A pip that ends so, and has written the package where it was told to. Returns its calls."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        package = Path(command[command.index("--target") + 1]) / "torchvision"
        package.mkdir(parents=True)
        (package / "extension.py").write_text("import torch\n", encoding="utf-8")
        return subprocess.CompletedProcess(command, code, "", said)

    monkeypatch.setattr(vision.subprocess, "run", run)
    return calls


def test_it_is_fetched_once_and_its_operators_are_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = pip(monkeypatch, 0)
    folder = tmp_path / "torchvision"
    assert vision.fetch(folder) == "" == vision.fetch(folder)
    assert len(calls) == 1 and "--no-deps" in calls[0]
    text = (folder / "torchvision" / "extension.py").read_text(encoding="utf-8")
    assert text == "import torch\n" + vision.DECLARED
    assert [path.name for path in tmp_path.iterdir()] == ["torchvision"]


def test_what_cannot_be_had_leaves_nothing_and_its_row_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip(monkeypatch, 1, "WARNING: x\nERROR: No matching distribution found for torchvision\n")
    monkeypatch.setattr(vision.fetch, "__defaults__", (tmp_path / "torchvision",))
    said = "torchvision 0.28.0 cannot be had: No matching distribution found for torchvision"
    assert vision.fetch() == said
    assert not list(tmp_path.iterdir())

    ((_, row),) = tables.wanted("requests", ["images"])
    run = measure.Run(row, "healthy", False, tmp_path / "runs")
    run.start()
    assert run.outcome()["error"] == said
    assert json.loads((run.folder / "outcome.json").read_text(encoding="utf-8"))["answers"] == []


def test_only_its_own_processes_see_it(tmp_path: Path) -> None:
    ((_, row),) = tables.wanted("requests", ["images"])
    ((_, other),) = tables.wanted("requests", ["multimodal"])
    assert not row.shares_process and other.shares_process
    paths = [measure.Run(one, "healthy", False, tmp_path).environment()["PYTHONPATH"] for one in (row, other)]
    assert [str(vision.FOLDER) in path for path in paths] == [True, False]
