"""Whether a connector's metadata leaves open which calls had anything to store or load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrace.terms import LOADED, NOT_OBSERVED, SAVED

if TYPE_CHECKING:
    from kvtrace.report.model import Report

_MUTE = ("connector-metadata", "store-entries")
"""Ids of what is not observed where the connector's metadata names no stores, and that says nothing."""


def may_hide_work(report: Report) -> bool:
    """Whether a call without work that could be seen may have had some: the metadata names none, and tokens
    were saved or loaded all the same, or it is not observed whether they were; or tokens were saved though no
    save hook was seen to do anything."""
    saves, loads = report["ledger"]["saves"]["accounts"], report["ledger"]["loads"]["accounts"]
    if any(one["id"] in _MUTE for one in report["not_observed"]):
        return any(
            accounts.get(name) for accounts in (saves, loads) for name in (SAVED, LOADED, NOT_OBSERVED)
        )
    works = any(row["with_work"] for row in report["coverage"]["hooks"] if "save" in row["hook"])
    return bool(saves.get(SAVED)) and not works
