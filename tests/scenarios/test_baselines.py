"""The committed baselines of reports/baselines against the scenarios' runs on a real engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from scenario_runs import Runs

from kvtrace.gate.judge import judge
from kvtrace.gate.read_baseline import read_baseline
from kvtrace.gate.rules import Rules
from kvtrace.render.check import sentence
from kvtrace.report.load import read_report

FOLDER = Path(__file__).resolve().parents[2] / "reports" / "baselines"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


def test_there_are_baselines() -> None:
    assert {"healthy-chunk-store", "healthy-reuse", "flagship-healthy"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_reference_report_keeps_its_baseline(name: str) -> None:
    """Anew: kvtrace baseline reports/vllm-VERSION-cpu/NAME.json -o reports/baselines/NAME.json --force"""
    for path in sorted(FOLDER.parent.glob(f"vllm-*/{name}.json")):
        outcome = judge(read_report(path), str(path), read_baseline(FOLDER / f"{name}.json"), Rules())
        assert outcome.passed, [sentence(check) for check in outcome.failed]


@pytest.mark.engine
@pytest.mark.parametrize("name", NAMES)
def test_run_keeps_its_baseline(name: str, runs: Runs) -> None:
    """What a connector project does in its CI, on this repository's own runs."""
    runs.outcome(name)
    outcome = judge(read_report(runs.folder(name)), name, read_baseline(FOLDER / f"{name}.json"), Rules())
    assert outcome.passed, [sentence(check) for check in outcome.failed]
