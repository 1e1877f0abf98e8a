from __future__ import annotations

import sys
from pathlib import Path

import pytest

# the synthetic runs that the ledger's tests are made of
LEDGER = Path(__file__).resolve().parents[1] / "ledger"
if str(LEDGER) not in sys.path:
    sys.path.insert(0, str(LEDGER))

from small_run import recorded  # noqa: E402


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return recorded(tmp_path / "run")
