"""The scenarios' runs for the tests, made with the other engines of the session: the one-process ones in two
lanes, one process each, the others by themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import confusion
import judge
import pytest
import spec
from side_by_side import Place, Ran, Script
from vllm_env import vllm_env as make_vllm_env

from kvtrace.report.build import build_report

SCENARIOS = Path(__file__).resolve().parents[1] / "scenarios"

__all__ = ["LANES", "Runs", "confusion", "judge", "spec"]


@dataclass(frozen=True)
class Lane:
    """One call of scenarios/run.py; what it printed. ``hangs``: what they show is told by time."""

    names: tuple[str, ...]
    hangs: bool = False

    def __call__(self, place: Place) -> str:
        command = [sys.executable, str(SCENARIOS / "run.py"), *self.names]
        command += ["--out", str(place.folder), "--model", str(place.model)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=make_vllm_env(), timeout=900
        )
        return done.stdout[-4000:] + done.stderr[-8000:]


def _lanes() -> tuple[Lane, ...]:
    scenarios = [spec.load(name) for name in spec.names()]
    shared = [one.name for one in scenarios if one.shares_process]
    alone = [Lane((one.name,), one.stuck_after is not None) for one in scenarios if not one.shares_process]
    return Lane(tuple(shared[0::2])), Lane(tuple(shared[1::2])), *alone


LANES = _lanes()
_LANE_OF = {name: lane for lane in LANES for name in lane.names}


@dataclass
class Runs:
    """What scenarios/run.py left behind."""

    ran: Mapping[Script, Ran]
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)

    def folder(self, name: str) -> Path:
        """A scenario's run directory."""
        return self._out(name) / name

    def store(self, name: str) -> Path:
        """What its connector wrote."""
        return self._out(name) / "_store" / name

    def outcome(self, name: str) -> dict[str, Any]:
        """Fails the test where the scenario did not run through."""
        path = self._out(name) / "_outcome" / f"{name}.json"
        log = self.ran[_LANE_OF[name]].done
        if not path.is_file():
            pytest.fail(f"{name} did not run through:\n{log}", pytrace=False)
        outcome: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return outcome

    def report(self, name: str) -> dict[str, Any]:
        """Of the scenario's run, made once."""
        self.outcome(name)
        if name not in self.reports:
            self.reports[name] = build_report(self.folder(name))
        return self.reports[name]

    def _out(self, name: str) -> Path:
        return self.ran[_LANE_OF[name]].place.folder
