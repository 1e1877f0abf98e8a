"""What a rule is written with: the one import of the files in ``rules/``, beside their evidence and words."""

from __future__ import annotations

from kvtrace.causes.case import Case, Piece, Request
from kvtrace.causes.cause import LOADS, SAVES, Cause
from kvtrace.causes.claims import Turn
from kvtrace.causes.model import Event, Finding, Results
from kvtrace.ledger.ends import LoadEnd, SaveEnd
from kvtrace.ledger.intervals import Interval
from kvtrace.terms import FAULT, LIMIT, NOTE, Stage

__all__ = [
    "FAULT", "LIMIT", "LOADS", "NOTE", "SAVES", "Case", "Cause", "Event", "Finding", "Interval", "LoadEnd",
    "Piece", "Request", "Results", "SaveEnd", "Stage", "Turn",
]  # fmt: skip
