"""The outcome of a gate as JSON (``kvtrace.check/1``), for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvtrace.gate.outcome import Difference, Outcome

CHECK_SCHEMA = "kvtrace.check/1"
DIFF_SCHEMA = "kvtrace.diff/1"


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """Every check, and the findings that explain the failed ones."""
    return {
        "schema": CHECK_SCHEMA,
        "passed": outcome.passed,
        "report": outcome.report,
        "baseline": outcome.baseline,
        "asked": outcome.asked,
        "failed": len(outcome.failed),
        "checks": [asdict(check) for check in outcome.checks],
        "explanations": [asdict(one) for one in outcome.explanations.values()],
        "notes": outcome.notes,
    }


def difference_json(difference: Difference) -> dict[str, Any]:
    """Every change, part by part."""
    return {"schema": DIFF_SCHEMA, "empty": difference.empty, **asdict(difference)}
