"""Formats as a table: each verb that prints has one row a format, and nothing else knows their names.

A new format of one verb is one row in the table in that verb's file (``kvtrace/cli/``), a new format of all
verbs one row in :func:`page_formats`. The command line's choice, its help and its errors come from the rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvtrace.render.page import Page, Screen

T = TypeVar("T")


@dataclass(frozen=True)
class Format(Generic[T]):
    """How an answer of type T is printed; `draw` returns all of the output."""

    name: str
    help: str
    draw: Callable[[T, Screen], str]


def page_formats(
    page: Callable[[T], Page],
    document: Callable[[T], object],
    text: Callable[[T, Screen], str] | None = None,
) -> tuple[Format[T], ...]:
    """The formats of a verb whose answer is a page for people, and a JSON document for programs.

    `text`: where a terminal gets something else than the page.
    """

    def paged(answer: T, screen: Screen) -> str:
        from kvtrace.render.terminal import terminal

        return terminal(page(answer), screen)

    def markdown(answer: T, screen: Screen) -> str:
        from kvtrace.render.markdown import markdown

        return markdown(page(answer))

    return (
        Format("text", "for a terminal", text or paged),
        Format("markdown", "for an issue", markdown),
        Format("json", "for programs", lambda answer, screen: json_text(document(answer))),
    )


def json_text(document: object) -> str:
    """ASCII only: no byte in it means anything to a terminal."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"
