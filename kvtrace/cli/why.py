"""``kvtrace why``: one request's story."""

from __future__ import annotations

import typer

from kvtrace.cli.output import NO_COLOR, emit, format_option, screen
from kvtrace.render.formats import Format, page_formats
from kvtrace.render.story import story_page
from kvtrace.story.model import Story

FORMATS = page_formats(story_page, Story.document)


def why(
    path: str = typer.Argument(
        ..., metavar="PATH", help="A run directory of kvtrace run, or the report.json in it."
    ),
    request: str = typer.Option(
        ..., "--request", metavar="ID", help="The client's or the engine's id, or its unique beginning."
    ),
    layer: str | None = typer.Option(
        None, "--layer", metavar="N", help="Each call of one layer, with its time: number or name."
    ),
    token: int | None = typer.Option(
        None, "--token", metavar="K", help="Only what concerns this position (from 0)."
    ),
    format: Format[Story] = format_option(FORMATS),
    no_color: bool = NO_COLOR,
) -> None:
    """Show what happened to one request, and to each of its tokens."""
    from kvtrace.story.locate import run_directory
    from kvtrace.story.tell import tell

    emit(format.draw(tell(run_directory(path), request, layer, token), screen(no_color)))
