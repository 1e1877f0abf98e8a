"""The two ledgers say the same of a token that the connector was to bring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kvtrace.causes import Diagnosis, diagnose
from kvtrace.causes.cause import LOADS
from kvtrace.causes.registry import CATALOGUE
from kvtrace.ledger import Run, read_run
from kvtrace.ledger.ends import NOT_LOADED, LoadEnd
from kvtrace.terms import LOADED


def agree(run: Run) -> None:
    """Asserts, request by request, that the ledger of saves counts nothing as loaded or lost in loading that
    the ledger of loads does not."""
    of_saves: dict[int, Counter[LoadEnd]] = {}
    for row in run.base:
        if row.outcome in (LOADED, NOT_LOADED):
            of_saves.setdefault(row.request, Counter())[LoadEnd(row.ended)] += row.amount
    of_loads = {row.request: row.ends for row in run.load_rows}
    for number, ends in of_saves.items():
        loads = of_loads.get(number, {})
        # Later admissions are not in the ledger of loads.
        again = run.requests[number].preemptions or number not in of_loads
        for end, amount in ends.items():
            if end is not LoadEnd.LOADED or not again:
                assert amount <= loads.get(end, 0), (number, end, ends, loads)


def balanced(folder: Path, watch: Sequence[str] = ()) -> tuple[Run, Diagnosis]:
    """A run and its diagnosis; asserts what is true of the ledgers of every run."""
    run = read_run(folder, watch=watch)
    diagnosis = diagnose(run)
    run.loads.check()
    for book in (diagnosis.saves, diagnosis.loads):
        book.check()
        assert abs(sum(book.tokens.values()) - book.total_tokens) < 1e-6 * max(1, book.total_tokens)
    agree(run)
    explained = sum(one.tokens for one in diagnosis.findings if CATALOGUE[one.id].ledger != LOADS)
    lost = sum(amount for name, amount in diagnosis.saves.tokens.items() if name.startswith("not-saved:"))
    assert abs(explained - lost) < 1e-6 * max(1, lost), "findings of the saves count exactly what is lost"
    return run, diagnosis
