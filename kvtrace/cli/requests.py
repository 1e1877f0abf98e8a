"""``kvtrace requests``: the requests of a run, worst first."""

from __future__ import annotations

import json
from enum import Enum
from typing import Optional

import typer

from kvtrace.cli.output import emit, styled


class Format(str, Enum):
    """How the list is printed."""

    TEXT = "text"
    JSON = "json"


class Sort(str, Enum):
    """What stands first."""

    WORST = "worst"
    BEST = "best"
    PROMPT = "prompt"
    ARRIVAL = "arrival"
    ID = "id"


def requests(
    path: str = typer.Argument(..., metavar="PATH", help="A report.json, or a run directory of kvtrace run."),
    verdict: Optional[str] = typer.Option(  # noqa: UP045 (typer on Python 3.10)
        None, "--verdict", metavar="ID", help="Only these: a cause's id, saved, loaded, local-hit, ..."
    ),
    sort: Sort = typer.Option(Sort.WORST, "--sort", help="worst: most tokens not saved."),
    limit: Optional[int] = typer.Option(None, "--limit", min=1, metavar="N", help="At most N."),  # noqa: UP045
    format: Format = typer.Option(Format.TEXT, "--format"),
    no_color: bool = typer.Option(False, "--no-color", help="No colour (also: NO_COLOR=1)."),
) -> None:
    """List the requests of a run with what was saved of each; a report holds the worst 200 only."""
    from kvtrace.story.listing import listing

    found = listing(path, verdict, sort.value, limit)
    if format is Format.JSON:
        emit(json.dumps(found.document(), indent=2, allow_nan=False) + "\n")
    else:
        from kvtrace.render.story import render_listing

        emit(styled(lambda console: render_listing(found, console), no_color))
