"""How far KV that a store keeps in fewer bits may be from what was computed, and what is computed on it."""

from __future__ import annotations

import numpy as np
from kvgen.plan import Plan

# pack -> (share of the value itself, share of the largest value of the record)
_STEPS = {
    "int8": (0.0, 0.5 / 127),
    "int8-rows": (0.0, 0.5 / 127),
    "fp8": (1 / 16, 2**-9),
    "bf16": (2**-8, 0.0),
}
_MARGIN = 1.02

TIES = {"int8": 0.4, "int8-rows": 0.4, "fp8": 1.0, "bf16": 0.2}
"""Logits nearer than this are a tie for an answer that was computed on such KV (seen: 0.01 at eight bits,
0.24 at fp8; logits spread by 1.7)."""

DRIFT = {"int8": 1.5, "int8-rows": 1.5, "fp8": 4.0, "bf16": 1.0}
"""Largest difference of KV that was computed on such KV (seen: 0.7 at eight bits). Values spread by 1.7: of
the 256 of another token some differ by more."""

AGAIN = 3
"""How often what was loaded may have been stored anew, each time with an error of its own."""


def bound(plan: Plan, want: np.ndarray, loaded: int | None = None) -> np.ndarray | float:
    """Largest difference of each value of a record that the store's narrower numbers explain.

    Args:
        want: [tokens, ...], as computed.
        loaded: how many of the first of them the request loaded; None: it loaded nothing at all.
    """
    own, most = _STEPS.get(plan.store.pack, (0.0, 0.0))
    if not own and not most:
        return 0.0
    steps = np.asarray((np.abs(want) * own + np.abs(want).max(initial=0.0) * most) * _MARGIN)
    if loaded is not None:
        steps *= AGAIN
        steps[loaded:] += DRIFT[plan.store.pack]
    return steps
