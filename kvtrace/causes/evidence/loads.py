"""What the rules about loads have in common: their requests, tokens and events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvtrace.causes.case import MAX_EVENTS, Case
from kvtrace.causes.cause import Cause
from kvtrace.causes.diagnosis import Event, Fields, Finding
from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.loads.outcome import LoadOf, Place
from kvtrace.ledger.loads.seen import ELSEWHERE
from kvtrace.ledger.whole import of_load
from kvtrace.words import count, listed, plural

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MOST_REASONS = 4


def lost_by(row: LoadOf, cause: Cause) -> int:
    """Token-layers of a request that this cause took, 0 where it took none."""
    return sum(row.ends.get(end, 0) for end in cause.load_ends)


def places_of(row: LoadOf, cause: Cause) -> list[Place]:
    """A few (rank, layer) pairs in which a request lost tokens by this cause."""
    return [place for end in cause.load_ends for place in row.places.get(end, ())]


def missed_elsewhere(case: Case) -> list[LoadOf]:
    """Lookups that found nothing of a prompt that begins like an earlier one of another engine. Whether
    these engines have one store, and the same keys in it, is not compared."""
    return [
        row
        for row in case.run.load_rows
        if row.answer == 0 and row.local < case.elsewhere.get(row.request, 0)
    ]


NOT_COMPARED = (
    "{lookups} found nothing of a prompt that begins like an earlier one of another engine: whether these "
    "engines share a store, and its keys, is not compared (vLLM's own keys may differ by engine where "
    "PYTHONHASHSEED is not set)"
)


def affected(case: Case, cause: Cause) -> list[LoadOf]:
    """The requests that lost tokens by this cause."""
    return [row for row in case.run.load_rows if lost_by(row, cause)]


def tokens(case: Case, rows: Iterable[LoadOf], cause: Cause) -> int:
    """Tokens that these requests lost by this cause."""
    return sum(
        whole
        for row in rows
        for end, whole in of_load(row, case.engines[row.engine].pairs).items()
        if end in cause.load_ends
    )


def accepted(case: Case) -> list[LoadOf]:
    """The requests of which the scheduler accepted tokens from the connector."""
    return [row for row in case.run.load_rows if row.accepted > 0]


def came(case: Case, row: LoadOf) -> bool:
    """Whether all that the scheduler accepted came into all layers."""
    return row.ends.get(LoadEnd.LOADED, 0) >= row.accepted * case.engines[row.engine].pairs


def windows(case: Case, rows: Iterable[LoadOf]) -> str:
    """What to say of layers that need only what lies in their window; "" there are none."""
    engines = {row.engine for row in rows}
    windowed = any(group.window for tag in engines for group in case.engines[tag].token_groups)
    return "; of layers with a window what it holds" if windowed else ""


def finding(case: Case, cause: Cause, title: str, **given: Unpack[Fields]) -> Finding:
    """A finding with the numbers of the ledger of loads, where none are given."""
    rows = affected(case, cause)
    lost = given["tokens"] if "tokens" in given else tokens(case, rows, cause)
    total = case.run.loads.total_tokens
    values: Fields = {
        "tokens": lost,
        "share": min(1.0, lost / total) if total else 0.0,
        "requests": len(rows),
        "events": events(case, rows, cause),
        "grade": min(
            (g for end in cause.load_ends for g in case.run.loads.grades.get(end, ())), default=None
        ),
        **given,
    }
    return case.finding(cause, title, **values)


def events(case: Case, rows: Iterable[LoadOf], cause: Cause) -> list[Event]:
    """The largest losses first, with a pair where one is known."""
    found = []
    for row in sorted(rows, key=lambda row: -lost_by(row, cause))[:MAX_EVENTS]:
        places = places_of(row, cause)
        rank, layer = places[0] if places else (None, None)
        text = (
            f"{count(tokens(case, [row], cause))} of {count(row.prompt)} prompt tokens; lookup: "
            f"{count(row.local)} local, "
            f"{'no answer' if row.answer is None else f'{count(row.offered)} offered'}, "
            f"{count(row.accepted)} accepted"
        )
        found.append(Event(row.id, row.step, text, rank=rank, layer=layer))
    return found


def reasons(rows: Iterable[LoadOf], cause: Cause) -> list[str]:
    """What was seen, each once, with how many requests it concerns."""
    seen: dict[str, int] = {}
    for row in rows:
        for reason in (reason for end in cause.load_ends for reason in row.reasons.get(end, ())):
            seen[reason] = seen.get(reason, 0) + 1
    ordered = sorted(seen.items(), key=lambda item: -item[1])
    return [f"{reason} ({plural(n, 'request')})" for reason, n in ordered[:_MOST_REASONS]]


_OTHERS = (
    "Compare the blocks that the load hooks write with those that the scheduler gave the request (block ids, "
    "not their places in the table; in a type that is wide enough): other requests' were written."
)


def remedy(rows: Iterable[LoadOf], cause: Cause, of_cause: Sequence[str] = ()) -> list[str]:
    """Of what was not written; where other slots were, that first. ``of_cause``: in place of the cause's."""
    others = any(
        ELSEWHERE in reason for row in rows for end in cause.load_ends for reason in row.reasons.get(end, ())
    )
    return [*([_OTHERS] if others else []), *(of_cause or [cause.remedy])]


def reasons_and_places(rows: list[LoadOf], cause: Cause) -> list[str]:
    """:func:`reasons`, and then in which pairs: ``in 8 layers on rank 0, 1``."""
    places = {place for row in rows for place in places_of(row, cause)}
    found = reasons(rows, cause)
    if places:
        layers = len({layer for _, layer in places})
        ranks = listed(map(str, sorted({rank for rank, _ in places})))
        found.append(f"in {plural(layers, 'layer')} on rank {ranks}")
    return found
