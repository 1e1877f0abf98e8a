"""A browser, and the synthetic runs, which live beside the ledger's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for folder in ("ledger", "report", "page"):
    there = str(Path(__file__).resolve().parent.parent / folder)
    if there not in sys.path:
        sys.path.insert(0, there)

from browser import Browser, chromium  # noqa: E402


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A real headless Chromium; without one, a line that says what to install."""
    path = chromium()
    if path is None:
        pytest.fail(
            "this test needs Chromium: install it (Debian: apt-get install chromium), or name it in CHROMIUM",
            pytrace=False,
        )
    with Browser(path, tmp_path_factory.mktemp("chromium")) as started:
        yield started
