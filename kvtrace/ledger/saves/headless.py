"""Requests of which the beginning was never read, and what stands behind it was.

A prefix can be found again by its beginning alone: what was read behind a beginning that is nowhere may stand
under the keys of other tokens, as where block numbers or slots are off by some. One such request says little:
the store may have had its beginning before this run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from kvtrace.ledger.intervals import Interval, covers, length, union
from kvtrace.ledger.requests import Request
from kvtrace.ledger.saves.watched import Watched
from kvtrace.ledger.slots.reads import Touch, covered, in_layer

_LEAST = 2


@dataclass(frozen=True)
class Headless:
    """Attributes:
    rows: the requests; none where they are less than two. Of some it may not be known that their beginning
        was not read out of sight.
    shifted: what was read of them is as long as a unit makes a store, and ends where no unit lets one end.
    within: of all of them whole blocks were read that begin within blocks, and some of these slots were
        another request's, or nobody's: (row, step) -> the blocks in whose place that stands.
    """

    rows: tuple[int, ...] = ()
    shifted: bool = False
    within: Mapping[tuple[int, int], list[Interval]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Due:
    """A request whose beginning was to be read: what the first step that read anything of it read."""

    row: int
    step: int
    prompt: int
    read: tuple[Interval, ...]
    headless: bool
    within: bool  # whole blocks that begin within blocks
    settled: bool  # all is known that was read by then


def headless(
    watched: Watched,
    requests: Mapping[int, Request],
    column: int,
    size: int,
    known: Callable[[int, int], int],
) -> Headless:
    """The requests of a worker that were read in a layer without their beginning: half of those whose
    beginning was due, or more; or where whole blocks were read that begin within blocks.

    Args:
        requests: those of the engine, by row.
        size: tokens in a block.
        known: (row of a request, step) -> leading positions that another one or the connector has.
    """
    due = [
        one
        for row, request in requests.items()
        if (one := _due(watched, row, request, column, size)) is not None
        and not known(row, request.chunks[0].step)
    ]
    found = _many([one for one in due if one.settled])
    if not found:
        return Headless(tuple(one.row for one in _many(due)))
    within = {(one.row, one.step): _whole_blocks(one, size) for one in found} if _within(found, size) else {}
    return Headless(tuple(one.row for one in found), _shifted(found, size), within)


def _many(due: list[_Due]) -> list[_Due]:
    """Those without their beginning, where they are enough of them."""
    found = [one for one in due if one.headless]
    many = 2 * len(found) >= len(due) or any(one.within for one in found)
    return found if many and len(found) >= _LEAST else []


def _due(watched: Watched, row: int, request: Request, column: int, size: int) -> _Due | None:
    """None where its beginning is due to nobody here."""
    touches = in_layer(watched.slots.reads.get(row, ()), column)
    begun = [touch for touch in touches if touch.positions]
    if not begun or not request.chunks or request.chunks[0].start > 0 or request.preemptions:
        return None
    step = min(touch.step for touch in begun)
    if request.prompt < size or watched.slots.tables.get(row, 0) < size or 0 < request.last_step < step:
        return None
    given = union([*request.reused, *request.external])
    before = np.array([chunk.step for chunk in request.chunks if chunk.step <= step], dtype=np.int64)
    if covers(given, 0):
        return None
    settled = bool(watched.settled(before).all())
    read = _all_of(touch for touch in begun if touch.step == step)
    within = (step, column) in watched.slots.skewed and bool(read[0][0] % size)
    return _Due(
        row, step, request.stood(step)[0], tuple(read), not covers(covered(begun), 0), within, settled
    )


def _all_of(touches: Iterable[Touch]) -> list[Interval]:
    """What was read, computed by then or not."""
    return union(part for touch in touches for part in (*touch.positions, *touch.stale))


def _within(found: list[_Due], size: int) -> bool:
    """Whether of each whole blocks were read that begin within blocks, and of one of them some of these slots
    were another's: not its tokens were counted from a later one on, but its slots."""
    return all(one.within for one in found) and any(length(list(one.read)) % size for one in found)


def _whole_blocks(one: _Due, size: int) -> list[Interval]:
    """The blocks of which slots were read, without a last one of which no more was read than the first one
    lacks."""
    lack = one.read[0][0] % size
    return union((start // size * size, (end - lack) // size * size) for start, end in one.read)


def _shifted(found: list[_Due], size: int) -> bool:
    """Whether a beginning was not left out, but other slots read in its place: each prompt's reads are as
    long as a unit makes a store, and end where no unit lets all of them end."""
    whole = [one for one in found if len(one.read) == 1]
    prompts = len({one.prompt for one in whole})
    units = range(size, max((one.prompt for one in whole), default=0) + 1, size)
    fits = any(_fit(whole, unit, lambda one: length(list(one.read))) == prompts for unit in units)
    ends = any(_fit(whole, unit, lambda one: one.read[-1][1]) == prompts for unit in units)
    return fits and not ends and prompts >= _LEAST and 2 * len(whole) > len(found)


def _fit(found: list[_Due], unit: int, of: Callable[[_Due], int]) -> int:
    """Of how many prompts of different length this is the whole number of units."""
    return len({one.prompt for one in found if of(one) == one.prompt // unit * unit > 0})
