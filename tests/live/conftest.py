from __future__ import annotations

from pathlib import Path

import pytest
from small_run import recorded


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return recorded(tmp_path / "run")
