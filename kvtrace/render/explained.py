"""The text of ``kvtrace explain``, by how much of it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrace.render.brief import brief_text
from kvtrace.render.page import Screen
from kvtrace.render.report import report_page
from kvtrace.render.terminal import terminal

if TYPE_CHECKING:
    from kvtrace.report.model import Report


def explained_text(report: Report, screen: Screen, source: str, traced: str | None, detail: int = 0) -> str:
    """One screen (`detail` 0); with the evidence (1); all that the report holds (2)."""
    if not detail:
        return brief_text(report, screen, source, traced)
    return terminal(report_page(report, source, traced, whole=detail > 1), screen)
