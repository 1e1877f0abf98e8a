from __future__ import annotations

import sys
from pathlib import Path

# the synthetic runs that the ledger's tests are made of
LEDGER = Path(__file__).resolve().parents[1] / "ledger"
if str(LEDGER) not in sys.path:
    sys.path.insert(0, str(LEDGER))
