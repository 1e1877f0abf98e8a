"""``kvtrace requests``: the requests of a run, worst first."""

from __future__ import annotations

from enum import Enum
from typing import Any

import typer

from kvtrace.cli.output import NO_COLOR, emit, format_option, screen
from kvtrace.render.formats import Format, page_formats
from kvtrace.render.listing import listing_page, listing_text
from kvtrace.render.merged import list_page, list_text


class Sort(str, Enum):
    """What stands first."""

    WORST = "worst"
    BEST = "best"
    PROMPT = "prompt"
    ARRIVAL = "arrival"
    ID = "id"


FORMATS = page_formats(listing_page, lambda listing: listing.document(), listing_text)

MERGED = {one.name: one for one in page_formats(list_page, lambda found: found.document(), list_text)}


def requests(
    path: str = typer.Argument(..., metavar="PATH", help="A report.json, or a run directory of kvtrace run."),
    verdict: str | None = typer.Option(
        None, "--verdict", metavar="ID", help="Only these: a cause's id, saved, partly-saved, loaded, ..."
    ),
    sort: Sort = typer.Option(Sort.WORST, "--sort", help="worst: not loaded, then not saved."),
    limit: int | None = typer.Option(None, "--limit", min=1, metavar="N", help="At most N."),
    format: Format[Any] = format_option(FORMATS),
    no_color: bool = NO_COLOR,
) -> None:
    """List the requests of a run, worst first.

    A report holds the worst 200 only; a run directory has all.
    """
    from kvtrace.merge.where import merged_directory

    if (merged := merged_directory(path)) is not None:
        from kvtrace.merge.tell import listing as merged_listing

        emit(MERGED[format.name].draw(merged_listing(merged, verdict, sort.value, limit), screen(no_color)))
        return
    from kvtrace.story.listing import listing

    emit(format.draw(listing(path, verdict, sort.value, limit), screen(no_color)))
