"""Lengths of prompts that try a connector, from the engine's sizes."""

from __future__ import annotations

from kvtrace.verify.observed import Facts
from kvtrace.verify.workload import GENERATED

ROOM = 16
"""Tokens of the longest sequence that are left for answers."""


def unit(facts: Facts) -> int:
    """Tokens that a prompt has to have for something of it to come back."""
    return max(facts.unit, facts.block, 1)


def units(facts: Facts, number: int) -> int:
    """So many whole units, or as many as fit."""
    one = unit(facts)
    return one * max(1, min(number, (facts.longest - ROOM) // one))


def usual(facts: Facts) -> int:
    """A few units and a part of one."""
    return min(units(facts, 3) + max(1, facts.block // 2), facts.longest - ROOM)


def fits(facts: Facts, length: int) -> bool:
    return 0 < length <= facts.longest - ROOM - GENERATED


def twice(words: str) -> str:
    """Asked, and asked again."""
    return f"{words} ; {words}"
