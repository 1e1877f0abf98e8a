"""Layers with a sliding window of which only the window is saved.

A layer with a window never reads what it has left again, and vLLM gives its blocks back. A connector that
saves a prompt when it is complete finds no more of it there, and who goes on from that prompt needs no more.
What is left out so is not lost; as others may want it, for a shorter beginning of the prompt, it is not saved
either.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtrace.ledger.intervals import Interval, subtract
from kvtrace.ledger.run import Engine, Worker
from kvtrace.ledger.slots.reads import Slots


def windows_of(engine: Engine, worker: Worker) -> dict[int, int]:
    """Index of a worker's KV layer -> tokens of its window, of layers with one."""
    of_layer = {
        layer: group.window for group in engine.token_groups for layer in group.layers if group.window
    }
    return {at: of_layer[name] for at, name in enumerate(worker.kv_layers) if name in of_layer}


def out_of_window(slots: Slots, row: int, column: int, windows: Mapping[int, int]) -> list[Interval]:
    """Positions of a request that nobody read in a layer and that its window had left, where all of the
    window was read. ``row``: of the request."""
    window = windows.get(column)
    read = slots.read_of(row, column) if window else []
    if not window or not read:
        return []
    start, end = read[-1]
    begin = max(0, end - window + 1)
    return subtract([(0, begin)], read) if start <= begin else []
