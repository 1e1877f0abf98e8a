"""The tables of a whole run, from its report: requests, ledger, findings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from kvtrace.export.frame import cells, frame, same, shown
from kvtrace.export.tables import FINDINGS, INT, LEDGER, RANK, REQUESTS, TEXT, Table
from kvtrace.report.model import Ledger, Ledgers, Report
from kvtrace.terms import Grade, Stage, cause_of

Row = Mapping[str, Any]


def requests(rows: Iterable[Row]) -> pd.DataFrame:
    """``requests`` from rows as a report has them."""
    return _frame(REQUESTS, rows)


def ledger(report: Report) -> pd.DataFrame:
    """``ledger``: of the run, and of each connector inside another one."""
    found = list(_ledgers(report["ledger"], ""))
    for books in report.get("connectors", ()):
        found += _ledgers(books["ledger"], books["name"])
    return _frame(LEDGER, found)


def _ledgers(both: Ledgers, connector: str) -> Iterator[dict[str, Any]]:
    for name, one in (("saves", both["saves"]), ("loads", both["loads"])):
        for outcome, amount in one["accounts"].items():
            graded = _grades(one, outcome, amount)
            for grade, part in graded.items():
                yield {
                    "ledger": name,
                    "connector": connector,
                    "outcome": outcome.partition(":")[0],
                    "cause": cause_of(outcome),
                    "grade": grade,
                    "token_layers": part,
                    "tokens": one["tokens"].get(outcome, 0) * part / amount if amount else 0.0,
                }


def _grades(one: Ledger, outcome: str, amount: int) -> dict[str, int]:
    """Grade -> token-layers; what no grade is known of stands under an empty one."""
    known = {grade: part for grade, part in one.get("grades", {}).get(outcome, {}).items() if part}
    order = [grade.label for grade in sorted(Grade, reverse=True)]
    found = {grade: known[grade] for grade in order if grade in known}
    rest = amount - sum(found.values())
    return {**found, "": rest} if rest or not found else found


def findings(report: Report) -> pd.DataFrame:
    """``findings``: what was found, then what was ruled out, then what is not observed."""
    found: list[dict[str, Any]] = [
        {
            **one,
            "status": "found",
            "stage": None if one["stage"] is None else Stage(one["stage"]).label,
            "evidence": "; ".join(one["evidence"]),
            "remedy": "; ".join(one["remedy"]),
        }
        for one in report["findings"]
    ]
    for books, name in ((report, ""), *((part, part["name"]) for part in report.get("connectors", ()))):
        rest: Any = books
        for one in rest["ruled_out"]:
            found.append(
                {"status": "ruled out", "id": one["id"], "connector": name, "evidence": one["evidence"]}
            )
        for one in rest["not_observed"]:
            found.append(
                {"status": "not observed", "id": one["id"], "connector": name, "evidence": one["why"]}
            )
    return _frame(FINDINGS, found)


def _frame(table: Table, rows: Iterable[Row]) -> pd.DataFrame:
    """Rows as a frame with the table's columns and types, the rank before them; other fields are left out."""
    held: Sequence[Row] = list(rows)
    values = {}
    for column in table.columns:
        given: list[Any] = [row.get(column.name) for row in held]
        if column.type == TEXT:
            given = [shown(one) if isinstance(one, str) else None for one in given]
        values[column.name] = cells(given, column.type)
    return frame({RANK: same(-1, len(held), INT), **values})


def of_run(name: str, report: Report, rows: Iterable[Row]) -> pd.DataFrame:
    """One of these tables by its name, the rank first."""
    if name == REQUESTS.name:
        return requests(rows)
    return {LEDGER.name: ledger, FINDINGS.name: findings}[name](report)
