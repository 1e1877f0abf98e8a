"""``kvtrace explain``: why saves and loads did or did not happen, from a report or a run directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from kvtrace.cli.merge import explain_merged
from kvtrace.cli.output import NO_COLOR, emit, emit_to, format_option, screen
from kvtrace.cli.progress import progress_bar
from kvtrace.render.formats import Format, page_formats
from kvtrace.render.page import Page, Screen
from kvtrace.render.report import report_page
from kvtrace.report.model import Report


@dataclass(frozen=True)
class Explanation:
    """A report, the path it came from, and its run directory where that has spools."""

    report: Report
    source: str
    traced: str | None
    detail: int

    def page(self) -> Page:
        return report_page(self.report, self.source, self.traced, whole=self.detail > 1)

    def text(self, screen: Screen) -> str:
        """One screen; more where it is asked for."""
        from kvtrace.render.brief import explained_text

        return explained_text(self.report, screen, self.source, self.traced, self.detail)


def _html(answer: Explanation, screen: Screen) -> str:
    from kvtrace.picture.draw import draw
    from kvtrace.render.html.page import page

    return page(answer.report, draw(Path(answer.traced)) if answer.traced else None)


HTML = Format("html", "for a browser, with pictures", _html)
FORMATS = (*page_formats(Explanation.page, lambda answer: answer.report, Explanation.text), HTML)


def explain(
    path: str = typer.Argument(..., metavar="PATH", help="A report.json, or a run directory of kvtrace run."),
    verbose: int = typer.Option(
        0,
        "-v",
        "--verbose",
        count=True,
        show_default=False,
        help="Evidence, causes that were ruled out, coverage, timing; -vv: all that the report holds.",
    ),
    format: Format[Explanation] = format_option(FORMATS),
    output: Path | None = typer.Option(
        None, "-o", "--output", metavar="FILE", help="Write to this file, not to stdout."
    ),
    force: bool = typer.Option(False, "--force", help="Replace the file of -o if it is there."),
    no_color: bool = NO_COLOR,
) -> None:
    """Explain why KV blocks were saved and loaded, or were not."""
    from kvtrace.merge.where import merged_directory

    if (merged := merged_directory(path)) is not None:
        explain_merged(merged, format.name, output, force, no_color)
        return
    from kvtrace.report.load import read_report
    from kvtrace.story.locate import traced_directory

    folder = traced_directory(path)
    with progress_bar("reading", octets=True) as progress:
        report = read_report(path, progress)
    answer = Explanation(report, path, None if folder is None else str(folder), verbose)
    if output is not None or format.name == "html":
        emit_to(output, format.draw(answer, Screen()), force)
    else:
        emit(format.draw(answer, screen(no_color)))
