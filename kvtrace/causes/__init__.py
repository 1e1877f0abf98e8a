"""From a :class:`kvtrace.ledger.Run` to findings.

``rules/`` has one file a cause, and ``registry`` their list. A rule uses ``cause`` (its entry of the
catalogue), ``case`` (the run), ``claims`` (which lost tokens are its) and ``model`` (what it yields), all
through ``rule``, and ``evidence/`` (what several rules share). ``diagnose`` runs them; ``assign``,
``pipeline`` and ``verdict`` are its parts.

Comes in: a :class:`kvtrace.ledger.Run`.
Goes out: findings, rule-outs, what was not observed, the verdict.
May not: read a spool, or change an outcome.
"""

from __future__ import annotations

from kvtrace.causes.diagnose import diagnose
from kvtrace.causes.diagnosis import Diagnosis, Event, Finding, NotObserved, RuledOut, StageRow

__all__ = ["Diagnosis", "Event", "Finding", "NotObserved", "RuledOut", "StageRow", "diagnose"]
