"""From a :class:`kvtrace.ledger.Run` to findings: one file a cause, the catalogue as data."""

from __future__ import annotations

from kvtrace.causes.diagnose import diagnose
from kvtrace.causes.model import Diagnosis, Event, Finding, NotObserved, RuledOut, StageRow

__all__ = ["Diagnosis", "Event", "Finding", "NotObserved", "RuledOut", "StageRow", "diagnose"]
