"""The two ledgers say the same of a token that the connector was to bring."""

from __future__ import annotations

from collections import Counter

from kvtrace.ledger import Run
from kvtrace.ledger.load_model import NOT_LOADED


def agree(run: Run) -> None:
    """Asserts, request by request, that the saves book nothing as loaded or lost in loading that the loads
    do not."""
    of_saves: dict[int, Counter[str]] = {}
    for row in run.base.itertuples():
        of_saves.setdefault(row.request, Counter())[row.account] += row.amount
    of_loads = {row.request: row.accounts for row in run.load_rows}
    for number, accounts in of_saves.items():
        loads = of_loads.get(number, {})
        lost = {name: n for name, n in accounts.items() if name.startswith(NOT_LOADED)}
        for name, amount in lost.items():
            assert amount <= loads.get(name, 0), (number, name, accounts, loads)
        once = not run.requests["preemptions"].iloc[number]  # later admissions are not in the loads' books
        if once and number in of_loads:
            assert accounts["loaded"] <= loads.get("loaded", 0), (number, accounts, loads)
