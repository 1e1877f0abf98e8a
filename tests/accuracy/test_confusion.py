"""The measure of accuracy itself: it fails where it should."""

from __future__ import annotations

from typing import Any

import pytest
from scenario_runs import confusion, spec

Verdict = confusion.Verdict

GOOD = [
    Verdict("a", "stored-nothing", "stored-nothing", "fault"),
    Verdict("b", "hook-slow", "hook-slow", "note"),
    Verdict("c", "none", "none"),
]


def test_all_right_is_all_right() -> None:
    assert confusion.wrong(GOOD, ["a", "b", "c"]) == []
    assert confusion.summary(GOOD) == (
        "2 of 2 labelled runs have the right first finding; 0 of 1 healthy runs show a fault"
    )


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        (Verdict("d", "slots-short", "no-forward"), "first finding no-forward, expected slots-short"),
        (Verdict("d", "slots-short", "none"), "first finding none, expected slots-short"),
        (Verdict("d", "none", "stored-nothing", "fault"), "the fault stored-nothing on a healthy run"),
        (Verdict("d", "none", "lookup-miss", "note"), "first finding lookup-miss, expected none"),
    ],
)  # fmt: skip
def test_one_wrong_verdict_fails_and_shows(verdict: Any, said: str) -> None:
    verdicts = [*GOOD, verdict]
    assert confusion.wrong(verdicts, ["a", "b", "c", "d"]) == [f"d: {said}"]
    marked = [line for line in confusion.text(verdicts).splitlines() if line.startswith("!")]
    assert len(marked) == 1 and verdict.first in marked[0]


def test_a_scenario_without_a_verdict_fails() -> None:
    assert confusion.wrong(GOOD, ["a", "b", "c", "d"]) == ["d: no verdict"]
    assert confusion.wrong([], []) == ["no scenarios at all"]


def report(*findings: tuple[str, str]) -> dict[str, Any]:
    return {"findings": [{"id": ident, "severity": severity} for ident, severity in findings]}


def test_the_verdict_of_a_labelled_run_is_its_first_finding() -> None:
    scenario = spec.load("stored-nothing")
    seen = confusion.verdict(scenario, report(("slots-short", "fault"), ("stored-nothing", "fault")))
    assert (seen.expected, seen.first, seen.right) == ("stored-nothing", "slots-short", False)
    assert confusion.verdict(scenario, report()).first == "none"


def test_notes_about_time_answer_only_where_they_are_asked_for() -> None:
    slow = report(("load-late", "note"), ("hook-slow", "note"))
    assert confusion.verdict(spec.load("hook-slow"), slow).right
    assert confusion.verdict(spec.load("healthy-unit"), slow).right
    assert not confusion.verdict(spec.load("stored-nothing"), slow).right


def test_a_healthy_run_shows_no_fault_but_what_is_allowed() -> None:
    scenario = spec.load("flagship-healthy")
    assert confusion.verdict(scenario, report(("below-save-granularity", "limit"))).right
    fault = confusion.verdict(scenario, report(("below-save-granularity", "fault")))
    assert confusion.wrong([fault], [scenario.name]) == [
        "flagship-healthy: the fault below-save-granularity on a healthy run"
    ]
