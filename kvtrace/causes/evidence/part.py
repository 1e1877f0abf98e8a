"""Which part of each request a finding is about, where it is the same one of all: a fact, no cause."""

from __future__ import annotations

from collections.abc import Iterable

from kvtrace.ledger.intervals import Interval, union
from kvtrace.words import count

PROMPTS, LOADS = "prompts", "loads"
_LEAST = 3
"""Requests: of two it may be chance."""


def part_of_each(lost: Iterable[tuple[Iterable[Interval], Interval]], of: str) -> list[str]:
    """``of each of these loads the last 64 tokens alone``; nothing where it is no such part, or all of some.
    Much leaves out the end of a prompt: of prompts the same first tokens alone are told.

    Args:
        lost: positions of each request, and what they are a part of.
        of: what each of them is, :data:`PROMPTS` or :data:`LOADS`.
    """
    parts = [(union(positions), whole) for positions, whole in lost]
    if len(parts) < _LEAST or any(len(positions) != 1 for positions, _ in parts):
        return []
    first = all(at == start and to < end for [(at, to)], (start, end) in parts)
    last = all(to == end and at > start for [(at, to)], (start, end) in parts)
    if not (first or last):
        return []
    sizes = {to - at for [(at, to)], _ in parts}
    if of == PROMPTS and (last or len(sizes) > 1):
        return []
    where = "first" if first else "last"
    amount = f"{count(sizes.pop())} tokens" if len(sizes) == 1 else "tokens"
    return [f"of each of these {of} the {where} {amount} alone"]
