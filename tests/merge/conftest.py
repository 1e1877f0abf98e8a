"""Synthetic runs of two engines that hand requests over."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "ledger"))
