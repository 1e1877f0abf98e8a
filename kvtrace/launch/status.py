"""One line for who sits at the terminal: that the tracing has begun, and where to look at it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from kvtrace.launch.say import say
from kvtrace.trace.format import SPOOL_DIR, SPOOL_SUFFIX


def at_a_terminal() -> bool:
    """Whether somebody reads stderr as it comes."""
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # closed
        return False


class Status:
    """Says once that a process of the run records.

    Args:
        shown: the run directory, as a person would type it.
        wanted: else nothing is ever said.
    """

    def __init__(self, run_dir: Path, shown: str, wanted: bool, say: Callable[[str], None] = say) -> None:
        self._spools = run_dir / SPOOL_DIR
        self._shown, self._wanted, self._say = shown, wanted, say

    def look(self) -> None:
        """Cheap; never raises."""
        if not self._wanted:
            return
        try:
            begun = any(name.endswith(SPOOL_SUFFIX) for name in os.listdir(self._spools))
        except OSError:
            return
        if begun:
            self._wanted = False
            self._say(f"vLLM is traced; to look at it while it runs: kvtrace top {shlex.quote(self._shown)}")
