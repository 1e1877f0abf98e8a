"""Whether the process's own memory is a connector's store, and which KV that was read is missing there.

KV is found in memory once, when the connector is shut down. That it is there is seen; why other KV is not is
not: a cache forgets what is oldest, a sender what was fetched. So little is concluded from what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvtrace.trace.format import MEMORY


class Read(NamedTuple):
    """KV that one call read in one layer. ``held``: whether all of it was found in memory."""

    t: int
    step: int
    held: bool


def in_memory(target: str) -> bool:
    """Whether the target of a FOUND record is a place in the process's memory."""
    return target.startswith(MEMORY)


def dropped(reads: Iterable[Read]) -> Callable[[int, int], bool]:
    """Tells of KV that is not held whether it was dropped, by the time at which it was read, and its step.

    What a cache forgets, because it is full, is what came first. Dropped is what is missing beside other KV
    of the same step, where KV of an earlier step is held still, and some that was read later.
    """
    held = [one for one in reads if one.held]
    steps = {one.step for one in held if one.step}
    first, latest = min(steps, default=0), max((one.t for one in held), default=0)
    return lambda t, step: first < step and step in steps and t < latest
