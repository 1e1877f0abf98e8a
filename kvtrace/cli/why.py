"""``kvtrace why``: one request's story."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from kvtrace.cli.output import NO_COLOR, emit, format_option, screen
from kvtrace.render.formats import Format, page_formats
from kvtrace.render.merged import tale_page
from kvtrace.render.page import Page
from kvtrace.render.story import story_page, summary_page
from kvtrace.story.story import Story


def _page(answer: Any) -> Page:  # Story, Summary or Tale
    if isinstance(answer, Story):
        return story_page(answer)
    return tale_page(answer) if hasattr(answer, "joins") else summary_page(answer)


FORMATS = page_formats(_page, lambda answer: answer.document())


def why(
    path: str = typer.Argument(..., metavar="PATH", help="A run directory of kvtrace run, or a report.json."),
    request: str = typer.Option(
        ..., "--request", metavar="ID", help="The client's or the engine's id, or its unique beginning."
    ),
    layer: str | None = typer.Option(
        None, "--layer", metavar="N", help="Each call of one layer, with its time: number or name."
    ),
    token: int | None = typer.Option(
        None, "--token", metavar="K", help="Only what concerns this position (from 0)."
    ),
    format: Format[Any] = format_option(FORMATS),
    no_color: bool = NO_COLOR,
) -> None:
    """Show what happened to one request, and to each of its tokens.

    A report without its run holds the request's sums and the findings that name it.
    """
    from kvtrace.merge.where import merged_directory
    from kvtrace.story.locate import run_directory, traced_directory
    from kvtrace.story.summary import summarize
    from kvtrace.story.tell import tell

    answer: Any
    if (merged := merged_directory(path)) is not None:
        from kvtrace.merge.tell import tell as tell_merged

        answer = tell_merged(merged, request, layer, token)
    elif Path(path).is_file() and traced_directory(path) is None:
        answer = summarize(path, request, layer, token)
    else:
        answer = tell(run_directory(path), request, layer, token)
    emit(format.draw(answer, screen(no_color)))
