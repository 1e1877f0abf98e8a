"""The two ledgers say the same of a token that the connector was to bring."""

from __future__ import annotations

from collections import Counter

from kvtrace.ledger import Run
from kvtrace.ledger.ends import NOT_LOADED, LoadEnd
from kvtrace.terms import LOADED


def agree(run: Run) -> None:
    """Asserts, request by request, that the ledger of saves counts nothing as loaded or lost in loading that
    the ledger of loads does not."""
    of_saves: dict[int, Counter[LoadEnd]] = {}
    for row in run.base.itertuples():
        if row.outcome in (LOADED, NOT_LOADED):
            of_saves.setdefault(row.request, Counter())[LoadEnd(row.ended)] += row.amount
    of_loads = {row.request: row.ends for row in run.load_rows}
    for number, ends in of_saves.items():
        loads = of_loads.get(number, {})
        # Later admissions are not in the ledger of loads.
        again = run.requests["preemptions"].iloc[number] or number not in of_loads
        for end, amount in ends.items():
            if end is not LoadEnd.LOADED or not again:
                assert amount <= loads.get(end, 0), (number, end, ends, loads)
