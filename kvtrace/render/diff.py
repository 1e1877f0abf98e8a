"""The page of ``kvtrace diff``: two runs side by side."""

from __future__ import annotations

from kvtrace.gate.outcome import Change, Difference
from kvtrace.render.check import COLUMNS, value
from kvtrace.render.page import Badge, Code, Heading, Page, Paragraph, Row, Style, Table, bulleted
from kvtrace.words import clean

_SECTIONS = (
    ("settings", "Settings that differ"),
    ("targets", "Targets that appeared or vanished"),
    ("coverage", "Coverage"),
    ("saves", "Where the tokens went"),
    ("loads", "What the connector loaded"),
    ("findings", "Findings gained and lost"),
)
_STYLES: dict[str, Style] = {"better": "good", "worse": "bad"}


def diff_page(difference: Difference) -> Page:
    """What differs between two runs."""
    page: Page = [Heading("kvtrace diff", 2, quiet=True)]
    both = zip((difference.a, difference.b), difference.verdicts, strict=True)
    for name, (path, verdict) in zip("AB", both, strict=True):
        page += [Badge(name, (Code(clean(path)),), "dim"), Paragraph(clean(verdict), indent=True)]
    if difference.empty:
        words = "No difference in settings, targets, coverage, ledgers or findings."
        page.append(Paragraph(words, gap=True))
    for name, title in _SECTIONS:
        changes: list[Change] = getattr(difference, name)
        if changes:
            table = Table(COLUMNS, [_row(change) for change in changes], head=False)
            page += [Heading(title), table]
    return [*page, *bulleted("Limits", _limits(*difference.limits))]


def _limits(a: list[str], b: list[str]) -> list[str]:
    """What the reports cannot say; said once where both cannot."""
    shared = [one for one in a if one in b]
    said = [(name, one) for name, part in (("A", a), ("B", b)) for one in part if one not in shared]
    return [f"{name}: {clean(one)}" for name, one in [*(("A and B", one) for one in shared), *said]]


def _row(change: Change) -> Row:
    cells = (
        Code(clean(change.name, 80)),
        Code(clean(change.layers, 160)),
        f"{value(change.before, change.unit)} -> {value(change.after, change.unit)}",
        " · ".join(filter(None, (change.verdict if change.verdict in _STYLES else "", clean(change.text)))),
    )
    return Row(cells, _STYLES.get(change.verdict, ""))
