"""Saves of layers with a sliding window, of which a connector may keep the window alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from synth import Sim
from test_positions import BLOCK, SAVED, by_pair, cache, entry, prefill

from kvtrace.report.build import build_report
from kvtrace.trace.format import Flag

FIRST = int(Flag.FIRST)

LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(2)]
WINDOW = 2 * BLOCK


def windowed(tmp_path: Path, window: int | None = WINDOW) -> Sim:
    """The second layer has a window."""
    told = [
        {"kind": "FullAttentionSpec", "block_size": BLOCK, "layers": LAYERS[:1]},
        {"kind": "SlidingWindowSpec", "block_size": BLOCK, "layers": LAYERS[1:], "window": window},
    ]
    return cache(tmp_path, groups=[(BLOCK, [0]), (BLOCK, [1])], engine_facts={"kv_groups": told})


def saved(sim: Sim, start: int, end: int) -> Sim:
    """A prompt of 128 tokens: all of it of the first layer, of the other one [start, end)."""
    prefill(sim, "a", 0, 128, [entry("a", 0, 128)])
    sim.read("a", 0, 128, layers=[0])
    sim.read("a", start, end, layers=[1])
    sim.finish("a", 128)
    return sim


def test_a_connector_that_keeps_the_window_alone_lost_nothing(tmp_path: Path) -> None:
    sim = saved(windowed(tmp_path), 96, 128)
    first, second = by_pair(sim)
    assert first == {(0, 128): SAVED}
    assert second == {(0, 96): "not-observed NOT_OBSERVED", (96, 128): SAVED}
    assert not build_report(tmp_path)["findings"]


def test_what_is_missing_in_a_window_is_lost(tmp_path: Path) -> None:
    """... and so is all before it: this is no connector that keeps the window."""
    _, second = by_pair(saved(windowed(tmp_path), 112, 128))
    assert second == {(0, 112): "PART_READ READ", (112, 128): SAVED}


@pytest.mark.parametrize("start", [0, 64])
def test_what_a_window_had_left_and_was_saved_is_saved(tmp_path: Path, start: int) -> None:
    _, second = by_pair(saved(windowed(tmp_path), start, 128))
    assert second[start, 128] == SAVED


def test_a_layer_without_a_window_has_lost_what_was_not_read(tmp_path: Path) -> None:
    _, second = by_pair(saved(windowed(tmp_path, None), 96, 128))
    assert second == {(0, 96): "PART_READ READ", (96, 128): SAVED}
