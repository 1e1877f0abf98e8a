"""What ``kvtrace verify`` answered, as a part of a page."""

from __future__ import annotations

from kvtrace.render.html.markup import Content, Markup, bullets, section, table, tag
from kvtrace.verify.answers import Answer, Answered, Result

_CLASSES = {Answer.PROVED: "good", Answer.FAILED: "bad"}


def section_of(result: Result) -> Markup:
    """Each property with its answer; a failure with its evidence and the command that repeats it."""
    heads = (("Answer", False), ("Property", False), ("What was seen", False))
    rows = [
        (
            tag("span", one.verdict.answer.value, class_=_CLASSES.get(one.verdict.answer, "dim")),
            [tag("code", one.key), " ", one.title],
            _seen(one, result.again.get(one.key, "")),
        )
        for one in result.answers
    ]
    return section("verify", "Proof by return", table(heads, rows, "Properties"), bullets(result.notes))


def _seen(one: Answered, again: str) -> Content:
    parts = [tag("p", one.verdict.says)]
    if one.verdict.evidence:
        parts.append(bullets(one.verdict.evidence))
    return [*parts, tag("code", again)] if again else parts
