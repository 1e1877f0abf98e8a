"""``kvtrace diff``: two runs side by side, as after another vLLM, another connector or another flag."""

from __future__ import annotations

import json

import typer

from kvtrace.cli.explain import Format
from kvtrace.cli.output import emit, styled


def diff(
    a: str = typer.Argument(..., metavar="A", help="A report.json or a run directory: before."),
    b: str = typer.Argument(..., metavar="B", help="A report.json or a run directory: after."),
    format: Format = typer.Option(Format.TEXT, "--format", help="How it is printed."),
    no_color: bool = typer.Option(False, "--no-color", help="No colour (also: NO_COLOR=1)."),
) -> None:
    """Say what differs between two runs: settings, targets, coverage, ledgers, findings."""
    from kvtrace.gate.diff import difference
    from kvtrace.report.read import read_report

    found = difference(read_report(a), read_report(b), a, b)
    if format is Format.JSON:
        from kvtrace.gate.result import difference_json

        emit(json.dumps(difference_json(found), indent=2, allow_nan=False) + "\n")
    elif format is Format.MARKDOWN:
        from kvtrace.render.gate_markdown import diff_markdown

        emit(diff_markdown(found))
    else:
        from kvtrace.render.gate_text import render_diff

        emit(styled(lambda console: render_diff(found, console), no_color))
