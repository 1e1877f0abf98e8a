"""run.json (``kvtrace.run/1``): what ran, with which processes, and how it ended."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import kvtrace
from kvtrace.trace.mask import mask_argv
from kvtrace.trace.sums import summed

SCHEMA = "kvtrace.run/1"
OVERLAY = "overlay"
"""Folder of the run directory that stands on PYTHONPATH."""


@dataclass
class RunRecord:
    """Written at the start, whenever the processes change, and at the end.

    ``exit_code`` is what ``kvtrace run`` takes from the child: 128 + N where ``signal`` N
    ended it; null while it runs (or where kvtrace itself was killed).
    """

    name: str
    command: Sequence[str]
    started_wall_ns: int
    ended_wall_ns: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    launcher: int = field(default_factory=os.getpid)
    """``kvtrace run`` itself: a run without an end, whose launcher is gone, was left."""
    processes: list[dict[str, object]] = field(default_factory=list)
    left: list[dict[str, object]] = field(default_factory=list)
    """vLLM's processes that outlived the command."""
    notes: list[str] = field(default_factory=list)
    spools: dict[str, int] = field(default_factory=dict)
    """Name of each spool -> its size once the run had ended: what is shorter later was cut."""
    profiles: list[str] = field(default_factory=list)
    """py-spy's profiles (``--sample``), as paths in the run directory."""

    def document(self) -> dict[str, Any]:
        """As JSON; settings go through the mask here."""
        return summed(
            {
                "schema": SCHEMA,
                "host": socket.gethostname(),
                "kvtrace": kvtrace.__version__,
                "python": platform.python_version(),
                **vars(self),
                "command": mask_argv(list(self.command)),
            }
        )
