"""The page of ``kvtrace doctor``: a line for each check, then how many are what."""

from __future__ import annotations

from kvtrace.doctor.answer import DoctorAnswer, Level, Line
from kvtrace.render.page import Badge, Heading, Page, Paragraph, Style
from kvtrace.words import clean, plural

_STYLES: dict[Level, Style] = {
    Level.OK: "good",
    Level.WARNING: "limit",
    Level.PROBLEM: "failed",
    Level.NOT_KNOWN: "dim",
}
_WORD = max(len(level.value) for level in Level)


def doctor_page(answer: DoctorAnswer) -> Page:
    """Every line with its remedy, and the sum."""
    page: Page = [Heading("kvtrace doctor", 2, quiet=True)]
    for line in answer.lines:
        page += _parts(line)
    problems, warnings = answer.number(Level.PROBLEM), answer.number(Level.WARNING)
    style: Style = "failed" if problems else "passed"
    page.append(Paragraph(f"{plural(problems, 'problem')}, {plural(warnings, 'warning')}.", style, gap=True))
    return page


def _parts(line: Line) -> Page:
    word = line.level.value
    if line.level is Level.PROBLEM:
        word = word.upper()
    text = clean(f"{line.check}: {line.text}")
    parts: Page = [Badge(f"{word:{_WORD}}", text, _STYLES[line.level], whole=False, gap=False)]
    if line.remedy:
        parts.append(Paragraph(clean(f"-> {line.remedy}"), indent=True))
    return parts
