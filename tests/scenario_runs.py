"""Runs the scenarios for the tests: the one-process ones in two processes, the others each on its own."""

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

SCENARIOS = Path(__file__).resolve().parents[1] / "scenarios"

__all__ = ["Runs", "confusion", "judge", "one_process_names", "spec"]


@dataclass
class Runs:
    """What scenarios/run.py left behind, made on first use."""

    out: Path
    model: Path
    logs: dict[str, str] = field(default_factory=dict)  # of the call of run.py that ran a scenario

    def outcome(self, scenario: spec.Scenario) -> dict[str, Any]:
        """Runs the scenario (one-process ones all at once) unless it ran, and reads its outcome."""
        path = self.out / "_outcome" / f"{scenario.name}.json"
        if scenario.name not in self.logs:
            if scenario.shares_process:
                names = one_process_names()
                # one core each: these engines compute with one thread
                with ThreadPoolExecutor() as pool:
                    list(pool.map(self._run, (names[0::2], names[1::2])))
            else:
                self._run((scenario.name,))
        if not path.is_file():
            pytest.fail(f"{scenario.name} did not run through:\n{self.logs[scenario.name]}", pytrace=False)
        outcome: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return outcome

    def _run(self, names: tuple[str, ...]) -> None:
        command = [sys.executable, str(SCENARIOS / "run.py"), *names]
        command += ["--out", str(self.out), "--model", str(self.model)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=make_vllm_env(), timeout=900
        )
        self.logs.update(dict.fromkeys(names, done.stdout[-4000:] + done.stderr[-8000:]))


def one_process_names() -> tuple[str, ...]:
    return tuple(name for name in spec.names() if spec.load(name).shares_process)
