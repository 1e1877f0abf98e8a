"""Synthetic runs from the ledger's tests, random damage from the report's."""

from __future__ import annotations

import sys
from pathlib import Path

for name in ("ledger", "report"):
    folder = str(Path(__file__).resolve().parent.parent / name)
    if folder not in sys.path:
        sys.path.insert(0, folder)
