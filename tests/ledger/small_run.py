"""A small recorded run: what the tests of exports and of the live view read."""

from __future__ import annotations

from pathlib import Path

from synth import Prompt, Rounding, Sim, run_json

from kvtrace.trace.format import Fact


def recorded(folder: Path, tag: int = 7) -> Path:
    """Two ranks of two layers, units of 512: one prompt too short (300), one with a tail (700)."""
    sim = Sim(folder, tp=2, batched=512, tag=tag)
    sim.scheduler.fact(Fact.CLIENT_ID, {"client": "mine", "engine": "cmpl-7f3a-0"})
    sim.serve(
        [Prompt("cmpl-7f3a-0", 300, 11, output=4), Prompt("cmpl-7b00-0", 700, 12, output=1)],
        Rounding(512).policy(),
    )
    sim.write()
    run_json(folder)
    return folder
