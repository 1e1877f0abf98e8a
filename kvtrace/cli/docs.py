"""``kvtrace docs``: the page of a cause, from the catalogue."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import typer

from kvtrace.cli.output import NO_COLOR, emit, format_option, screen
from kvtrace.errors import KvtraceError
from kvtrace.render.cause import cause_document, cause_list, cause_page, topic_page
from kvtrace.render.formats import Format, page_formats
from kvtrace.render.page import Page
from kvtrace.topics import TOPICS, Topic, find

if TYPE_CHECKING:
    from kvtrace.causes.cause import Cause


def _page(found: list[Cause] | Topic) -> Page:
    if isinstance(found, Topic):
        return topic_page(found)
    return cause_page(found[0]) if len(found) == 1 else cause_list(found)


def _document(found: list[Cause] | Topic) -> Any:
    return found._asdict() if isinstance(found, Topic) else [cause_document(cause) for cause in found]


FORMATS = page_formats(_page, _document)


def docs(
    id: str = typer.Argument(
        "",
        metavar="[ID]",
        help="A cause, or what people ask about: unified_attention, save_kv_layer, prefix-caching, "
        "cuda-graphs, use_direct_call. Without it, all are listed.",
    ),
    format: Format[Any] = format_option(FORMATS),
    no_color: bool = NO_COLOR,
) -> None:
    """Explain a cause, or answer a question about vLLM's part."""
    if topic := find(id):
        emit(format.draw(topic, screen(no_color)))
        return
    from kvtrace.causes.registry import CATALOGUE

    if id and id not in CATALOGUE:
        near = difflib.get_close_matches(id, [*CATALOGUE, *(one.id for one in TOPICS)], n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "kvtrace docs lists them"
        raise KvtraceError("no such cause", ascii(id)[1:-1], hint)
    causes = [CATALOGUE[id]] if id else list(CATALOGUE.values())
    emit(format.draw(causes, screen(no_color)))
