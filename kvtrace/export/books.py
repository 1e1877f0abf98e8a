"""The tables of a whole run, from its report: requests, ledger, findings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from kvtrace.export.frame import cells, frame, same, shown
from kvtrace.export.tables import INT, LEDGER, RANK, REQUESTS, TEXT, TableSpec
from kvtrace.report.model import LedgerRow, Ledgers, Report
from kvtrace.terms import Stage, cause_of

Row = Mapping[str, Any]


def of_run(table: TableSpec, report: Report, requests: Iterable[Row]) -> pd.DataFrame:
    """One of these tables, the rank first. `requests`: the rows of its requests, as a report has them."""
    if table is REQUESTS:
        return _frame(table, requests)
    return _frame(table, _ledger(report) if table is LEDGER else _findings(report))


def _ledger(report: Report) -> Iterator[Row]:
    """Of the run, and of each connector inside another one."""
    yield from _ledgers(report["ledger"], "")
    for books in report.get("connectors", ()):
        yield from _ledgers(books["ledger"], books["name"])


def _ledgers(both: Ledgers, connector: str) -> Iterator[Row]:
    for name, one in (("saves", both["saves"]), ("loads", both["loads"])):
        for outcome, amount in one["accounts"].items():
            for grade, part in _grades(one, outcome, amount).items():
                yield {
                    "ledger": name,
                    "connector": connector,
                    "outcome": outcome.partition(":")[0],
                    "cause": cause_of(outcome),
                    "grade": grade,
                    "token_layers": part,
                    "tokens": one["tokens"].get(outcome, 0) * part / amount if amount else 0.0,
                }


def _grades(one: LedgerRow, outcome: str, amount: int) -> dict[str, int]:
    """Grade -> token-layers, the best first; what no grade is known of stands under an empty one."""
    found = {grade: part for grade, part in one.get("grades", {}).get(outcome, {}).items() if part}
    rest = amount - sum(found.values())
    return {**found, "": rest} if rest or not found else found


def _findings(report: Report) -> Iterator[Row]:
    """What was found, then what was ruled out, then what is not observed."""
    for one in report["findings"]:
        yield {
            **one,
            "status": "found",
            "stage": None if one["stage"] is None else Stage(one["stage"]).label,
            "evidence": "; ".join(one["evidence"]),
            "remedy": "; ".join(one["remedy"]),
        }
    for books, name in ((report, ""), *((part, part["name"]) for part in report.get("connectors", ()))):
        said = [("ruled out", one["id"], one["evidence"]) for one in books["ruled_out"]]
        said += [("not observed", one["id"], one["why"]) for one in books["not_observed"]]
        for status, cause, evidence in said:
            yield {"status": status, "id": cause, "connector": name, "evidence": evidence}


def _frame(table: TableSpec, rows: Iterable[Row]) -> pd.DataFrame:
    """Rows as a frame with the table's columns and types, the rank before them; other fields are left out."""
    held: Sequence[Row] = list(rows)
    values = {}
    for column in table.columns:
        given: list[Any] = [row.get(column.name) for row in held]
        if column.type == TEXT:
            given = [shown(one) if isinstance(one, str) else None for one in given]
        values[column.name] = cells(given, column.type)
    return frame({RANK: same(-1, len(held), INT), **values})
