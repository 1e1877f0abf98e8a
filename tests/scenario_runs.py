"""Runs the scenarios for the tests: the one-process ones together, the others each on its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SCENARIOS = Path(__file__).resolve().parents[1] / "scenarios"
if str(SCENARIOS) not in sys.path:
    sys.path.insert(0, str(SCENARIOS))

import confusion  # noqa: E402
import judge  # noqa: E402
import spec  # noqa: E402
from vllm_env import vllm_env as make_vllm_env  # noqa: E402

__all__ = ["Runs", "confusion", "judge", "one_process_names", "spec"]


@dataclass
class Runs:
    """What scenarios/run.py left behind, made on first use."""

    out: Path
    model: Path
    logs: dict[tuple[str, ...], str] = field(default_factory=dict)

    def outcome(self, scenario: spec.Scenario) -> dict[str, Any]:
        """Runs the scenario (one-process ones all at once) unless it ran, and reads its outcome."""
        path = self.out / "_outcome" / f"{scenario.name}.json"
        group = one_process_names() if scenario.one_process else (scenario.name,)
        if group not in self.logs:
            command = [sys.executable, str(SCENARIOS / "run.py"), *group]
            command += ["--out", str(self.out), "--model", str(self.model)]
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                env=make_vllm_env(),
                timeout=600,
            )
            self.logs[group] = done.stdout[-4000:] + done.stderr[-8000:]
        if not path.is_file():
            pytest.fail(f"{scenario.name} did not run through:\n{self.logs[group]}", pytrace=False)
        outcome: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return outcome


def one_process_names() -> tuple[str, ...]:
    return tuple(name for name in spec.names() if spec.load(name).one_process)
