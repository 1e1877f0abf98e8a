"""The one sentence that a person reads first."""

from __future__ import annotations

from kvtrace.causes.case import Case
from kvtrace.causes.cause import LOADS
from kvtrace.causes.model import Finding
from kvtrace.causes.pipeline import prompt_tokens
from kvtrace.causes.registry import CATALOGUE
from kvtrace.terms import FAULT, NOTE
from kvtrace.words import percent


def verdict(case: Case, findings: list[Finding]) -> str:
    """How much of the prompt KV was saved, and the first reason why not more; then what is wrong with
    the loads, where something is."""
    loads = [finding for finding in findings if CATALOGUE[finding.id].ledger == LOADS]
    saves = _saves(case, [finding for finding in findings if CATALOGUE[finding.id].ledger != LOADS])
    wrong = [finding.headline for finding in loads if finding.severity == FAULT and finding.headline]
    return f"{saves} Loads: {wrong[0]}." if wrong else saves


def _saves(case: Case, findings: list[Finding]) -> str:
    reasons = [finding for finding in findings if finding.severity != NOTE and finding.headline]
    # The sentence is about prompts: what explains lost prompt tokens is the better reason.
    reasons.sort(key=lambda finding: not any(case.assigned[finding.id].prompts.values())
                 if finding.id in case.assigned else finding.severity != FAULT)  # fmt: skip
    why = reasons[0].headline if reasons else ""
    if not case.requests and not why:
        why = next(iter(case.run.start_failures), "")
    if not case.run.engines:
        return f"No engine was seen in this run{_because(why)}."
    if not case.requests:
        return f"No request reached an engine in this run{_because(why)}."
    saved, computed = prompt_tokens(case)
    if computed <= 0:
        if case.run.total and not case.assigned:
            return (
                "No prompt KV was computed here that could be saved: it was reused, left to the connector "
                "to load, or not observed."
            )
        return f"No prompt KV was computed here{_because(why)}."
    share = percent(saved, computed)
    if saved >= computed:
        return f"All prompt KV computed here was saved{'; ' + why if why else ''}."
    if saved <= 0:
        return f"None of the prompt KV computed here was saved{_because(why)}."
    return f"{share[0].upper()}{share[1:]} of the prompt KV computed here was saved{_because(why)}."


def _because(why: str) -> str:
    return f": {why.rstrip('.')}" if why else ""  # vLLM's own messages end in one
