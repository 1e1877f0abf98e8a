"""Answers of lookups that count something else than tokens behind what the GPU has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from synth import Prompt, Rounding, Sim

from kvtrace.causes.case import make_case
from kvtrace.causes.evidence.offers import miscounted
from kvtrace.ledger import read_run


@pytest.mark.parametrize(
    ("answers", "local", "said"),
    [
        ([4, 2], 0, "answered 4 where 64 tokens, 4 blocks of 16, are like"),
        ([4, 3], 0, ""),  # not what is alike of the second one
        ([64, 32], 0, ""),
        ([130, 2], 0, ""),  # more than there is, and the GPU has nothing
        ([130, 2], 16, "behind num_computed_tokens, not from the first one on"),
    ],
)
def test_blocks_or_all_from_the_start_are_told(
    tmp_path: Path, answers: list[int], local: int, said: str
) -> None:
    sim = Sim(tmp_path, block=16)
    sim.serve([Prompt("a", 128, digest=1), Prompt("b", 128, digest=2)], Rounding(16).policy())
    sim.write()
    run = read_run(tmp_path)
    rows = [
        replace(row, local=local, answer=answer, alike=alike)
        for row, answer, alike in zip(run.load_rows, answers, (64, 32), strict=True)
    ]
    found = miscounted(make_case(replace(run, load_rows=rows)), rows)
    assert bool(found) == bool(said) and said in "".join(found)
