"""The outcome of a gate as SARIF 2.1.0: one result a failure, one rule a cause or kind of check."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvtrace import __version__
from kvtrace.gate.outcome import Check, GateOutcome
from kvtrace.render.check import sentence
from kvtrace.render.formats import json_text
from kvtrace.words import clean

_KINDS = {
    "engine": "The engine is set up differently from the baseline's.",
    "coverage": "A hook or an op is called too rarely.",
    "work": "A hook is called, but never with anything to store or load.",
    "ledger": "Too few tokens are kept or loaded.",
    "finding": "A finding that is not allowed.",
    "target": "A place in vLLM that kvtrace hooks is gone.",
    "rule": "A rule of the project does not hold.",
}


def sarif_json(outcome: GateOutcome) -> str:
    """The log. The report stands as the place of failures that no file asks for."""
    rules: dict[str, dict[str, Any]] = {}
    results = []
    for check in outcome.failed:
        rule = _rule(check, outcome)
        rules.setdefault(rule["id"], rule)
        results.append(_result(check, rule["id"], list(rules).index(rule["id"]), outcome))
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "kvtrace",
                        "semanticVersion": __version__,
                        "rules": list(rules.values()),
                    }
                },
                "results": results,
            }
        ],
    }
    return json_text(log)


def _rule(check: Check, outcome: GateOutcome) -> dict[str, Any]:
    cause = outcome.explanations.get(check.cause or "")
    if cause is None:
        return {"id": f"kvtrace-{check.kind}", "shortDescription": {"text": _KINDS[check.kind]}}
    help_text = " ".join(clean(line) for line in cause.remedy) or f"kvtrace docs {clean(cause.id, 80)}"
    return {
        "id": clean(cause.id, 80),
        "shortDescription": {"text": clean(cause.title)},
        "help": {"text": help_text},
        "properties": {"severity": cause.severity, "docs": clean(cause.docs)},
    }


def _result(check: Check, rule: str, index: int, outcome: GateOutcome) -> dict[str, Any]:
    cause = outcome.explanations.get(check.cause or "")
    words = [sentence(check, cause.title if cause else "")]
    if cause is not None:
        words += [clean(cause.title), *(clean(line) for line in cause.remedy[:1])]
    elif check.remedy:
        words.append(clean(check.remedy))
    place = check.source if check.line else outcome.report
    region = {"region": {"startLine": max(1, check.line)}}
    return {
        "ruleId": rule,
        "ruleIndex": index,
        "level": "error",  # a gate failed: how severe the finding is by itself is in its rule
        "message": {"text": ". ".join(part.rstrip(".") for part in words) + "."},
        "locations": [{"physicalLocation": {"artifactLocation": {"uri": _uri(place)}, **region}}],
        "partialFingerprints": {"kvtrace/v1": _fingerprint(check)},
    }


def _fingerprint(check: Check) -> str:
    """The same for the same regression in a later run, whatever its numbers."""
    rank = "" if check.rank is None else str(check.rank)
    return "/".join(quote(clean(part), safe="") for part in (check.kind, check.subject, check.layers, rank))


def _uri(path: str) -> str:
    """Relative to the working directory where it lies below it: that is what code hosts match files by."""
    full = Path(path).resolve()
    here = Path.cwd().resolve()
    return quote(full.relative_to(here).as_posix()) if full.is_relative_to(here) else full.as_uri()
