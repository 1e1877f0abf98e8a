"""``kvtrace why``: one request's story."""

from __future__ import annotations

import json
from typing import Optional

import typer

from kvtrace.cli.output import emit, styled
from kvtrace.cli.requests import Format


def why(
    path: str = typer.Argument(
        ..., metavar="PATH", help="A run directory of kvtrace run, or its report.json."
    ),
    request: str = typer.Option(
        ..., "--request", metavar="ID", help="The client's or the engine's id, or its unique beginning."
    ),
    layer: Optional[str] = typer.Option(  # noqa: UP045 (typer on Python 3.10)
        None, "--layer", metavar="N", help="Each call of one layer, with its time: number or name."
    ),
    token: Optional[int] = typer.Option(  # noqa: UP045
        None, "--token", metavar="K", help="Only what concerns this position (from 0)."
    ),
    format: Format = typer.Option(Format.TEXT, "--format"),
    no_color: bool = typer.Option(False, "--no-color", help="No colour (also: NO_COLOR=1)."),
) -> None:
    """Tell one request's story, from its arrival to where each of its tokens left the road."""
    from kvtrace.story.locate import run_directory
    from kvtrace.story.tell import tell

    story = tell(run_directory(path), request, layer, token)
    if format is Format.JSON:
        emit(json.dumps(story.document(), indent=2, allow_nan=False) + "\n")
    else:
        from kvtrace.render.story import render_story

        emit(styled(lambda console: render_story(story, console), no_color))
