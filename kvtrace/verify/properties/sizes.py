"""Lengths of prompts that try a connector, from the engine's sizes."""

from __future__ import annotations

from kvtrace.verify.observed import EngineFacts
from kvtrace.verify.workload import GENERATED

ROOM = 16
"""Tokens of the longest sequence that are left for answers."""


def unit(facts: EngineFacts) -> int:
    """Tokens that a prompt has to have for something of it to come back."""
    return max(facts.unit, facts.block, 1)


def units(facts: EngineFacts, number: int) -> int:
    """So many whole units, or as many as fit."""
    one = unit(facts)
    return one * max(1, min(number, (facts.longest - ROOM) // one))


def usual(facts: EngineFacts) -> int:
    """A few units and a part of one."""
    return min(units(facts, 3) + max(1, facts.block // 2), facts.longest - ROOM)


def fits(facts: EngineFacts, length: int) -> bool:
    return 0 < length <= facts.longest - ROOM - GENERATED


def twice(words: str) -> str:
    """Asked, and asked again."""
    return f"{words} ; {words}"
