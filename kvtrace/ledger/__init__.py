"""From the spools of a run to small tables and the token ledger: pure functions.

``load(run_dir)`` reads everything once and returns a :class:`Run`; the rules in
``kvtrace.causes`` read nothing else.
"""

from __future__ import annotations

from kvtrace.ledger.load import load
from kvtrace.ledger.model import (
    Book,
    Connector,
    Engine,
    Process,
    Run,
    RunError,
    Target,
    Worker,
)

__all__ = ["Book", "Connector", "Engine", "Process", "Run", "RunError", "Target", "Worker", "load"]
