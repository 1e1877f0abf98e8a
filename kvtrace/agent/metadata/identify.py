"""What a list of integers is: blocks of a request, slots in its blocks, its token ids, or none of these.

Decided by the values alone. A list can be read in several ways (the numbers of small block ids are slots
of other blocks as well): all of them are given, for names and neighbours to choose from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from kvtrace.agent.metadata.shapes import Integers
from kvtrace.agent.metadata.step_requests import Interval, StepRequests

BLOCK, SLOT, TOKEN = "block", "slot", "token"

_CHECKED_WHOLE = 256
_PROBES = 64


@dataclass(frozen=True)
class Reading:
    """One way to read a list: of what unit it is, and which positions of the request it names.

    ``ranges``: token positions, ascending, apart from each other; whole blocks where it names blocks.
    ``strict``: the numbers come in the request's own order.
    """

    unit: str
    ranges: tuple[Interval, ...]
    strict: bool = True

    @property
    def hull(self) -> Interval:
        return self.ranges[0][0], self.ranges[-1][1]


def readings(requests: StepRequests, req_id: str, numbers: Integers) -> list[Reading]:
    """All ways in which a non-empty list can be read as something of this request."""
    if numbers.hidden or not numbers.length:
        return []
    found = []
    views = requests.views(req_id)
    tables = views[0]
    if any(tables):
        blocks = next(filter(None, (_as_blocks(requests, view, numbers) for view in views)), None)
        found = [reading for reading in (blocks, _as_slots(requests, tables, numbers)) if reading is not None]
    tokens = _as_tokens(requests, req_id, numbers)
    return [*found, tokens] if tokens is not None else found


def group_readings(requests: StepRequests, req_id: str, lists: Sequence[Integers]) -> Reading | None:
    """Several lists of blocks of one request: one a KV cache group, or one a run of blocks."""
    for tables in requests.views(req_id):
        places = [None if one.hidden else _in_tables(tables, one.whole()) for one in lists]
        found = [place for of in places for place in of or ()]
        if None not in places and found and len(set(found)) == len(found):
            return _of_blocks(requests, sorted(found), all(a < b for a, b in pairwise(found)))
    return None


def _common(hulls: list[Interval]) -> Interval:
    """What groups with blocks of different sizes name together: the end that all of them reach.

    A group with greater blocks, or with one state for many tokens, names more than there is.
    """
    start = min(start for start, _ in hulls)
    ends = [end for _, end in hulls]
    return start, max(min(ends), start)


# --- blocks -----------------------------------------------------------------------


def _as_blocks(requests: StepRequests, tables: list[list[int]], numbers: Integers) -> Reading | None:
    count = numbers.length
    first, last = numbers.at(0), numbers.at(count - 1)
    if count > sum(map(len, tables)) or first < 0:
        return None
    for group, table in enumerate(tables):
        at = _find(table, first) if first else -1
        if at >= 0 and at + count <= len(table) and table[at + count - 1] == last:
            if table[at : at + count] == numbers.whole():
                size = requests.size(group)
                return Reading(BLOCK, ((at * size, (at + count) * size),)) if size else None
        elif at < 0 and first and group == len(tables) - 1 and not any(first in one for one in tables):
            return None
    found = _in_tables(tables, numbers.whole())
    if not found:
        return None
    strict = numbers.ordered and all(a < b for a, b in pairwise(found))
    return _of_blocks(requests, sorted(found), strict or not numbers.ordered)


def _in_tables(tables: list[list[int]], values: list[int]) -> list[tuple[int, int]] | None:
    """(group, index) of each block of a list, in its order; None where it is no list of blocks of these
    tables. 0 is the null block: no KV. A block that a window has left may come again, in the same table or
    in another one: a whole table is told by its order."""
    for group, table in enumerate(tables):
        if values and table[: len(values)] == values:
            return [(group, index) for index, value in enumerate(values) if value]
    named = [value for value in values if value]
    places = _places(tables, set(named))
    if len(places) < len(named) or not _nulls_fit(tables, values, places):
        return None
    return [places[value] for value in named]


def _nulls_fit(tables: list[list[int]], values: list[int], places: dict[int, tuple[int, int]]) -> bool:
    """Whether zeros before a block stand where the request's table has none either; at the end they pad."""
    for at, value in enumerate(values):
        if value:
            continue
        after = next((n for n in range(at + 1, len(values)) if values[n]), -1)
        if after < 0:
            return True
        group, index = places[values[after]]
        place = index - (after - at)
        if place < 0 or tables[group][place]:
            return False
    return True


def _find(table: list[int], value: int) -> int:
    try:
        return table.index(value)
    except ValueError:
        return -1


def _places(tables: list[list[int]], wanted: set[int]) -> dict[int, tuple[int, int]]:
    """(group, index) of blocks in a request's tables."""
    return {
        block: (group, index)
        for group, table in enumerate(tables)
        if not wanted.isdisjoint(table)
        for index, block in enumerate(table)
        if block in wanted
    }


def _of_blocks(requests: StepRequests, found: list[tuple[int, int]], strict: bool) -> Reading | None:
    runs: list[list[Interval]] = []
    for group, places in groupby(found, key=lambda place: place[0]):
        size = requests.size(group)
        if not size:
            return None
        runs.append(merged((index * size, (index + 1) * size) for _, index in places))
    if len(runs) == 1:
        return Reading(BLOCK, tuple(runs[0]), strict)
    return Reading(BLOCK, (_common([(run[0][0], run[-1][1]) for run in runs]),), strict)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Ascending intervals, those that touch made one."""
    found: list[Interval] = []
    for start, end in intervals:
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


# --- slots -----------------------------------------------------------------------


def _as_slots(requests: StepRequests, tables: list[list[int]], numbers: Integers) -> Reading | None:
    for group, table in enumerate(tables):
        size = requests.size(group)
        reading = _slot_run(table, size, numbers) if size and table else None
        if reading is not None:
            return reading
    return None


def _position(table: list[int], size: int, slot: int) -> int:
    """The token whose slot it is, -1 where the table has none such."""
    if slot < size:  # of the null block
        return -1
    at = _find(table, slot // size)
    return at * size + slot % size if at >= 0 else -1


def _slot_run(table: list[int], size: int, numbers: Integers) -> Reading | None:
    """Slots of consecutive tokens, in order: looked at in the first block, at the end, and once a block."""
    count = numbers.length
    start = _position(table, size, numbers.at(0))
    if start < 0 or start + count > len(table) * size:
        return None
    first = min(size - start % size, count)  # slots in the first block
    at = start // size
    blocks = table[at : (start + count - 1) // size + 1]
    head, last = numbers.at(0), numbers.at(count - 1)
    if last != blocks[-1] * size + (start + count - 1) % size:
        return None
    if numbers.part(0, first, 1) != list(range(head, head + first)):
        return None
    if count > first and numbers.part(first, count, size) != [block * size for block in blocks[1:]]:
        return None
    return Reading(SLOT, ((start, start + count),))


# --- token ids -----------------------------------------------------------------------


def _as_tokens(requests: StepRequests, req_id: str, numbers: Integers) -> Reading | None:
    """A prefix of the request's tokens, or those of this step's part."""
    if not numbers.ordered:
        return None
    tokens = requests.tokens(req_id)
    count = numbers.length
    if not tokens or count > len(tokens):
        return None
    computed, awaited = requests.computed(req_id) or (0, 0), requests.awaited(req_id) or (0, 0)
    ends = (computed[1], len(tokens))
    starts = (0, computed[0], *(end - count for end in ends), *awaited, requests.local(req_id))
    for start in dict.fromkeys(starts):
        if 0 <= start <= len(tokens) - count and _same(tokens, start, numbers):
            return Reading(TOKEN, ((start, start + count),))
    return None


def _same(tokens: list[int], start: int, numbers: Integers) -> bool:
    """Equal at both ends and, of long ones, at every so many between."""
    count = numbers.length
    if numbers.at(0) != tokens[start] or numbers.at(count - 1) != tokens[start + count - 1]:
        return False
    step = 1 if count <= _CHECKED_WHOLE else count // _PROBES
    return numbers.part(0, count, step) == tokens[start : start + count : step]
