"""Recorded runs that grow: a whole one, copied in pieces that end where a block does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# the synthetic runs that the ledger's tests are made of
LEDGER = Path(__file__).resolve().parents[1] / "ledger"
if str(LEDGER) not in sys.path:
    sys.path.insert(0, str(LEDGER))

from synth import Prompt, Rounding, Sim, run_json  # noqa: E402


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two ranks of two layers, units of 512: one prompt too short (300), one with a tail (700)."""
    folder = tmp_path / "run"
    sim = Sim(folder, tp=2, batched=512)
    sim.serve(
        [Prompt("cmpl-7f3a-0", 300, 11, output=4), Prompt("cmpl-7b00-0", 700, 12, output=1)],
        Rounding(512).policy(),
    )
    sim.write()
    run_json(folder)
    return folder
