"""The fixed terms that rooms share, each spelt once and in its order: stages, severities, outcomes of tokens.

Standard library only: any piece may import it.
"""

from __future__ import annotations

STAGES = ("wiring", "schedule", "bind", "forward", "hook", "effect", "completion")
"""The places that a token passes on its way into a connector's store; a stage's number is its index."""

FAULT = "fault"
LIMIT = "limit"
NOTE = "note"
SEVERITIES = (FAULT, LIMIT, NOTE)
"""Of findings, worst first."""

SAVED = "saved"
LOADED = "loaded"
LOCAL_HIT = "local-hit"
PENDING = "pending"
NOT_OBSERVED = "not-observed"
OUTCOMES = (SAVED, LOADED, LOCAL_HIT, PENDING, NOT_OBSERVED)
"""What may become of a token, without the losses; these follow, with their cause's id."""
KEPT = (SAVED, LOADED, LOCAL_HIT)
"""Outcomes of tokens whose KV is in the store, came from it, or was reused."""


def severity_order(severity: str) -> int:
    """0 for the worst."""
    return SEVERITIES.index(severity)


def outcome_order(outcome: str) -> int:
    """The place of an outcome in lists: what went well first, every loss behind."""
    return OUTCOMES.index(outcome) if outcome in OUTCOMES else len(OUTCOMES)


def cause_of(outcome: str) -> str | None:
    """``not-saved:hook-raised`` -> ``hook-raised``."""
    return outcome.partition(":")[2] or None
