"""From the spools of a run to small tables and the token ledger: pure functions.

``read_run(run_dir)`` reads everything once and returns a :class:`Run`; the rules in
``kvtrace.causes`` read nothing else.

Comes in: a run directory.
Goes out: a :class:`Run`: frozen values, each token-layer with one outcome and its grade.
May not: name a cause, or take what was not seen for what was not there.
"""

from __future__ import annotations

from kvtrace.ledger.read import read_run
from kvtrace.ledger.run import Run, RunError
from kvtrace.ledger.side_by_side import Progress, unwatched

__all__ = ["Progress", "Run", "RunError", "read_run", "unwatched"]
