"""What ``kvtrace verify`` says: a page, and JUnit XML."""

from __future__ import annotations

import re
from xml.etree import ElementTree as tree

from kvtrace.render.layout import clean
from kvtrace.render.page import (
    Badge,
    Bullets,
    Code,
    Column,
    Heading,
    Labelled,
    Page,
    Paragraph,
    Row,
    Style,
    Table,
)
from kvtrace.verify.answers import Answer, Answered, Result
from kvtrace.words import duration, plural

_STYLES: dict[Answer, Style] = {
    Answer.PROVED: "good",
    Answer.FAILED: "bad",
    Answer.NOT_APPLICABLE: "dim",
    Answer.NOT_OBSERVED: "limit",
}
# what XML 1.0 cannot hold, escaped or not
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def verify_page(result: Result) -> Page:
    """Every property with its answer; then each failure, its evidence and the command that repeats it."""
    number = len(result.answers)
    counts = [
        f"{sum(one.verdict.answer is answer for one in result.answers)} {answer.value}" for answer in Answer
    ]
    bad = len(result.failed)
    says = f"{bad} of {plural(number, 'property')}".replace("propertys", "properties")
    passed = f"no property failed: {', '.join(counts)}"
    page: Page = [
        Heading("kvtrace verify", 2, quiet=True),
        Badge("FAILED" if bad else "PASSED", says if bad else passed, "failed" if bad else "passed"),
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
    if result.notes:
        page += [Heading("Notes"), Bullets([clean(note) for note in result.notes])]
    return page


def _row(one: Answered) -> Row:
    answer = one.verdict.answer
    name = f"{one.model}: {one.id}" if one.model else one.id
    return Row((answer.value, Code(clean(name)), clean(one.verdict.says)), _STYLES[answer])


def _failure(one: Answered, again: str) -> Page:
    parts: Page = [
        Badge("FAILED", (Code(one.id),), "failed"),
        Paragraph(clean(f"{one.title}: not so. {one.verdict.says}"), indent=True),
    ]
    for label, lines in (
        ("Evidence", [clean(line) for line in one.verdict.evidence]),
        ("Requests", [clean(", ".join(one.verdict.requests))] if one.verdict.requests else []),
        ("Case", [(Code(clean(one.verdict.case)),)] if one.verdict.case else []),
        ("Again", [(Code(clean(again)),)] if again else []),
    ):
        if lines:
            parts.append(Labelled(label, lines))
    return parts


def verify_junit(result: Result) -> str:
    """One test case a property; what does not apply or was not observed is skipped."""
    skipped = [one for one in result.answers if _skipped(one)]
    counts = {
        "tests": str(len(result.answers)), "failures": str(len(result.failed)), "errors": "0",
        "skipped": str(len(skipped)),
    }  # fmt: skip
    root = tree.Element("testsuites", {"name": "kvtrace verify", **counts})
    suite = tree.SubElement(root, "testsuite", {"name": _xml(f"kvtrace verify {result.subject}"), **counts})
    for one in result.answers:
        case = tree.SubElement(
            suite,
            "testcase",
            {"classname": _xml(f"kvtrace.verify{'.' if one.model else ''}{one.model}"), "name": _xml(one.id)},
        )
        says = _xml(f"{one.title}: {one.verdict.says}")
        if one.verdict.answer is Answer.FAILED:
            failure = tree.SubElement(case, "failure", {"type": _xml(one.id), "message": says})
            failure.text = _xml("\n".join([*one.verdict.evidence, result.again.get(one.key, "")]).strip())
        elif _skipped(one):
            tree.SubElement(case, "skipped", {"message": f"{one.verdict.answer.value}: {says}"})
        else:
            tree.SubElement(case, "system-out").text = says
    tree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + tree.tostring(root, encoding="unicode") + "\n"


def _skipped(one: Answered) -> bool:
    return one.verdict.answer in (Answer.NOT_APPLICABLE, Answer.NOT_OBSERVED)


def _xml(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", clean(text))
