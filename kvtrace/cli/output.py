"""What a verb prints: styled for a terminal, plain in a pipe, quiet where the reader has gone."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 100


def styled(draw: Callable[[Console], None], no_color: bool = False) -> str:
    """What `draw` prints to a console made for stdout: its width, and its colours where wanted."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    plain = no_color or not terminal or bool(os.environ.get("NO_COLOR"))
    stream = io.StringIO()
    # NO_COLOR alone would leave rich's bold and dim on: no colour system, no escapes at all
    console = Console(
        file=stream,
        force_terminal=terminal,
        color_system=None if plain else "auto",
        width=None if terminal else _pipe_width(),
    )
    draw(console)
    return stream.getvalue()


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
