"""The page of a cause, made from the catalogue: ``kvtrace docs ID`` and ``docs/causes/ID.md``."""

from __future__ import annotations

from kvtrace.causes.cause import Cause

_SEVERITY = {
    "fault": "fault: something to mend",
    "limit": "limit: by the connector's design; works as built",
    "note": "note: information",
}


def cause_page(cause: Cause) -> str:
    """The page of `cause`, as Markdown that ends in a newline."""
    facts = [f"- Severity: {_SEVERITY.get(cause.severity, cause.severity)}"]
    if cause.stage is not None:
        facts.append(f"- Stage: {int(cause.stage)} {cause.stage.label}")
    if cause.ledger is not None:
        facts.append(f"- Ledger: {cause.ledger}")
    facts.append(f"- Rule holds for vLLM: {cause.versions}")
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
