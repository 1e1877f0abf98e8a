"""The page of a cause: printed by ``kvtrace docs ID``, and written as ``docs/causes/ID.md``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvtrace.render.page import Code, Column, Heading, Page, Paragraph, Row, Table
from kvtrace.terms import FAULT, LIMIT, NOTE
from kvtrace.topics import TOPICS, Topic

if TYPE_CHECKING:  # the command line imports this file, and shall not load the analysis
    from kvtrace.causes.cause import Cause

_SEVERITY = {
    FAULT: "fault: needs a fix in the configuration, the connector or vLLM",
    LIMIT: "choice: not offered to store or load, by whatever rule; is that meant? (limit in JSON)",
    NOTE: "note: information",
}
_LIVE = "seen live: a scenario shows it on a real vLLM"
_NOT_LIVE = "not yet seen live: tested on synthetic traces only"


def cause_page(cause: Cause) -> Page:
    """What the catalogue says of `cause`: what to do comes first."""
    stage = "none: no token is lost on its way into the store"
    if cause.stage is not None:
        stage = f"{int(cause.stage)} {cause.stage.label}"
    facts = (
        ("Severity", _SEVERITY[cause.severity]),
        ("Stage", stage),
        ("Ledger", cause.ledger or "none"),
        ("vLLM", cause.versions),
        ("Rule", _LIVE if cause.live else _NOT_LIVE),
    )
    return [
        Heading(cause.id, 1),
        Heading("What to do", 2),
        Paragraph(cause.remedy),
        Heading("What it means", 2),
        Paragraph(cause.meaning),
        Heading("How it shows", 2),
        Paragraph(cause.seen_as),
        Table((Column(), Column()), [Row(fact) for fact in facts], head=False),
    ]


def topic_page(topic: Topic) -> Page:
    """What people ask, and the answer."""
    return [
        Heading(topic.title, 1),
        *(Paragraph(text, gap=at > 0) for at, text in enumerate(topic.answer)),
        Paragraph(topic.look, gap=True),
        Paragraph(f"Findings: {', '.join(topic.causes)}.", gap=True),
    ]


def cause_list(causes: Iterable[Cause]) -> Page:
    """The causes, and what each means."""
    rows = [Row((Code(cause.id), cause.meaning)) for cause in causes]
    asked = [Row((Code(topic.id), topic.title)) for topic in TOPICS]
    return [
        Heading("Causes", 1, quiet=True),
        Table((Column("question"), Column("")), asked),
        Table((Column("cause"), Column("meaning")), rows),
    ]


def cause_document(cause: Cause) -> dict[str, object]:
    """As JSON."""
    return {
        "id": cause.id,
        "severity": cause.severity,
        "stage": None if cause.stage is None else int(cause.stage),
        "ledger": cause.ledger,
        "versions": cause.versions,
        "seen_live": cause.live,
        "meaning": cause.meaning,
        "seen_as": cause.seen_as,
        "remedy": cause.remedy,
    }
