"""Stdout: how wide it is, whether it shows colours, and a reader that may have gone."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing alone would take longer than all else here
if TYPE_CHECKING:
    from kvtrace.render.page import Screen

PIPE_WIDTH = 100


def screen(no_color: bool = False) -> Screen:
    """Stdout: its width, and its colours where they are wanted."""
    from kvtrace.render.page import Screen

    if not sys.stdout.isatty():
        return Screen(_columns() or PIPE_WIDTH)
    plain = no_color or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") in ("dumb", "unknown")
    return Screen(terminal_columns(), None if plain else "auto")


def terminal_columns() -> int:
    """Columns of the terminal; 80 where there is none, or it does not tell."""
    try:
        return _columns() or os.get_terminal_size(sys.__stdout__.fileno()).columns or 80  # type: ignore[union-attr]
    except (AttributeError, ValueError, OSError):
        return 80


def wrote(text: str) -> bool:
    """Writes `text` to stdout; False where its reader has gone (``| head``), which is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # what is still in the buffer goes nowhere, or the interpreter's own flush at exit would complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def _columns() -> int:
    """What COLUMNS says, 0 where it says nothing."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns[:4]) if columns.isascii() and columns.isdigit() else 0
