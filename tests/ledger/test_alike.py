"""Layers that were touched alike are gone through once: what comes of it is what each of them says alone."""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st
from test_slots import cache, compute, resolved
from test_slots_model import METADATA, SETTINGS, Engine

from kvtrace.ledger.slots import alike, resolve
from kvtrace.ledger.slots.reads import Slots
from kvtrace.ledger.slots.touches import Touches


def each_alone(touches: Touches, group: list[int], account: object) -> alike.Classes:
    return alike.classes(touches, range(len(group)), account)  # type: ignore[arg-type]


@SETTINGS
@given(st.data())
def test_alike_layers_resolve_as_each_alone(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        engine = Engine(data.draw, Path(name), data.draw(METADATA), st.booleans())
        engine.run()
        together, _ = resolved(engine.sim)
        with patch.object(resolve, "classes", each_alone):
            alone, _ = resolved(engine.sim)
        assert together == alone


def classes_of(sim: object) -> list[list[int]]:
    """The layers as they are put together."""
    seen: list[list[int]] = []

    def noted(touches: Touches, group: list[int], account: object) -> alike.Classes:
        found = alike.classes(touches, group, account)  # type: ignore[arg-type]
        seen.append([list(columns) for columns in found.columns])
        return found

    with patch.object(resolve, "classes", noted):
        slots: Slots = resolved(sim)[0]  # type: ignore[arg-type]
    assert slots.reads
    (found,) = seen
    return found


def test_layers_read_alike_are_one_class(tmp_path: Path) -> None:
    sim = cache(tmp_path, layers=4)
    for length in (8, 12):
        step = compute(sim, f"r{length}", 0, length)
        for layer in range(4):
            slots = sim.slots(f"r{length}", 0, length - 4 * (layer == 2))
            sim.touch({layer: slots}, t=sim.hook_t[0, step, "save_kv_layer", sim.layer_names[layer]])
    assert classes_of(sim) == [[0, 1, 3], [2]]
