"""What ``kvtrace verify`` says: a page, and JUnit XML."""

from __future__ import annotations

from xml.etree import ElementTree as tree

from kvtrace.render.junit import Suite, fails, xml
from kvtrace.render.page import (
    Badge,
    Code,
    Column,
    Heading,
    Labelled,
    Page,
    Paragraph,
    Row,
    Style,
    Table,
    bulleted,
)
from kvtrace.verify.answers import Answer, Answered, Result
from kvtrace.words import clean, duration, plural

_STYLES: dict[Answer, Style] = {
    Answer.PROVED: "good",
    Answer.FAILED: "bad",
    Answer.NOT_APPLICABLE: "dim",
    Answer.NOT_OBSERVED: "limit",
}
_SKIPPED = (Answer.NOT_APPLICABLE, Answer.NOT_OBSERVED)


def verify_page(result: Result) -> Page:
    """Every property with its answer; then each failure, its evidence and the command that repeats it."""
    number = len(result.answers)
    counts = [
        f"{sum(one.verdict.answer is answer for one in result.answers)} {answer.value}" for answer in Answer
    ]
    bad = len(result.failed)
    says = f"{bad} of {plural(number, 'property')}"
    passed = f"no property failed: {', '.join(counts)}"
    badge = Badge("PASSED", passed, "passed")
    if bad:
        badge = Badge("FAILED", f"{says}, stopped before all was asked" if result.stopped else says, "failed")
    elif result.stopped:
        badge = Badge("STOPPED", f"before all was asked; {passed}", "limit")
    page: Page = [
        Heading("kvtrace verify", 2, quiet=True),
        badge,
        Paragraph(
            f"{clean(result.subject)}, suite {result.suite}, {duration(result.seconds)}, "
            f"run {clean(result.run)}",
            "dim",
            True,
        ),
        Table(
            (Column("answer"), Column("property"), Column("")),
            [_row(one) for one in result.answers],
        ),
    ]
    for one in result.failed:
        page += _failure(one, result.again.get(one.key, ""))
    return [*page, *bulleted("Notes", [clean(note) for note in result.notes])]


def _row(one: Answered) -> Row:
    answer = one.verdict.answer
    name = f"{one.model}: {one.id}" if one.model else one.id
    return Row((answer.value, Code(clean(name)), clean(one.verdict.says)), _STYLES[answer])


def _failure(one: Answered, again: str) -> Page:
    verdict = one.verdict
    return [
        Badge("FAILED", (Code(one.id),), "failed"),
        Paragraph(clean(f"{one.title}: {verdict.says}"), indent=True),
        Labelled("Evidence", [clean(line) for line in verdict.evidence]),
        Labelled("Requests", [clean(", ".join(verdict.requests))] if verdict.requests else []),
        Labelled("Case", [(Code(clean(verdict.case)),)] if verdict.case else []),
        Labelled("Again", [(Code(clean(again)),)] if again else []),
    ]


def verify_junit(result: Result) -> str:
    """One test case a property; what does not apply or was not observed is skipped."""
    skipped = sum(one.verdict.answer in _SKIPPED for one in result.answers)
    name = clean(f"kvtrace verify {result.subject}")
    suite = Suite("kvtrace verify", name, len(result.answers), len(result.failed), skipped)
    for one in result.answers:
        answer = one.verdict.answer
        case = suite.case(clean(f"kvtrace.verify{'.' if one.model else ''}{one.model}"), clean(one.id))
        says = clean(f"{one.title}: {one.verdict.says}")
        if answer is Answer.FAILED:
            evidence = " ".join([*one.verdict.evidence, result.again.get(one.key, "")]).strip()
            fails(case, clean(one.id), says, [clean(evidence)])
        elif answer in _SKIPPED:
            tree.SubElement(case, "skipped", {"message": xml(f"{answer.value}: {says}")})
        else:
            tree.SubElement(case, "system-out").text = xml(says)
    return suite.text()
