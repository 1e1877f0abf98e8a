"""``kvtrace docs``: the page of a cause, from the catalogue."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import typer

from kvtrace.cli.output import NO_COLOR, emit, format_option, screen
from kvtrace.errors import KvtraceError
from kvtrace.render.cause import cause_document, cause_list, cause_page
from kvtrace.render.formats import Format, page_formats
from kvtrace.render.page import Page

if TYPE_CHECKING:
    from kvtrace.causes.cause import Cause


def _page(causes: list[Cause]) -> Page:
    return cause_page(causes[0]) if len(causes) == 1 else cause_list(causes)


FORMATS = page_formats(_page, lambda causes: [cause_document(cause) for cause in causes])


def docs(
    id: str = typer.Argument("", metavar="[ID]", help="A cause; without it, all are listed."),
    format: Format[Any] = format_option(FORMATS),
    no_color: bool = NO_COLOR,
) -> None:
    """Explain a cause: what it means, how it shows, what to do."""
    from kvtrace.causes.registry import CATALOGUE

    if id and id not in CATALOGUE:
        near = difflib.get_close_matches(id, CATALOGUE, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "kvtrace docs lists them"
        raise KvtraceError("no such cause", ascii(id)[1:-1], hint)
    causes = [CATALOGUE[id]] if id else list(CATALOGUE.values())
    emit(format.draw(causes, screen(no_color)))
