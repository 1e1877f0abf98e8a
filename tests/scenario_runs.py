"""Runs the scenarios for the tests in two lanes: the one-process ones of a lane in one process, the others as
one is free."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import confusion
import judge
import pytest
import spec
from vllm_env import vllm_env as make_vllm_env

from kvtrace.report.build import build_report

SCENARIOS = Path(__file__).resolve().parents[1] / "scenarios"

__all__ = ["Runs", "confusion", "judge", "spec"]


@dataclass
class Runs:
    """What scenarios/run.py left behind, made on first use."""

    out: Path
    model: Path
    logs: dict[str, str] = field(default_factory=dict)  # of the call of run.py that ran a scenario
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)

    def outcome(self, scenario: spec.Scenario) -> dict[str, Any]:
        """Runs the scenario (and all that may run beside it) unless it ran, and reads its outcome."""
        path = self.out / "_outcome" / f"{scenario.name}.json"
        if scenario.name not in self.logs:
            names = [name for name in spec.names() if beside(scenario, spec.load(name))]
            calls = [names[0::2], names[1::2]] if scenario.shares_process else [[name] for name in names]
            # a core each: an engine in one process computes with one thread
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(self._run, calls))
        if not path.is_file():
            pytest.fail(f"{scenario.name} did not run through:\n{self.logs[scenario.name]}", pytrace=False)
        outcome: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return outcome

    def report(self, scenario: spec.Scenario) -> dict[str, Any]:
        """Of the scenario's run, made once."""
        self.outcome(scenario)
        if scenario.name not in self.reports:
            self.reports[scenario.name] = build_report(self.out / scenario.name)
        return self.reports[scenario.name]

    def _run(self, names: list[str]) -> None:
        command = [sys.executable, str(SCENARIOS / "run.py"), *names]
        command += ["--out", str(self.out), "--model", str(self.model)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=make_vllm_env(), timeout=900
        )
        self.logs.update(dict.fromkeys(names, done.stdout[-4000:] + done.stderr[-8000:]))


def beside(one: spec.Scenario, other: spec.Scenario) -> bool:
    """What hangs is told by time: beside that runs nothing that computes."""
    hang = (one.stuck_after is None, other.stuck_after is None)
    return hang[0] == hang[1] and other.shares_process == one.shares_process
