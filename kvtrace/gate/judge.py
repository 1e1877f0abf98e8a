"""The gate: a baseline, rules, or the default; and the outcome of holding a report against it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from kvtrace.gate.baseline import Traffic
from kvtrace.gate.cells import CallCounts, cells
from kvtrace.gate.compare import compare
from kvtrace.gate.contract import traffic
from kvtrace.gate.covered import shortfalls, too_few
from kvtrace.gate.explain import Findings, explanations
from kvtrace.gate.limits import limits_of
from kvtrace.gate.lost import less_in
from kvtrace.gate.outcome import Check, GateOutcome, State
from kvtrace.gate.read_baseline import BaselineFile
from kvtrace.gate.rules import Rules
from kvtrace.gate.shares import grade_of, saved_of_offered, shares
from kvtrace.report.model import Report
from kvtrace.terms import FAULT
from kvtrace.trace import hooks
from kvtrace.words import count, plural

_LAYER_HOOK = hooks.SAVE_LAYER.name
_COVERAGE = "see the coverage: kvtrace explain PATH"


def judge(report: Report, where: str, baseline: BaselineFile | None, rules: Rules) -> GateOutcome:
    """Holds `report` (read from `where`) against a baseline and rules, or the default gate without both."""
    known = {one["id"]: one["severity"] for one in baseline.baseline["findings"]} if baseline else {}
    findings = Findings(report, known)
    checks: list[Check] = []
    asked: list[str] = []
    if baseline is not None:
        asked.append(f"baseline {baseline.path}")
        checks += compare(report, baseline, rules, findings)
    if rules.any:
        asked += _words(rules)
        checks += _rules(report, findings, rules)
    if baseline is None and not rules.any:
        asked.append("the default gate: no fault, and every KV layer hooked")
        checks += _default(report, findings, rules)
    if rules.allow:
        asked.append("allowed: " + ", ".join(sorted(rules.allow)))
    return GateOutcome(
        report=where,
        baseline=baseline.path if baseline else None,
        asked=asked,
        checks=checks,
        explanations=explanations(report, (check.cause for check in checks)),
        notes=_notes(report, baseline),
    )


def _words(rules: Rules) -> list[str]:
    words = [f"{name} >= {share:g}" for name, share in sorted(rules.minimum.items())]
    if rules.min_saved_tokens is not None:
        words.append(f"tokens saved >= {rules.min_saved_tokens:g}")
    return words + [f"no {cause}" for cause in sorted(rules.forbid)]


def _notes(report: Report, baseline: BaselineFile | None) -> list[str]:
    """What a reader of the outcome has to know about the run itself."""
    run = report["run"]
    notes = []
    if baseline is not None:
        made = baseline.baseline["made"]
        notes += _workload(made.get("traffic"), traffic(report))
        for name, before, after in (
            ("vLLM", made["vllm"], run["vllm"]),
            ("kvtrace", made["kvtrace"], run["kvtrace"]),
        ):
            if before != after:
                notes.append(
                    f"the baseline was made with {name} {before or 'unknown'}, "
                    f"this run with {after or 'unknown'}"
                )
    if run["signal"]:
        notes.append(f"the command was ended by {run['signal']}")
    elif run["exit_code"]:
        notes.append(f"the command ended with exit code {run['exit_code']}")
    notes += limits_of(report)
    return notes


def _workload(before: Traffic | None, after: Traffic) -> list[str]:
    """Says where the engines were asked something else: then shares of tokens differ for that alone."""
    if before is None or before == after:
        return []
    was, now = (
        f"{plural(one['requests'], 'request')}, {plural(one['prompt'], 'prompt token')}, "
        f"{count(one['computed'])} with the answers"
        for one in (before, after)
    )
    return [
        f"the workload is not the baseline's ({was} there; {now} here): shares of tokens may differ for that "
        "alone; compare runs of the same requests, or renew the baseline"
    ]


# --------------------------------------------------------------------------------- rules


def _rules(report: Report, findings: Findings, rules: Rules) -> list[Check]:
    checks = []
    seen = cells(report)
    for name, least in sorted(rules.minimum.items()):
        checks += _minimum(name, least, [cell for cell in seen if cell.name == name], findings)
    if rules.min_saved_tokens is not None:
        checks.append(_saved(report, findings, rules.min_saved_tokens))
    for cause in sorted(rules.forbid):
        checks += _forbidden(report, cause, rules.allow)
    return [replace(check, kind="rule", source=rules.source) for check in checks]


def _forbidden(report: Report, cause: str, allowed: Collection[str]) -> list[Check]:
    found = [
        Check(
            "rule", one["id"], "failed", "forbidden", one["severity"], "text",
            text=one["title"], cause=one["id"],
        )
        for one in report["findings"]
        if one["id"] == cause or (cause == FAULT == one["severity"] and one["id"] not in allowed)
    ]  # fmt: skip
    return found or [Check("rule", cause, "passed", "forbidden", None, "text", text="not found")]


def _minimum(name: str, least: float, matched: list[CallCounts], findings: Findings) -> list[Check]:
    cause = findings.for_calls()
    if not matched:
        remedy = "did the engine come up, with a connector, and did it get requests?"
        return [Check("rule", name, "failed", least, text="not seen in this run", cause=cause, remedy=remedy)]
    short = shortfalls(matched, lambda cell: cell.share < least)
    checks = [too_few(one, name, least, cause, _COVERAGE) for one in short]
    return checks or [Check("rule", name, "passed", least, min(cell.share for cell in matched))]


def _saved(report: Report, findings: Findings, least: float) -> Check:
    ledger = report["ledger"]["saves"]
    share = saved_of_offered(ledger)
    good = share is not None and share + 1e-9 >= least
    grade = grade_of(ledger)
    return Check(
        "rule", "tokens saved", "passed" if good else "failed", least, share,
        text="no token was computed in this run" if share is None else "; ".join(
            filter(None, (less_in(report), f"grade {grade}" if grade else ""))
        ),
        cause=None if good else findings.for_accounts(shares(ledger)) or findings.for_wiring(),
        remedy="see the ledger: kvtrace explain PATH",
    )  # fmt: skip


# --------------------------------------------------------------------------- the default


def _default(report: Report, findings: Findings, rules: Rules) -> list[Check]:
    checks = []
    for one in report["findings"]:
        cause = one["id"] if one["severity"] == FAULT and one["id"] not in rules.allow else None
        state: State = "failed" if cause else "passed"
        checks.append(
            Check("finding", one["id"], state, None, one["severity"], "text", text=one["title"], cause=cause)
        )
    return checks + _layers_hooked(report, findings.for_calls())


def _layers_hooked(report: Report, cause: str | None) -> list[Check]:
    """A KV layer whose save hook is never called fails; one that is hooked now and then does not."""
    matched = [cell for cell in cells(report) if cell.name == _LAYER_HOOK]
    if not matched:
        text = "no KV layer was seen in this run"
        remedy = "did the engine come up, and its workers under kvtrace run?"
        return [Check("coverage", _LAYER_HOOK, "failed", 1.0, text=text, cause=cause, remedy=remedy)]
    never = shortfalls(matched, lambda cell: cell.fired == 0)
    checks = [too_few(one, _LAYER_HOOK, 1.0, cause, _COVERAGE) for one in never]
    for one in shortfalls(matched, lambda cell: cell.fired > 0 and cell.share < 1.0):
        checks.append(replace(too_few(one, _LAYER_HOOK, 1.0, None, _COVERAGE), state="changed"))
    return checks or [Check("coverage", _LAYER_HOOK, "passed", 1.0, 1.0, text="every KV layer hooked")]
