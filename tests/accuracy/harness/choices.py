"""What a deliberate choice (kvgen/designs.py) leaves in the store, and what it takes, from the plan alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvgen.designs import LOSSY
from kvgen.plan import Plan

from harness.engine import Request


def kept(plan: Plan, requests: Sequence[Request], offered: Sequence[int]) -> list[int]:
    """Tokens of each request that are in the store in the end.

    Args:
        offered: of each request, by the plan's unit and its answer to decoding alone.
    """
    unit, limit = plan.unit, plan.limit
    units = [tokens // unit for tokens in offered]
    if plan.filled:
        return [0] * len(requests)
    if plan.design == "first-chunk":
        return [min(tokens, plan.budget // unit * unit) for tokens in offered]
    if plan.design == "minimum-length":
        return [tokens if len(r.prompt) >= limit else 0 for r, tokens in zip(requests, offered, strict=True)]
    if plan.design == "opt-out":
        return [0 if r.opted_out else tokens for r, tokens in zip(requests, offered, strict=True)]
    if plan.design == "head-only":
        return [min(tokens, limit * unit) for tokens in offered]
    if plan.design == "end-left-out":
        return [max(0, len(r.prompt) // unit - limit) * unit for r in requests]
    if plan.design == "time-to-live":
        last = len(plan.rounds) - 1
        return [tokens if r.round == last else 0 for r, tokens in zip(requests, offered, strict=True)]
    if plan.design == "second-use":
        return _used_again(plan, requests)
    if plan.design == "quota" and plan.variant % 2:
        return [tokens if i < limit else 0 for i, tokens in enumerate(offered)]
    if plan.design == "quota":
        return [n * unit for n in _first(limit, units)]
    if plan.design in ("ring", "evicts"):
        return [n * unit for n in reversed(_first(limit, units[::-1]))]
    return list(offered)


def _first(count: int, units: Sequence[int]) -> list[int]:
    """Of each, how many are among the first ``count`` of all."""
    out = []
    for size in units:
        out.append(min(size, count))
        count -= out[-1]
    return out


def _used_again(plan: Plan, requests: Sequence[Request]) -> list[int]:
    keys = [plan.keys.keys(r.prompt, plan.unit, r.hashes, plan.block) for r in requests]
    uses = Counter(key for some in keys for key in some)
    return [sum(uses[key] > 1 for key in some) * plan.unit for some in keys]


def took(plan: Plan, request: Request, computed: int, offered: int, stays: int) -> int:
    """Tokens of a request that the choice keeps out of the store, or (where it is lossy) changes."""
    if not plan.design:
        return 0
    if plan.design in ("large-unit", "whole-blocks"):
        return len(request.prompt) - stays
    if plan.design == "prompt-only":
        return computed - len(request.prompt)
    return stays if plan.design in LOSSY else offered - stays
