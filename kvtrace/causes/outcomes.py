"""Where a token's way ended, as a cause's id and as the outcome that a report counts."""

from __future__ import annotations

from kvtrace.causes.evidence import measured
from kvtrace.causes.registry import CATALOGUE
from kvtrace.ledger.ends import NOT_LOADED, NOT_SAVED, LoadEnd, SaveEnd
from kvtrace.ledger.run import Ledger
from kvtrace.terms import LOADED, LOCAL_HIT, NOT_OBSERVED, PENDING

SAVE_CAUSE: dict[SaveEnd, str] = {end: cause.id for cause in CATALOGUE.values() for end in cause.save_ends}
LOAD_CAUSE: dict[LoadEnd, str] = {end: cause.id for cause in CATALOGUE.values() for end in cause.load_ends}
"""The cause behind each end. An end that is no loss has none; nor has NOT_DECLARED: claims explain it."""

_KINDS = {
    LoadEnd.NEVER_ASKED: "missed",
    LoadEnd.MISSED: "missed",
    LoadEnd.MISSED_SAVED: "missed",
    LoadEnd.CLAMPED: "clamped",
}
"""What kind of loss an end is; all others are tokens that were accepted and not loaded."""
_NO_LOSS = {
    LoadEnd.LOADED: LOADED,
    LoadEnd.LOCAL_HIT: LOCAL_HIT,
    LoadEnd.PENDING: PENDING,
    LoadEnd.NOT_OBSERVED: NOT_OBSERVED,
}


def not_saved(ident: str) -> str:
    """The outcome of tokens that were lost by a cause: ``not-saved:hook-raised``."""
    return f"{NOT_SAVED}:{ident}"


def outcome_of_load(end: LoadEnd) -> str:
    """``missed:lookup-miss``, ``not-loaded:load-failed``, ``loaded``."""
    return _NO_LOSS.get(end) or f"{_KINDS.get(end, NOT_LOADED)}:{LOAD_CAUSE[end]}"


def kept(name: str, ended: int) -> str:
    """The outcome of tokens that were not lost on their way into the store, by name and end as in
    ``Run.base``."""
    return outcome_of_load(LoadEnd(ended)) if name == NOT_LOADED else name


def named(loads: Ledger[LoadEnd]) -> Ledger[str]:
    """The ledger of loads by outcome."""
    seen = measured.added(loads.grades.values())
    return Ledger(
        total=loads.total,
        accounts={outcome_of_load(end): amount for end, amount in loads.accounts.items()},
        pairs=loads.pairs,
        tokens={outcome_of_load(end): amount for end, amount in loads.tokens.items()},
        total_tokens=loads.total_tokens,
        trust=measured.level(seen) if loads.total else "none",
        trust_note=measured.note(seen, loads=True) if loads.total else "",
        grades={outcome_of_load(end): grades for end, grades in loads.grades.items()},
    )
