"""What a verb prints: in the format that was asked for, styled for a terminal, plain in a pipe, quiet where
the reader has gone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import typer

from kvtrace.cli.screen import screen as screen
from kvtrace.cli.screen import wrote
from kvtrace.errors import KvtraceError
from kvtrace.render.formats import Format

T = TypeVar("T")
NO_COLOR: Any = typer.Option(False, "--no-color", help="No colour (also: NO_COLOR=1).")


def format_option(formats: Sequence[Format[T]]) -> Any:
    """The option ``--format`` of a verb: its value is the row of `formats`, the first one by default.

    A name that has no row is a usage error.
    """

    def row(name: str) -> Format[T]:
        for one in formats:
            if one.name == name:
                return one
        known = ", ".join(one.name for one in formats)
        raise typer.BadParameter(f"no format {ascii(name)[:40]}, there are {known}")

    words = ", ".join(f"{one.name} ({one.help})" for one in formats)
    metavar = "|".join(one.name for one in formats)
    return typer.Option(formats[0].name, "--format", metavar=metavar, help=f"{words}.", parser=row)


def emit(text: str) -> None:
    """Writes `text` to stdout. A reader that has gone (``| head``) ends the verb, and is no error."""
    if not wrote(text):
        raise typer.Exit(0)


def emit_to(output: Path | None, text: str, force: bool) -> None:
    """Writes `text` to a file, or to a pipe where there is no file.

    Raises:
        KvtraceError: the file is there and `force` is not set, or cannot be written; or there is none, and
            stdout is a terminal.
    """
    from kvtrace.cli.writing import write_file

    if output is not None:
        write_file(output, text, force)
    elif sys.stdout.isatty():
        raise KvtraceError("a page is for a file", "stdout is a terminal", "name a file: -o report.html")
    else:
        emit(text)
