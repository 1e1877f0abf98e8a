"""``kvtrace merge``: runs of several engines or hosts as one."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvtrace.cli.output import NO_COLOR, emit, emit_to, format_option, screen
from kvtrace.render.formats import Format, page_formats
from kvtrace.render.merged import merged_page
from kvtrace.render.page import Page, Screen

if TYPE_CHECKING:
    from kvtrace.merge.merged import Merged


@dataclass(frozen=True)
class MergeAnswer:
    """A merge, and the directory that holds it, as typed."""

    merged: Merged
    where: str

    def page(self) -> Page:
        return merged_page(self.merged, shlex.quote(self.where))


FORMATS = page_formats(MergeAnswer.page, lambda answer: answer.merged.to_json())


def merge(
    runs: list[str] = typer.Argument(
        ..., metavar="RUN...", help="Run directories of kvtrace run, with two engines or more in all."
    ),
    output: Path | None = typer.Option(
        None, "-o", "--output", metavar="DIR", help="New directory for it; else reports/<time>-merged."
    ),
    clock_error: float = typer.Option(
        100.0, "--clock-error", min=0, metavar="MS", help="By how much wall clocks of two hosts may be off."
    ),
    format: Format[Any] = format_option(FORMATS),
    no_color: bool = NO_COLOR,
) -> None:
    """Join the runs of several engines: prefill and decode.

    Requests are joined by the ids that the connector handed over. explain, requests and why take the result.
    """
    from kvtrace.errors import KvtraceError
    from kvtrace.merge.build import merge as merge_runs
    from kvtrace.merge.place import new_directory, write

    if not clock_error < 1e9:
        raise KvtraceError("--clock-error is too large", "give milliseconds")
    with new_directory(output) as place:
        answer = merge_runs(runs, round(clock_error * 1e6), place)
        write(answer, place)
    emit(format.draw(MergeAnswer(answer.merged, str(place)), screen(no_color)))


def explain_merged(folder: Path, name: str, output: Path | None, force: bool, no_color: bool) -> None:
    """What ``explain`` says of a merged directory, to a file where `output` names one.

    Args:
        name: of the format: text, markdown or json.

    Raises:
        KvtraceError: it cannot be read, or there is no such page of it; or the file is there already.
    """
    from kvtrace.merge.one_run import one_run
    from kvtrace.merge.place import load

    format = next((one for one in FORMATS if one.name == name), None)
    if format is None:
        one_run(folder, f"a page of {name}")
        return
    answer = MergeAnswer(load(folder), str(folder))
    if output is None:
        emit(format.draw(answer, screen(no_color)))
    else:
        emit_to(output, format.draw(answer, Screen()), force)
