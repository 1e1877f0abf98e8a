"""``kvtrace explain``: why saves and loads did or did not happen, from a report or a run directory."""

from __future__ import annotations

import json
from enum import Enum

import typer

from kvtrace.cli.output import emit, styled


class Format(str, Enum):
    """How the explanation is printed."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"


def explain(
    path: str = typer.Argument(..., metavar="PATH", help="A report.json, or a run directory of kvtrace run."),
    format: Format = typer.Option(Format.TEXT, "--format", help="json is the report itself."),
    no_color: bool = typer.Option(False, "--no-color", help="No colour (also: NO_COLOR=1)."),
) -> None:
    """Say why KV blocks were or were not saved and loaded, with the evidence."""
    from kvtrace.report.read import read_report
    from kvtrace.story.locate import traced_directory

    report = read_report(path)
    folder = traced_directory(path)
    traced = None if folder is None else str(folder)
    if format is Format.JSON:
        # ASCII only: no byte in it means anything to a terminal
        emit(json.dumps(report, indent=2, allow_nan=False) + "\n")
    elif format is Format.MARKDOWN:
        from kvtrace.render.markdown import render_markdown

        emit(render_markdown(report, path, traced))
    else:
        from kvtrace.render.text import render_text

        emit(styled(lambda console: render_text(report, console, path, traced), no_color))
