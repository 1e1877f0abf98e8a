"""What came of a row, from the outcomes and reports of its runs. No engine, no files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvtrace.trace import hooks
from matrix_rows.row import Connector, Row

Report = Mapping[str, Any]
Outcome = Mapping[str, Any]
DUE = frozenset(hook.name for hook in hooks.TABLE if hook.always_due)
"""Hooks that every step, or every layer of one, must call; the others come when there is need."""
RESTING = ("proved", "written")
"""Grades that say that it came to rest."""


@dataclass
class Of:
    """One kind of runs of a row, untraced and traced.

    Attributes:
        error: why it did not run: untraced where ``traced_error`` is "".
        equal: traced gave the tokens of untraced.
        seen, due: calls of the connector's hooks, those seen of those due.
        missing: ``hook seen/due`` of each with fewer.
        balanced: the accounts of both books sum to their totals.
        first: id of the first finding; "none".
        faults: ids of all findings of severity fault.
        grades: token-layers called saved, by grade.
        rest: rows (tokens of a layer and rank) in the store at the end; None where the row says that they are
            not comparable.
        states: the accounts of the book of states that were saved, their "total", and "at rest" those in the
            store; None of a model without any.
        proofs: what the row must show, and what the report says of it ("": not shown).
    """

    error: str = ""
    traced_error: str = ""
    equal: bool | None = None
    seen: int = 0
    due: int = 0
    missing: list[str] = field(default_factory=list)
    balanced: bool | None = None
    first: str = "none"
    faults: list[str] = field(default_factory=list)
    grades: dict[str, int] = field(default_factory=dict)
    rest: int | None = None
    states: dict[str, int] | None = None
    proofs: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    @property
    def ran(self) -> bool:
        return not self.error and not self.traced_error

    def document(self) -> dict[str, Any]:
        return asdict(self)


def of_kind(
    row: Row, connector: Connector, untraced: Outcome, traced: Outcome, report: Report | None, states: int = 0
) -> Of:
    """What came of a row with one connector. ``report`` is None where there is none; ``states``: that lie in
    the store of the traced run."""
    found = Of(error=untraced["error"], traced_error="" if untraced["error"] else traced["error"])
    if found.error:
        return found
    if report is None or found.traced_error:
        found.wrong.append(f"ran untraced, and not traced: {found.traced_error or 'no report'}")
        return found
    found.equal = untraced["answers"] == traced["answers"]
    _take_hooks(found, report)
    _take_books(found, report)
    found.first = report["findings"][0]["id"] if report["findings"] else "none"
    found.faults = [finding["id"] for finding in report["findings"] if finding["severity"] == "fault"]
    if (book := report["ledger"].get("states")) is not None:
        found.states = {**book["saves"]["accounts"], "total": book["saves"]["total"], "at rest": states}
    if row.at_rest and connector.at_rest:
        found.rest = traced["rows"]
    found.wrong += list(_differences(found, connector))
    return found


def _take_hooks(found: Of, report: Report) -> None:
    rows = [one for one in report["coverage"]["summary"] if one["eligible"] and one["hook"] in DUE]
    found.seen = sum(one["fired"] for one in rows)
    found.due = sum(one["eligible"] for one in rows)
    found.missing = [
        f"{one['hook']} {one['fired']}/{one['eligible']}" for one in rows if one["fired"] != one["eligible"]
    ]


def _take_books(found: Of, report: Report) -> None:
    books = report["ledger"]
    states = books.get("states", {"saves": books["saves"], "loads": books["loads"]})
    found.balanced = all(
        sum(book["accounts"].values()) == book["total"]
        for book in (books["saves"], books["loads"], states["saves"], states["loads"])
    )
    saved = books["saves"].get("grades", {}).get("saved")
    found.grades = dict(saved if saved is not None else {"read": books["saves"]["accounts"].get("saved", 0)})


def numbers(grades: Mapping[str, int], rest: int | None) -> str:
    """What is called saved against what is at rest: no more may be proved or written, and no less seen."""
    if rest is None:
        return "not compared"
    resting = sum(grades.get(grade, 0) for grade in RESTING)
    every = sum(grades.values())
    if resting > rest:
        return "too many"
    if every < rest:
        return "fewer"
    return "right" if every == rest else "read, and not at rest"


def state_numbers(states: Mapping[str, int]) -> str:
    """What is called taken of states against what is at rest, of a connector that stores all that it takes:
    nothing at rest may be called not taken."""
    rest, taken = states["at rest"], states.get("taken", 0)
    if rest > states["total"] - states.get("not-taken", 0):
        return "fewer"
    return "right" if taken == rest else "not observed" if taken < rest else "too many"


def _differences(found: Of, connector: Connector) -> list[str]:
    wrong = []
    if not found.equal:
        wrong.append("tokens differ")
    if not found.due:
        wrong.append("no hook was due")
    if found.missing:
        wrong.append(f"hooks missing: {', '.join(found.missing)}")
    if not found.balanced:
        wrong.append("a ledger that does not balance")
    if not connector.first and found.faults:
        wrong.append(f"a fault on a healthy run: {', '.join(found.faults)}")
    if connector.first and found.first not in connector.first:
        wrong.append(f"first finding {found.first}, not {' or '.join(sorted(connector.first))}")
    if (number := numbers(found.grades, found.rest)) in ("too many", "fewer"):
        said = ", ".join(f"{count} {grade}" for grade, count in found.grades.items()) or "0"
        wrong.append(f"{number} called saved: {said}; at rest {found.rest}")
    if found.states is not None and (number := state_numbers(found.states)) in ("too many", "fewer"):
        wrong.append(f"{number} states called taken: {found.states}")
    return wrong


def of_row(row: Row, kinds: Mapping[str, Of]) -> dict[str, Any]:
    """The row as it is kept in ``reports/matrix/SECTION.json``."""
    healthy = kinds["healthy"]
    cannot = healthy.error
    wrong = [f"{kind}: {line}" for kind, one in kinds.items() for line in one.wrong]
    if not cannot:
        wrong += [f"{kind}: did not run: {one.error}" for kind, one in kinds.items() if one.error]
        wrong += [f"not shown: {name}" for name, what in healthy.proofs.items() if not what]
    return {
        "name": row.name,
        "title": row.title,
        "how": row.how,
        "note": row.note,
        "cannot": cannot,
        "wrong": wrong,
        "connectors": {kind: row.connector(kind).name for kind in kinds},
        "kinds": {kind: one.document() for kind, one in kinds.items()},
    }
