"""Which finding of a report explains what a gate found missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvtrace.causes.registry import CATALOGUE
from kvtrace.gate.outcome import QuotedFinding
from kvtrace.report.model import FindingRow, Report
from kvtrace.terms import NOTE, Stage, cause_of, severity_order

_CALL_STAGES = (Stage.WIRING, Stage.BIND, Stage.FORWARD, Stage.HOOK)


def worst(findings: Iterable[FindingRow]) -> dict[str, FindingRow]:
    """The most severe finding of each id."""
    found: dict[str, FindingRow] = {}
    for one in sorted(findings, key=lambda one: severity_order(one["severity"])):
        found.setdefault(one["id"], one)
    return found


class Findings:
    """The findings of a report, those first that the baseline did not have.

    Args:
        known: cause -> severity of what the baseline allows.
    """

    def __init__(self, report: Report, known: Mapping[str, str]) -> None:
        self.known = known
        self.order = sorted(report["findings"], key=lambda one: not self.is_new(one))  # stable otherwise

    def is_new(self, one: FindingRow) -> bool:
        """Not in the baseline, or more severe than there."""
        old = self.known.get(one["id"])
        return old is None or severity_order(one["severity"]) < severity_order(old)

    def has(self, cause: str) -> bool:
        return any(one["id"] == cause for one in self.order)

    def for_calls(self) -> str | None:
        """The finding for a hook or op that is called too rarely."""
        able = (one for one in self.order if one["stage"] in _CALL_STAGES and one["severity"] != NOTE)
        return next((one["id"] for one in able if _about_calls(one["id"])), None)

    def for_wiring(self, prefer: Iterable[str] = ()) -> str | None:
        """The finding for an engine that is put together otherwise."""
        for cause in prefer:
            if self.has(cause):
                return cause
        return next(
            (o["id"] for o in self.order if o["stage"] == Stage.WIRING and o["severity"] != NOTE), None
        )

    def for_losses(self) -> str | None:
        """The finding for tokens that were not saved."""
        able = (one for one in self.order if one["tokens"] > 0 and one["stage"] is not None)
        return next((one["id"] for one in able), None)

    def for_accounts(self, rises: Mapping[str, float]) -> str | None:
        """The finding for a ledger: the cause of the account that grew most and has one."""
        for account in sorted(rises, key=lambda name: (-rises[name], name)):
            cause = cause_of(account)
            if rises[account] > 0 and cause and self.has(cause):
                return cause
        return None


def _about_calls(ident: str) -> bool:
    """Whether a cause keeps hooks from being called; one that this kvtrace does not know may."""
    cause = CATALOGUE.get(ident)
    return cause is None or cause.about_calls


def explanations(report: Report, causes: Iterable[str | None]) -> dict[str, QuotedFinding]:
    """What the report says of those causes, worst first where it has more than one finding of an id."""
    wanted = set(causes)
    return {
        cause: QuotedFinding(
            cause, one["severity"], one["title"], one["evidence"], one["remedy"], one["docs"]
        )
        for cause, one in worst(report["findings"]).items()
        if cause in wanted
    }
