"""``kvtrace diff``: two runs side by side, as after another vLLM, another connector or another flag."""

from __future__ import annotations

import typer

from kvtrace.cli.output import NO_COLOR, emit, format_option, screen
from kvtrace.gate.outcome import Difference
from kvtrace.render.diff import diff_page
from kvtrace.render.formats import Format, page_formats

FORMATS = page_formats(diff_page, Difference.document)


def diff(
    a: str = typer.Argument(..., metavar="A", help="A report.json or a run directory: before."),
    b: str = typer.Argument(..., metavar="B", help="A report.json or a run directory: after."),
    format: Format[Difference] = format_option(FORMATS),
    no_color: bool = NO_COLOR,
) -> None:
    """Show what differs between two runs.

    Settings, targets, coverage, ledgers, findings.
    """
    from kvtrace.gate.diff import difference
    from kvtrace.merge.one_run import one_run
    from kvtrace.report.load import read_report

    for path in (a, b):
        one_run(path, "diff")
    emit(format.draw(difference(read_report(a), read_report(b), a, b), screen(no_color)))
