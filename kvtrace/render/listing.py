"""The page of ``kvtrace requests``: one request a line."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvtrace.render.page import Code, Column, Facts, Heading, Page, Row, Screen, Table
from kvtrace.words import clean, count, plural

if TYPE_CHECKING:  # the command line imports this file, and shall not load the analysis
    from kvtrace.story.listing import Listing

_NUMBERS = ("prompt", "output", "chunks", "reused", "accepted", "saved", "not saved", "not observed")


SPARE = ("client", "chunks", "output", "accepted", "reused")
"""What a narrow screen does without, the least first."""
_LEAST_ID = 12
"""Characters of an id that always stand."""


def listing_text(listing: Listing, screen: Screen) -> str:
    """The requests as wide as the screen is: ids as far as they tell requests apart, and what numbers fit."""
    from kvtrace.render.terminal import terminal, widest

    text, ids = "", shortest([*listing.ids, *(row["id"] for row in listing.rows)])
    for number in range(len(SPARE) + 1):
        text = terminal(listing_page(listing, ids, SPARE[:number]), screen)
        if widest(text) <= screen.width:
            break
    return text


def shortest(ids: Sequence[str]) -> dict[str, str]:
    """id -> its beginning that no other id shares: ``kvtrace why`` takes it."""
    order = sorted(set(ids))
    longest = dict.fromkeys(order, 0)
    for one, two in itertools.pairwise(order):
        same = next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), len(one))
        longest[one], longest[two] = max(longest[one], same), max(longest[two], same)
    return {one: one[: max(_LEAST_ID, same + 1)] for one, same in longest.items()}


def listing_page(listing: Listing, ids: Mapping[str, str] | None = None, spare: Sequence[str] = ()) -> Page:
    """The requests of a listing, as :func:`requests_table` shows them."""
    return [
        Heading("kvtrace requests", 2, quiet=True),
        Facts(_summary(listing)),
        requests_table(listing.rows, "Requests", ids, spare),
    ]


def requests_table(
    rows: Iterable[Mapping[str, Any]],
    title: str,
    ids: Mapping[str, str] | None = None,
    spare: Sequence[str] = (),
) -> Table:
    """Requests as a report has them, one a line; columns that hold nothing but zeros are left out.

    `ids`: how ids are shown, whole by default; `spare`: columns to do without.
    """
    table = []
    for row in rows:
        lost, whole = row["not_saved"], left_to_save(row)
        base = f" of {count(whole)}" if whole else ""
        client = "" if row["client"] in (None, row["id"]) else clean(row["client"], 40)
        numbers = [count(row[field]) for field in ("prompt", "output", "chunks", "local", "external")]
        saved = with_grade(row["saved"], row.get("grade"), row.get("sent", 0))
        unseen = count(row.get("not_observed", 0))
        numbers += [saved, f"{count(lost)}{base}", unseen]
        name = clean(row["id"] if ids is None else ids[row["id"]], 60)
        table.append((name, client, *numbers, clean(row["verdict"], 60)))
    columns = (
        Column("request"),
        Column("client"),
        *(Column(name, True) for name in _NUMBERS),
        Column("verdict"),
    )
    idle = [at for at in range(len(columns)) if all(row[at] in ("", "0") for row in table)]
    idle += [at for at, column in enumerate(columns) if column.head in spare]
    cells = [tuple("" if at in idle else cell for at, cell in enumerate(row)) for row in table]
    return Table(columns, [Row((Code(row[0]), *row[1:])) for row in cells], title)


def with_grade(saved: float, grade: str | None, sent: float = 0) -> str:
    """``512 written, 128 sent``: tokens that were saved, how well that is seen, and how many of them were
    only seen leaving for a peer."""
    if not saved or not grade:
        return count(saved)
    said = f"{count(saved)} {clean(grade, 20)}"
    if not sent:
        return said
    return f"{said}, {'all' if sent >= saved else count(sent)} sent"


def left_to_save(row: Mapping[str, Any]) -> float:
    """The tokens of a request that were neither reused nor loaded: the base of those not saved."""
    return float(row["saved"] + row["not_saved"] + row.get("not_observed", 0))


def _summary(listing: Listing) -> list[str]:
    shown, fit, total = len(listing.rows), listing.fit, listing.total
    parts = [f"{count(shown)} of {plural(fit, 'request')}" if shown < fit else plural(fit, "request")]
    if listing.verdict is not None:
        parts[0] += f" with verdict {clean(listing.verdict, 80)}, of {count(total)}"
    if listing.known < total:
        parts.append(
            f"the report lists {count(listing.known)} of {count(total)}: give the run directory for all"
        )
    if fit == 0 and listing.verdicts:
        there = ", ".join(f"{clean(name, 80)} ({count(n)})" for name, n in listing.verdicts.items())
        parts.append(f"there are: {there}")
    return parts
