"""What a gate or a comparison of two reports says: plain data between ``kvtrace.gate`` and the renderers.

``kvtrace.gate`` makes these, :mod:`kvtrace.render` prints them as text, Markdown, JUnit, SARIF and
GitHub annotations. Strings in them may come from a report of unknown origin: renderers clean and escape.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

CHECK_SCHEMA = "kvtrace.check/1"
DIFF_SCHEMA = "kvtrace.diff/1"

State = Literal["passed", "failed", "better", "changed"]
Unit = Literal["share", "count", "text"]
Value = float | int | str | None


@dataclass(frozen=True)
class Check:
    """One thing that a gate looked at.

    ``before`` is what was asked for (the baseline's value, or the rule's), ``after`` what the run has;
    None means that it is not there at all. ``cause`` is the id of the finding that explains a failure.
    """

    kind: Literal["engine", "coverage", "work", "ledger", "finding", "target", "rule"]
    subject: str
    state: State
    before: Value = None
    after: Value = None
    unit: Unit = "share"
    layers: str = ""
    rank: int | None = None
    text: str = ""
    cause: str | None = None
    remedy: str = ""
    """What to do where no finding explains it."""
    source: str = ""
    """The file that asks for it, and its line (0: unknown)."""
    line: int = 0

    @property
    def required(self) -> bool:
        """``before`` is a bound of a rule or of the default gate, not what an earlier run had."""
        return self.unit == "share" and (self.kind == "rule" or (self.kind == "coverage" and not self.source))


@dataclass(frozen=True)
class QuotedFinding:
    """A finding as a gate quotes it."""

    id: str
    severity: str
    title: str
    evidence: list[str]
    remedy: list[str]
    docs: str


@dataclass
class GateOutcome:
    """The answer of ``kvtrace check``."""

    report: str
    baseline: str | None
    asked: list[str]
    """What the gate was made of, in words: the baseline, each rule, or the default gate."""
    checks: list[Check]
    explanations: dict[str, QuotedFinding] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.state == "failed"]

    def of(self, state: State) -> list[Check]:
        return [check for check in self.checks if check.state == state]

    def document(self) -> dict[str, Any]:
        """As JSON: every check, and the findings that explain the failed ones."""
        return {
            "schema": CHECK_SCHEMA,
            "passed": self.passed,
            "report": self.report,
            "baseline": self.baseline,
            "asked": self.asked,
            "failed": len(self.failed),
            "checks": [asdict(check) for check in self.checks],
            "explanations": [asdict(one) for one in self.explanations.values()],
            "notes": self.notes,
        }


@dataclass(frozen=True)
class Change:
    """A value that two runs do not share; None: not there."""

    name: str
    before: Value
    after: Value
    unit: Unit = "text"
    layers: str = ""
    verdict: Literal["better", "worse", ""] = ""
    text: str = ""


@dataclass
class Difference:
    """The answer of ``kvtrace diff``: what differs between the reports A (before) and B (after)."""

    a: str
    b: str
    settings: list[Change]
    targets: list[Change]
    coverage: list[Change]
    saves: list[Change]
    loads: list[Change]
    findings: list[Change]
    verdicts: tuple[str, str]
    limits: tuple[list[str], list[str]]
    """What the report of each cannot say."""

    @property
    def empty(self) -> bool:
        parts = (self.settings, self.targets, self.coverage, self.saves, self.loads, self.findings)
        return not any(parts)

    def document(self) -> dict[str, Any]:
        """As JSON: every change, part by part."""
        return {"schema": DIFF_SCHEMA, "empty": self.empty, **asdict(self)}
