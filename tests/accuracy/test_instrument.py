"""The instrument works end to end: generated connectors on a real engine, with their truth and a score.

The fixed set must be right as a whole. It was looked at, and proves little: a release is measured on fresh
seeds (CONTRIBUTING.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import accuracy
import declared
import pytest
import score
from side_by_side import Place, Ran, Script

# One of each kind of role, store, thread and effect.
FIXED = [
    (1000, ""), (1008, ""), (1016, ""), (1076, "reads-only"), (1052, "writes-only"), (1111, "takes-less"),
    (1081, "put-swallowed-in-thread"), (1199, "half-zeroed"), (1078, "into-a-copy"), (1021, "never-told"),
]  # fmt: skip


RUNS = [accuracy.Run(seed, fault) for seed, fault in FIXED]


def measured(place: Place) -> list[accuracy.Result]:
    return list(accuracy.Measure(place.folder, keep=True).all(RUNS, 1))


SCRIPTS = (measured,)


@pytest.mark.engine
def test_the_instrument_works(ran: Mapping[Script, Ran]) -> None:
    results, folder = ran[measured].done, ran[measured].place.folder
    assert [result.run for result in results] == RUNS
    assert [accuracy.line(result) for result in results if result.unproven] == []
    scores = [result.scored for result in results if result.scored is not None]
    assert len(scores) == len(FIXED)
    for one in scores:
        name = f"{one.seed}-{one.fault or one.choice or 'healthy'}"
        truth = json.loads((folder / name / "outcome.json").read_text(encoding="utf-8"))["truth"]
        at_rest = sum(request["at_rest"] for request in truth["requests"])
        expected = sum(request["expected"] for request in truth["requests"])
        if one.fault in ("", "never-told"):
            assert at_rest == expected
        else:
            assert at_rest < expected or one.fault == "into-a-copy"
        assert one.total > 0, f"{name}: nothing was traced"
        shape, counts, misread = declared.count(folder / name)
        assert not counts["wrong"] + counts["missed"], f"{name} {shape}: {misread}"
    print("\n".join(score.table(scores)), score.last_line(scores), sep="\n")
    odd = [one for one in scores if one.verdict != score.RIGHT or one.wrong_number or one.ruled_out]
    assert odd == []
