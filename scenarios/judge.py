"""Compares a report with what its scenario expects."""

from __future__ import annotations

from typing import Any

from spec import Scenario

from kvtrace.causes.registry import CATALOGUE

TIMED = tuple(cause.id for cause in CATALOGUE.values() if cause.timed)
"""Notes about time: on a busy machine any run may show one."""


def judge(scenario: Scenario, report: dict[str, Any]) -> list[str]:
    """Differences between a ``kvtrace.report/2`` and the scenario's expectations, one line each."""
    expect = scenario.expect
    found = [finding["id"] for finding in report["findings"]]
    faults = [finding["id"] for finding in report["findings"] if finding["severity"] == "fault"]
    wrong: list[str] = []

    if expect.first is None:
        if faults:
            wrong.append(f"a healthy run with faults: {', '.join(faults)}")
    elif not found:
        wrong.append(f"no finding; expected {expect.first}")
    else:
        first = report["findings"][0]
        if first["id"] != expect.first:
            wrong.append(f"first finding {first['id']}; expected {expect.first} (all: {', '.join(found)})")
        elif expect.severity is not None and first["severity"] != expect.severity:
            wrong.append(f"{first['id']} is a {first['severity']}; expected a {expect.severity}")
        text = " ".join([first["title"], *first["evidence"], *first["remedy"]])
        for words in expect.evidence:
            if words not in text:
                wrong.append(f"{first['id']} does not say {words!r}: {text}")
    for cause in found:
        if cause in expect.absent:
            wrong.append(f"finding {cause} must not show here")
        elif cause != expect.first and cause not in expect.allowed and cause not in TIMED:
            wrong.append(f"unexpected finding {cause}")

    ruled_out = {item["id"]: item["evidence"] for item in report["ruled_out"]}
    for cause in expect.ruled_out:
        if not ruled_out.get(cause, "").strip():
            wrong.append(f"{cause} is not ruled out with evidence")
    for cause in sorted(set(found) & set(ruled_out)):
        wrong.append(f"{cause} is both found and ruled out")

    wrong += _judge_book(report["ledger"]["saves"], "saves", expect.saves, expect.total)
    wrong += _judge_book(report["ledger"]["loads"], "loads", expect.loads, None)
    return wrong


def _judge_book(book: dict[str, Any], name: str, accounts: dict[str, int], total: int | None) -> list[str]:
    wrong = []
    have: dict[str, int] = book["accounts"]
    if sum(have.values()) != book["total"]:
        wrong.append(f"{name}: accounts sum to {sum(have.values())}, total {book['total']}")
    pairs = book["pairs"]
    if pairs is None:
        if total or any(accounts.values()):
            wrong.append(f"{name}: number of pairs unknown")
        return wrong
    shown = {account: count / pairs for account, count in have.items()}
    if total is not None and book["total"] != total * pairs:
        wrong.append(f"{name}: total {book['total'] / pairs:g} tokens; expected {total} ({shown})")
    for account, tokens in accounts.items():
        if have.get(account, 0) != tokens * pairs:
            got = have.get(account, 0) / pairs
            wrong.append(f"{name}: {got:g} tokens {account}; expected {tokens} ({shown})")
    return wrong
