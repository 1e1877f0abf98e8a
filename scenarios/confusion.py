"""How often the first finding is the right one: expected cause x first finding.

A scenario is labelled with the cause that it produces, or healthy ("none"). What a healthy run may show
beside (``allowed``: a tail below the unit, say) and notes about time are no answer to "what is wrong".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from judge import TIMED
from spec import Scenario

NONE = "none"


@dataclass(frozen=True)
class Verdict:
    """What one run was expected to show first, and what it showed."""

    scenario: str
    expected: str
    first: str
    severity: str = ""

    @property
    def healthy(self) -> bool:
        return self.expected == NONE

    @property
    def right(self) -> bool:
        return self.first == self.expected


def verdict(scenario: Scenario, report: dict[str, Any]) -> Verdict:
    """Of one run, by its ``kvtrace.report/2``."""
    expect = scenario.expect
    beside = set(TIMED) - {expect.first}
    for finding in report["findings"]:
        may_stand = (
            expect.first is None and finding["severity"] != "fault" and finding["id"] in expect.allowed
        )
        if finding["id"] not in beside and not may_stand:
            return Verdict(scenario.name, expect.first or NONE, finding["id"], finding["severity"])
    return Verdict(scenario.name, expect.first or NONE, NONE)


def wrong(verdicts: Sequence[Verdict], names: Collection[str]) -> list[str]:
    """What is not as it should be, one line each; [] where every scenario of ``names`` got its verdict."""
    lines = [f"{name}: no verdict" for name in sorted(set(names) - {v.scenario for v in verdicts})]
    if not names:
        lines.append("no scenarios at all")
    for v in verdicts:
        if v.healthy and v.severity == "fault":
            lines.append(f"{v.scenario}: the fault {v.first} on a healthy run")
        elif not v.right:
            lines.append(f"{v.scenario}: first finding {v.first}, expected {v.expected}")
    return lines


def counts(verdicts: Sequence[Verdict]) -> dict[str, Counter[str]]:
    """Expected cause -> first finding -> runs; healthy runs last."""
    table: dict[str, Counter[str]] = {}
    for v in sorted(verdicts, key=lambda v: (v.healthy, v.expected)):
        table.setdefault(v.expected, Counter())[v.first] += 1
    return table


def summary(verdicts: Sequence[Verdict]) -> str:
    labelled = [v for v in verdicts if not v.healthy]
    healthy = [v for v in verdicts if v.healthy]
    right = sum(v.right for v in labelled)
    faults = sum(v.severity == "fault" for v in healthy)
    return (
        f"{right} of {len(labelled)} labelled runs have the right first finding; "
        f"{faults} of {len(healthy)} healthy runs show a fault"
    )


def text(verdicts: Sequence[Verdict]) -> str:
    """The table for a terminal; a row with anything but its own cause is marked."""
    table = counts(verdicts)
    width = max([len("expected"), *map(len, table)])
    lines = [f"  {'expected':<{width}}  runs  first finding"]
    for cause, found in table.items():
        mark = " " if set(found) == {cause} else "!"
        said = ", ".join(f"{name} {n}" for name, n in found.most_common())
        lines.append(f"{mark} {cause:<{width}}  {sum(found.values()):>4}  {said}")
    return "\n".join([*lines, summary(verdicts)])


def markdown(verdicts: Sequence[Verdict]) -> list[str]:
    """The same for a page."""
    lines = ["| expected | runs | first finding |", "| --- | ---: | --- |"]
    for cause, found in counts(verdicts).items():
        said = ", ".join(f"{name} {n}" for name, n in found.most_common())
        lines.append(f"| {cause} | {sum(found.values())} | {said} |")
    return [*lines, "", f"{summary(verdicts)}."]
