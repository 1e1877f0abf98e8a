"""What the rules about loads have in common: requests by account, tokens, events."""

from __future__ import annotations

from collections.abc import Iterable

from kvtrace.causes.case import MAX_EVENTS, Case
from kvtrace.causes.cause import Cause
from kvtrace.causes.model import Event, Finding
from kvtrace.ledger.load_model import NOT_LOADED, LoadOf
from kvtrace.words import count, listed, plural


def with_account(case: Case, account: str) -> list[LoadOf]:
    """The requests that have tokens on an account of the loads."""
    return [row for row in case.run.load_rows if row.accounts.get(account)]


def not_loaded(case: Case, cause: str) -> list[LoadOf]:
    return with_account(case, NOT_LOADED + cause)


def tokens_of(case: Case, row: LoadOf, account: str) -> float:
    return row.accounts.get(account, 0) / max(1, case.engines[row.engine].pairs)


def accepted(case: Case) -> list[LoadOf]:
    """The requests of which the scheduler accepted tokens from the connector."""
    return [row for row in case.run.load_rows if row.accepted > 0]


def finding(case: Case, cause: Cause, account: str, title: str, **more: object) -> Finding:
    """A finding with the numbers of the ledger of loads."""
    rows = with_account(case, account)
    tokens = sum(tokens_of(case, row, account) for row in rows)
    total = case.run.loads.total_tokens
    values: dict[str, object] = {
        "tokens": tokens,
        "share": min(1.0, tokens / total) if total else 0.0,
        "requests": len(rows),
        "events": events(case, rows, account),
        **more,
    }
    return case.finding(cause, title, **values)


def events(case: Case, rows: Iterable[LoadOf], account: str, text: str = "") -> list[Event]:
    """The largest amounts first, with a pair where one is known."""
    cause = account.rpartition(":")[2]
    found = []
    for row in sorted(rows, key=lambda row: -row.accounts.get(account, 0))[:MAX_EVENTS]:
        places = row.places.get(cause, [])
        rank, layer = places[0] if places else (None, None)
        amount = tokens_of(case, row, account)
        said = text or (
            f"{count(amount)} of {count(row.prompt)} prompt tokens; lookup: {count(row.local)} local, "
            f"{'no answer' if row.answer is None else f'{count(row.offered)} offered'}, "
            f"{count(row.accepted)} accepted"
        )
        found.append(Event(row.id, row.step, said, rank=rank, layer=layer))
    return found


def reasons(rows: Iterable[LoadOf], cause: str, most: int = 4) -> list[str]:
    """What was seen, each once, with how many requests it concerns."""
    seen: dict[str, int] = {}
    for row in rows:
        for reason in row.reasons.get(cause, ()):
            seen[reason] = seen.get(reason, 0) + 1
    ordered = sorted(seen.items(), key=lambda item: -item[1])
    return [f"{reason} ({plural(n, 'request')})" for reason, n in ordered[:most]]


def seen(rows: list[LoadOf], cause: str) -> list[str]:
    """The evidence: what was seen, and in which pairs."""
    place = where(rows, cause)
    return [*reasons(rows, cause), *([f"in {place}"] if place else [])]


def where(rows: Iterable[LoadOf], cause: str) -> str:
    """``8 layers on rank 0, 1``, "" where no pair is known."""
    places = {place for row in rows for place in row.places.get(cause, ())}
    if not places:
        return ""
    ranks = sorted({rank for rank, _ in places})
    layers = len({layer for _, layer in places})
    return f"{plural(layers, 'layer')} on rank {listed(map(str, ranks))}"
