"""The scenario files and their judge, without an engine."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from scenario_runs import judge, spec

from kvtrace.causes.registry import CATALOGUE

NEVER_FIRST = {"ranks-diverge", "local-hit"}
"""Seen live beside other findings, or ruled out."""
ALL = {name: spec.load(name) for name in spec.names()}


def test_each_cause_has_a_scenario_and_a_healthy_twin() -> None:
    causes = {s.cause for s in ALL.values() if s.cause}
    assert causes == {cause.id for cause in CATALOGUE.values() if cause.live} - NEVER_FIRST
    twinned = {ALL[other].cause for s in ALL.values() if s.expect.first is None for other in s.twin_of}
    assert twinned == causes - {"engine-did-not-start"}  # every run that starts is its twin


@pytest.mark.parametrize("name", sorted(ALL))
def test_file_adds_up(name: str) -> None:
    scenario = ALL[name]
    expect = scenario.expect
    assert (scenario.cause is None) == bool(scenario.twin_of)
    assert expect.first == scenario.cause
    tokens = scenario.total_tokens() if expect.traced else 0
    assert expect.total == tokens
    assert sum(expect.saves.values()) == tokens
    assert "saved" in expect.saves
    for other in scenario.twin_of:
        cause = ALL[other].cause
        # a limit of the design (tails below the unit) may stay where the fault is gone
        assert cause in expect.absent or cause in expect.allowed, f"{other} is not judged"


def test_prompts_are_exact_and_stable() -> None:
    again = spec.load("flagship")
    assert [part.prompts for part in again.rounds] == [part.prompts for part in ALL["flagship"].rounds]
    prompts = [tuple(prompt) for part in again.rounds for prompt in part.prompts]
    assert len(set(prompts)) == len(prompts) == 34
    assert {len(p) for p in prompts} >= {70, 560, 598}


def test_unknown_scenario_is_one_line() -> None:
    with pytest.raises(spec.ScenarioError, match=r"no scenario named 'nosuch'"):
        spec.load("nosuch")


def report_for(name: str) -> dict[str, Any]:
    """A report that says exactly what the scenario expects (pairs: 8)."""
    expect = ALL[name].expect
    accounts = {account: tokens * 8 for account, tokens in expect.saves.items()}
    assert expect.total is not None
    findings = []
    if expect.first is not None:
        findings.append(
            {
                "id": expect.first,
                "severity": expect.severity or "fault",
                "title": "a title",
                "evidence": list(expect.evidence),
                "remedy": [],
            }
        )
    return {
        "findings": findings,
        "ruled_out": [{"id": cause, "evidence": "seen"} for cause in expect.ruled_out],
        "ledger": {
            "saves": {"total": expect.total * 8, "accounts": accounts, "pairs": 8},
            "loads": {"total": 0, "accounts": {}, "pairs": 8},
        },
    }


def test_judge_accepts_what_is_expected() -> None:
    assert judge.judge(ALL["flagship"], report_for("flagship")) == []
    assert judge.judge(ALL["healthy-unit"], report_for("healthy-unit")) == []


def test_judge_sees_each_difference() -> None:
    good = report_for("flagship")

    def differences(change: Any) -> str:
        report = copy.deepcopy(good)
        change(report)
        return "\n".join(judge.judge(ALL["flagship"], report))

    assert "no finding" in differences(lambda r: r["findings"].clear())
    assert "first finding other" in differences(lambda r: r["findings"][0].update(id="other"))
    assert "is a fault" in differences(lambda r: r["findings"][0].update(severity="fault"))
    assert "does not say '512'" in differences(lambda r: r["findings"][0].update(evidence=[]))
    assert "not ruled out" in differences(lambda r: r["ruled_out"][0].update(evidence=" "))
    assert "accounts sum to" in differences(lambda r: r["ledger"]["saves"]["accounts"].update(saved=1))
    assert "expected 14050" in differences(lambda r: r["ledger"]["saves"].update(total=8))
    assert "pairs unknown" in differences(lambda r: r["ledger"]["saves"].update(pairs=None))
    extra = {"id": "ranks-diverge", "severity": "fault", "title": "", "evidence": [], "remedy": []}
    assert "must not show" in differences(lambda r: r["findings"].append(extra))
    both = {"id": "below-save-granularity", "evidence": "x"}
    assert "both found and ruled out" in differences(lambda r: r["ruled_out"].append(both))


def test_judge_wants_no_fault_on_a_twin() -> None:
    report = report_for("healthy-unit")
    report["findings"].append(
        {"id": "hook-raised", "severity": "fault", "title": "", "evidence": [], "remedy": []}
    )
    assert any("with faults" in line for line in judge.judge(ALL["healthy-unit"], report))
