"""The synthetic runs live beside the ledger's tests."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = str(Path(__file__).resolve().parent.parent / "ledger")
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)
