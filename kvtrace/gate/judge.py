"""The gate: a baseline, rules, or the default; and the outcome of holding a report against it."""

from __future__ import annotations

from kvtrace.gate.cells import Cell, cells
from kvtrace.gate.compare import compare
from kvtrace.gate.covered import shortfalls
from kvtrace.gate.explain import Findings, explanations
from kvtrace.gate.outcome import Check, Outcome
from kvtrace.gate.read import BaselineFile
from kvtrace.gate.rules import Rules
from kvtrace.gate.shares import saved_of_offered, shares
from kvtrace.report.model import Report
from kvtrace.terms import FAULT
from kvtrace.trace import hooks

_LAYER_HOOK = hooks.SAVE_LAYER.name


def judge(report: Report, where: str, baseline: BaselineFile | None, rules: Rules) -> Outcome:
    """Holds `report` (read from `where`) against a baseline and rules, or the default gate without both."""
    known = {one["id"]: one["severity"] for one in baseline.baseline["findings"]} if baseline else {}
    findings = Findings(report, known)
    checks: list[Check] = []
    asked: list[str] = []
    if baseline is not None:
        asked.append(f"baseline {baseline.path}")
        checks += compare(report, baseline, rules)
    if rules.any:
        asked += _words(rules)
        checks += _rules(report, findings, rules)
    if baseline is None and not rules.any:
        asked.append("the default gate: no fault, and every KV layer hooked")
        checks += _default(report, findings, rules)
    if rules.allow:
        asked.append("allowed: " + ", ".join(sorted(rules.allow)))
    return Outcome(
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
    run, limits = report["run"], report["limits"]
    notes = []
    if baseline is not None:
        made = baseline.baseline["made"]
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
    if limits["lost_records"]:
        notes.append(
            f"{limits['lost_records']} records of the trace were lost: what they held is missing here"
        )
    if limits["damaged"]:
        names = ", ".join(one["spool"] for one in limits["damaged"][:3])
        notes.append(f"damaged spools, read up to the damage: {names}")
    return notes


# --------------------------------------------------------------------------------- rules


def _rules(report: Report, findings: Findings, rules: Rules) -> list[Check]:
    checks = []
    seen = cells(report)
    for name, least in sorted(rules.minimum.items()):
        checks += _minimum(name, least, [cell for cell in seen if cell.name == name], findings, rules)
    if rules.min_saved_tokens is not None:
        checks.append(_saved(report, findings, rules, rules.min_saved_tokens))
    for cause in sorted(rules.forbid):
        found = [
            one
            for one in report["findings"]
            if one["id"] == cause
            or (cause == FAULT and one["severity"] == FAULT and one["id"] not in rules.allow)
        ]
        checks += [
            Check(
                "rule",
                one["id"],
                "failed",
                "forbidden",
                one["severity"],
                "text",
                text=one["title"],
                cause=one["id"],
                source=rules.source,
            )
            for one in found
        ]
        if not found:
            checks.append(
                Check(
                    "rule", cause, "passed", "forbidden", None, "text", text="not found", source=rules.source
                )
            )
    return checks


def _minimum(name: str, least: float, own: list[Cell], findings: Findings, rules: Rules) -> list[Check]:
    if not own:
        return [
            Check(
                "rule",
                name,
                "failed",
                least,
                None,
                text="not seen in this run",
                cause=findings.for_calls(),
                remedy="did the engine come up, with a connector, and did it get requests?",
                source=rules.source,
            )
        ]
    checks = [
        Check(
            "rule",
            name,
            "failed",
            least,
            short.share,
            layers=short.layers,
            rank=short.rank,
            text=f"called in {short.fired} of {short.eligible} {'layer-steps' if short.layers else 'steps'}",
            cause=findings.for_calls(),
            remedy="see the coverage: kvtrace explain PATH",
            source=rules.source,
        )
        for short in shortfalls(own, lambda cell: cell.share < least)
    ]
    return checks or [Check("rule", name, "passed", least, min(c.share for c in own), source=rules.source)]


def _saved(report: Report, findings: Findings, rules: Rules, least: float) -> Check:
    book = report["ledger"]["saves"]
    share = saved_of_offered(book)
    good = share is not None and share + 1e-9 >= least
    return Check(
        "rule",
        "tokens saved",
        "passed" if good else "failed",
        least,
        share,
        text="" if share is not None else "no token was computed in this run",
        cause=None if good else findings.for_accounts(shares(book)) or findings.for_wiring(),
        remedy="see the ledger: kvtrace explain PATH",
        source=rules.source,
    )


# --------------------------------------------------------------------------- the default


def _default(report: Report, findings: Findings, rules: Rules) -> list[Check]:
    checks: list[Check] = []
    for one in report["findings"]:
        bad = one["severity"] == FAULT and one["id"] not in rules.allow
        checks.append(
            Check(
                "finding",
                one["id"],
                "failed" if bad else "passed",
                None,
                one["severity"],
                "text",
                text=one["title"],
                cause=one["id"] if bad else None,
            )
        )
    own = [cell for cell in cells(report) if cell.name == _LAYER_HOOK]
    if not own:
        checks.append(
            Check(
                "coverage",
                _LAYER_HOOK,
                "failed",
                1.0,
                None,
                text="no KV layer was seen in this run",
                cause=findings.for_calls(),
                remedy="did the engine come up, and its workers under kvtrace run?",
            )
        )
        return checks
    for partly in (False, True):  # a layer that is hooked now and then is said, and no failure
        checks += [
            Check(
                "coverage",
                _LAYER_HOOK,
                "changed" if partly else "failed",
                1.0,
                short.share,
                layers=short.layers,
                rank=short.rank,
                text=f"called in {short.fired} of {short.eligible} layer-steps",
                cause=None if partly else findings.for_calls(),
                remedy="see the coverage: kvtrace explain PATH",
            )
            for short in shortfalls(own, _partly if partly else _never)
        ]
    if not any(check.kind == "coverage" for check in checks):
        checks.append(Check("coverage", _LAYER_HOOK, "passed", 1.0, 1.0, text="every KV layer hooked"))
    return checks


def _never(cell: Cell) -> bool:
    return cell.fired == 0


def _partly(cell: Cell) -> bool:
    return cell.fired > 0 and cell.share < 1.0
