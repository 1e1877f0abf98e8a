"""What a verb prints: in the format that was asked for, styled for a terminal, plain in a pipe, quiet where
the reader has gone."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import typer

from kvtrace.render.formats import Format
from kvtrace.render.page import Screen

PIPE_WIDTH = 100
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


def screen(no_color: bool = False) -> Screen:
    """Stdout: its width, and its colours where they are wanted."""
    terminal = sys.stdout.isatty()
    if not terminal:
        return Screen(_pipe_width())
    plain = no_color or bool(os.environ.get("NO_COLOR"))
    # NO_COLOR alone would leave rich's bold and dim on: no colours here are no escapes at all
    return Screen(shutil.get_terminal_size().columns, None if plain else "auto")


def emit(text: str) -> None:
    """Writes `text` to stdout. A reader that has gone (``| head``) ends the verb, and is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # what is still in the buffer goes nowhere, or the interpreter's own flush at exit would complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None


def _pipe_width() -> int:
    columns = os.environ.get("COLUMNS", "")
    if not (columns.isascii() and columns.isdigit()):
        return PIPE_WIDTH
    return int(columns[:4])
