"""The page of a cause, made from the catalogue: ``kvtrace docs ID`` and ``docs/causes/ID.md``."""

from __future__ import annotations

from kvtrace.causes.catalogue import STAGES, Cause

_SEVERITY = {
    "fault": "fault: something to mend",
    "limit": "limit: by the connector's design; works as built",
    "note": "note: information",
}
_LEDGERS = {"saves": "saves", "loads": "loads"}


def cause_page(cause: Cause) -> str:
    """The page of `cause`, as Markdown that ends in a newline."""
    facts = [f"- Severity: {_SEVERITY.get(cause.severity, cause.severity)}"]
    if cause.stage is not None:
        facts.append(f"- Stage: {cause.stage} {STAGES[cause.stage]}")
    if cause.ledger in _LEDGERS:
        facts.append(f"- Ledger: {_LEDGERS[cause.ledger]}")
    facts.append(f"- Rule holds for vLLM: {cause.versions}")
    if not cause.implemented:
        facts.append("- This version of kvtrace does not look for it yet: it is neither found nor ruled out.")
    sections = [
        f"# {cause.id}",
        cause.meaning,
        "\n".join(facts),
        "## Seen as",
        cause.seen_as,
        "## What to do",
        cause.remedy,
    ]
    return "\n\n".join(sections) + "\n"
