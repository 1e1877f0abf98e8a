"""Blocks that were read beside those of the prompts: all of them off by the same number.

A connector that takes the block after the right one, or before it, reads blocks of the right requests but
for the first one of each, and of their neighbours in the cache. One request says little: its beginning may be
left out for many reasons. What is concluded here rests on all that was read in a layer in the steps that
computed whole prompts: it is the beginnings of all these prompts, as long as one unit makes them, were each
block's id larger (or smaller) by one number; and it is not what the prompts themselves would give: blocks
that nobody has are among it, or blocks of a prompt's middle are not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from kvtrace.ledger.requests import Request
from kvtrace.ledger.slots.tables import Given

_LEAST = 2
"""Prompts of different length whose blocks were read."""
MOST_STEPS = 64
"""Steps that are looked at, the first ones."""
_MOST_UNITS = 4096


class Instead(NamedTuple):
    """In a step positions [0, end) of a request (its row) in whose place other blocks were read."""

    step: int
    row: int
    end: int


class _Prompt(NamedTuple):
    """``blocks``: its table."""

    row: int
    tokens: int
    blocks: tuple[int, ...]


class _Step(NamedTuple):
    step: int
    read: Set[int]
    prompts: tuple[_Prompt, ...]

    def is_as_much(self, unit: int, size: int) -> bool:
        """Whether as many blocks were read as a connector reads that stores whole units."""
        return len(self.read) == sum(prompt.tokens // unit * unit // size for prompt in self.prompts)

    def due(self, unit: int, size: int) -> set[int]:
        """The blocks that it reads."""
        return {
            one for prompt in self.prompts for one in prompt.blocks[: prompt.tokens // unit * unit // size]
        }


def displaced(
    read: Mapping[int, Set[int]],
    blank: Mapping[int, int],
    given: Sequence[Given],
    requests: Mapping[int, Request],
    size: int,
) -> list[Instead]:
    """The prompts in whose place other blocks were read in one layer; [] where that is not known.

    Args:
        read: step -> the blocks that were read in it, all of each.
        blank: step -> slots that were read of blocks that nobody has.
        given: the BLOCKS records of an engine with one KV cache group, in the order of their steps.
        requests: those of the engine, by row.
        size: tokens of a block.
    """
    steps = _steps(read, given, requests)
    odd = any(blank.get(one.step, 0) >= size or _has_gap(one) for one in steps)
    longest = max((prompt.tokens for one in steps for prompt in one.prompts), default=0)
    units = [
        unit
        for unit in (range(size, longest + 1, size)[:_MOST_UNITS] if odd else ())
        if all(one.is_as_much(unit, size) for one in steps)
    ]
    fits = [unit for unit in units if _fits(steps, unit, size)]
    if not fits or any(all(one.due(unit, size) == one.read for one in steps) for unit in units):
        return []
    return [
        Instead(one.step, prompt.row, prompt.tokens // fits[0] * fits[0])
        for one in steps
        for prompt in one.prompts
        if prompt.tokens >= fits[0]
    ]


def _fits(steps: Sequence[_Step], unit: int, size: int) -> bool:
    """Whether all that was read is what this unit makes due, off by one number."""
    first = steps[0].due(unit, size)
    if not first:
        return False
    by = min(steps[0].read) - min(first)
    long = {prompt.tokens for one in steps for prompt in one.prompts if prompt.tokens >= unit}
    return (
        by != 0
        and len(long) >= _LEAST
        and all({block + by for block in one.due(unit, size)} == one.read for one in steps)
    )


def _has_gap(step: _Step) -> bool:
    """Whether of a prompt blocks were read before and behind others that were not."""
    for prompt in step.prompts:
        places = [place for place, block in enumerate(prompt.blocks) if block in step.read]
        if places and places[-1] - places[0] >= len(places):
            return True
    return False


def _steps(
    read: Mapping[int, Set[int]], given: Sequence[Given], requests: Mapping[int, Request]
) -> list[_Step]:
    """The steps of which all requests were computed from their first token to their last one."""
    computing: dict[int, list[int]] = defaultdict(list)
    for row, request in requests.items():
        for chunk in request.chunks:
            computing[chunk.step].append(row)
    tables: dict[int, dict[int, int]] = defaultdict(dict)
    for one in given:
        record = one.record
        chunks = requests[one.row].chunks if one.row in requests else ()
        if chunks and record.step <= chunks[0].step:
            by = 1 if record.count > 0 else -1
            for at in range(abs(record.count)):
                tables[one.row][record.first + at] = record.block + by * at
    found = []
    for step in sorted(read):
        rows = computing.get(step, [])
        if read[step] and rows and all(_is_whole(requests[row]) for row in rows):
            prompts = (_Prompt(row, requests[row].prompt, _in_order(tables[row])) for row in rows)
            found.append(_Step(step, read[step], tuple(prompts)))
    return found


def _is_whole(request: Request) -> bool:
    chunks = request.chunks
    reused = any(start < end for start, end in (*request.reused, *request.external))
    whole = len(chunks) == 1 and chunks[0].start == 0 and chunks[0].end >= request.prompt
    return whole and not reused and not request.preemptions


def _in_order(table: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(table[place] for place in range(len(table)) if place in table)
