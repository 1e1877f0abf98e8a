"""kvtrace's own few lines, on stderr only: stdout belongs to the command."""

from __future__ import annotations

import os
import sys

from kvtrace.words import clean


def at_a_terminal() -> bool:
    """Whether somebody reads stderr as it comes."""
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # closed
        return False


def say(text: str) -> None:
    """One line, without what a terminal would obey. A closed or full stderr is no reason to fail."""
    if sys.stderr is None:  # closed from the start: print would take stdout instead
        return
    try:
        # One write: with PYTHONUNBUFFERED the command could come between the text and its end of line.
        sys.stderr.write(f"kvtrace: {clean(text)}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        # What is left in its buffer would fail again at the end, and make the exit code 120.
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
