"""What nearly every rule is written with: one import for the files in ``rules/``, beside their evidence."""

from __future__ import annotations

from kvtrace.causes.case import Case
from kvtrace.causes.cause import LOADS, SAVES, Cause
from kvtrace.causes.claims import Turn
from kvtrace.causes.diagnosis import Event, Results
from kvtrace.ledger.ends import LoadEnd, SaveEnd
from kvtrace.ledger.intervals import Interval
from kvtrace.ledger.run import LostSpan
from kvtrace.terms import FAULT, LIMIT, NOTE, Stage

__all__ = [
    "FAULT", "LIMIT", "LOADS", "NOTE", "SAVES", "Case", "Cause", "Event", "Interval", "LoadEnd",
    "LostSpan", "Results", "SaveEnd", "Stage", "Turn",
]  # fmt: skip
