"""``kvtrace export``: a run as a timeline or as tables, for other programs."""

from __future__ import annotations

from pathlib import Path

import typer

from kvtrace.cli.output import emit
from kvtrace.cli.progress import progress_bar
from kvtrace.cli.run import one_of
from kvtrace.export.write import BY_NAME, Destination


def export(
    path: str = typer.Argument(..., metavar="PATH", help="A run directory of kvtrace run."),
    format: str = typer.Option(
        ..., "--format", metavar="|".join(BY_NAME), help="A timeline, or tables (docs/export.md)."
    ),
    output: str | None = typer.Option(
        None, "-o", "--output", metavar="PLACE", help="File (perfetto) or directory to write."
    ),
    steps: str = typer.Option("", "--steps", metavar="A:B", help="Only steps A to B, both included."),
    layers: str = typer.Option("", "--layers", metavar="LIST", help="Only these: 0,5-8, or parts of names."),
    request: str = typer.Option("", "--request", metavar="ID", help="Only this request and its steps."),
    force: bool = typer.Option(False, "--force", help="Replace what an earlier export left there."),
) -> None:
    """Write a run, or a part of it, for other programs."""
    from kvtrace.export.run import open_run
    from kvtrace.export.selection import Wanted, parse_steps
    from kvtrace.merge.one_run import one_run

    one_run(path, "export")
    chosen = BY_NAME[one_of("--format", format, tuple(BY_NAME))]
    chosen.check()
    run = open_run(path, Wanted(parse_steps(steps), layers, request))
    place = Path(output) if output else chosen.place(run)
    with progress_bar("reading", octets=True) as progress:
        written = chosen.write(Destination(run, place, force, progress))
    emit(f"wrote {written}\n")
