"""What kvtrace read of a metadata is compared with what was put there, entry by entry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import declared
import pytest
from declared import Build

ROWS = [[10, "put", "a", 0, 64], [11, "put", "a", 64, 96], [12, "get", "b", 0, 32], [25, "put", "b", 32, 64]]


def answers(monkeypatch: pytest.MonkeyPatch, *builds: Build) -> list[tuple[str, str, str]]:
    monkeypatch.setattr(declared, "builds", lambda _: (list(builds), []))
    document: dict[str, Any] = {"rows": ROWS}
    return [(one.way, one.request, one.answer) for one in declared.answers(document, Path())]


def build(t0: int, t1: int, said: Any, unreadable: bool = False) -> Build:
    return Build(t0, t1, t0, unreadable, said)


def test_entries_are_the_same_however_they_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(9, 13, {("put", "a"): [(0, 32), (32, 96)], ("get", "b"): [(0, 32)]})
    assert answers(monkeypatch, first, build(20, 30, {("put", "b"): [(32, 64)]})) == [
        ("put", "a", "exact"), ("get", "b", "exact"), ("put", "b", "exact"),
    ]  # fmt: skip


def test_what_is_not_understood_is_no_misreading(monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(9, 13, {("put", "a"): [None], ("get", "b"): [(0, 32)]})
    assert answers(monkeypatch, first, build(20, 30, {}, unreadable=True)) == [
        ("put", "a", "unreadable"), ("get", "b", "exact"), ("put", "b", "unreadable"),
    ]  # fmt: skip


def test_what_is_misread_or_missed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(9, 13, {("put", "a"): [(0, 64)], ("get", "c"): [(0, 32)]})
    assert answers(monkeypatch, first, build(20, 30, {})) == [
        ("put", "a", "wrong"), ("get", "b", "missed"), ("get", "c", "wrong"), ("put", "b", "missed"),
    ]  # fmt: skip
