"""``kvtrace doctor``: what a run would trace, and what it would not save, before it is made."""

from __future__ import annotations

import os

import typer

from kvtrace.cli.output import NO_COLOR, emit, format_option, screen
from kvtrace.cli.run import parse_name
from kvtrace.doctor.answer import DoctorAnswer
from kvtrace.render.doctor import doctor_page
from kvtrace.render.formats import Format, page_formats

FORMATS = page_formats(doctor_page, DoctorAnswer.document)


def doctor(
    command: list[str] | None = typer.Argument(
        None, metavar="[--] COMMAND...", help="The command that kvtrace run would get; it is not run."
    ),
    connector: str | None = typer.Option(
        None,
        "--connector",
        metavar="MODULE:CLASS",
        help="Check this connector's class; COMMAND may be left out.",
    ),
    timeout: float = typer.Option(
        180.0,
        "--timeout",
        min=1,
        max=3600,
        metavar="SECONDS",
        help="How long importing vLLM, the connector, or making vLLM's configuration may take, each.",
    ),
    format: Format[DoctorAnswer] = format_option(FORMATS),
    no_color: bool = NO_COLOR,
) -> None:
    """Say before a run what it will trace, and what it will not save.

    Versions, hooks, the connector's class, its configuration and its store: ok, warning, problem or not
    known, each with a remedy. No engine is started, no connector is made. Exit codes: 0 no problem, 1 a
    problem, 2 usage.
    """
    from kvtrace.doctor.checks import answer
    from kvtrace.doctor.gather import gather

    name = parse_name("--connector", connector, "Class", "mine.kv:MyConnector")
    found = answer(gather(command or [], name, os.environ, timeout))
    emit(format.draw(found, screen(no_color)))
    raise typer.Exit(1 if found.failed else 0)
