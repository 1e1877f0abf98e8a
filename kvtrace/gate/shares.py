"""Ledgers as shares, and the few sums of accounts that gates judge by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvtrace.terms import LOADED, LOCAL_HIT, SAVED

if TYPE_CHECKING:
    from kvtrace.report.model import LedgerRow

DECODE = "not-saved:decode-not-offered"


def shares(ledger: LedgerRow) -> dict[str, float]:
    """Outcome -> share of the ledger's tokens, as people read them: saved is what was saved in every layer on
    every rank. Empty for an empty ledger."""
    total = ledger["total_tokens"]
    if not ledger["total"] or not total:
        return {}
    return {name: tokens / total for name in ledger["accounts"] if (tokens := whole(ledger, name))}


def whole(ledger: LedgerRow, name: str) -> float:
    """Tokens with one outcome."""
    return ledger["tokens"].get(name, ledger["accounts"].get(name, 0) / (ledger["pairs"] or 1))


def without(part: Mapping[str, float], outcome: str) -> dict[str, float]:
    """The shares of all other tokens; empty where there are none."""
    rest = 1.0 - part.get(outcome, 0.0)
    if rest <= 1e-9:
        return {}
    return {name: share / rest for name, share in part.items() if name != outcome}


def kept(part: Mapping[str, float]) -> float:
    """Share that is in the store or came from it, of the tokens that the GPU's prefix cache did not have:
    whether those were ever stored, their reuse does not say."""
    rest = without(part, LOCAL_HIT)
    return rest.get(SAVED, 0.0) + rest.get(LOADED, 0.0)


def grade_of(ledger: LedgerRow, outcome: str = SAVED) -> str:
    """How well it is seen that tokens had an outcome: the least grade of them, "" where no report says."""
    grades = ledger.get("grades", {}).get(outcome, {})
    return ([grade for grade, n in grades.items() if n] or [""])[-1]  # they are listed the best first


def saved_of_offered(ledger: LedgerRow) -> float | None:
    """Share of the tokens computed here that was saved, without decode tokens that are never offered.

    None where no such token was computed; 1.0 where all were loaded or reused and none was left to save.
    Tokens that the connector was to load and did not were not computed either.
    """
    accounts = ledger["accounts"]
    if not ledger["total"]:
        return None
    elsewhere = (DECODE, LOADED, LOCAL_HIT)
    left = ledger["total_tokens"] - sum(
        whole(ledger, name) for name in accounts if name in elsewhere or name.startswith("not-loaded:")
    )
    if left < 0.5:
        return 1.0 if any(accounts.get(name) for name in (LOADED, LOCAL_HIT)) else None
    return whole(ledger, SAVED) / left
