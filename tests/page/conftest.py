"""A browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import Browser, chromium


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
