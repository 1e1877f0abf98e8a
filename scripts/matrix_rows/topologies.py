"""Rows: processes, parallelism, schedulers, and connectors in connectors."""

from __future__ import annotations

from matrix_rows.row import Row, generate

PROMPTS = generate("topologies", 64, 160, 96, 256, together=False)
AGAIN = generate("topologies", 64, 160, together=False)
"""Of those the first two once more: they are loaded."""

ROWS: tuple[Row, ...] = (
    Row("in-process", "One process", acts=(PROMPTS, AGAIN), shows=("loaded",)),
    Row("multi-process", "vLLM's own processes", acts=(PROMPTS, AGAIN), how="many", shows=("loaded",)),
)
