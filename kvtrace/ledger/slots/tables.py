"""Who holds each block of the KV cache, step by step, as the scheduler gave the blocks out.

A block that is given to a request is that request's from then on, and its former holder's no more; unless
the request takes it as a hit of the GPU's own prefix cache: then both hold it, with the same content. A
block that was freed keeps its content, and so its holders, until it is given out again (vLLM
``v1/core/block_pool.py``, 0.32.0). All KV cache groups take their blocks from one pool: a block that one
group gets is no other group's any more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtrace.ledger.intervals import Interval
from kvtrace.ledger.requests import Request
from kvtrace.ledger.slots.sets import blocks_in
from kvtrace.ledger.steps import NEVER
from kvtrace.trace import rows
from kvtrace.trace.format import Flag

_MOST_PAST = 64
"""Changes of a block's holders that are looked at: what is older has long been read or lost."""


class Holder(NamedTuple):
    """A request's hold on a block."""

    row: int  # of the request
    place: int  # of the block in its block table
    since: int  # step in which that table began: a preempted request computes into another one ...
    until: int  # ... from this step on


@dataclass(frozen=True)
class Given:
    """A BLOCKS record, with the request's row."""

    row: int
    record: rows.BlocksGiven


class BlockTables:
    """One engine's blocks. ``until`` moves on; nothing goes back.

    Args:
        given: in the order of their steps.
        block_sizes: tokens of a block by KV cache group.
    """

    def __init__(
        self, given: Sequence[Given], requests: Mapping[int, Request], block_sizes: Sequence[int]
    ) -> None:
        self._given, self._requests, self._sizes = given, requests, block_sizes
        self._at = 0
        self._step = 0
        self._holders: dict[tuple[int, int], tuple[Holder, ...]] = {}
        self._past: dict[tuple[int, int], list[tuple[int, tuple[Holder, ...]]]] = defaultdict(list)
        """Of a block the steps in which its holders changed, and who they were from then on."""
        self._before: dict[tuple[int, int], tuple[Holder, ...]] = {}
        self._since: dict[int, int] = {}
        self._resumed: dict[int, list[int]] = defaultdict(list)  # steps
        for one in given:
            if rows.flags(one.record.head) & Flag.RESUMED:
                self._resumed[one.row].append(one.record.step)

    def until(self, step: int) -> None:
        """Take in what was given out up to ``step``, that included."""
        hits: list[tuple[tuple[int, int], Holder]] = []
        while self._at < len(self._given) and self._given[self._at].record.step <= step:
            one = self._given[self._at]
            if one.record.step != self._step:
                self._share(hits)
                hits = []
                self._step = one.record.step
                self._before.clear()
            hits += self._give(one)
            self._at += 1
        self._share(hits)
        if step > self._step:
            self._before.clear()

    def holders(self, group: int, block: int) -> tuple[Holder, ...]:
        """Of a block, after the latest step."""
        return self._holders.get((group, block), ())

    def before(self, group: int, block: int) -> tuple[Holder, ...] | None:
        """Its holders before the latest step gave it away, None where that did not."""
        return self._before.get((group, block))

    def held_in(self, group: int, block: int, step: int) -> tuple[Holder, ...]:
        """Who held a block after an earlier step."""
        past = self._past.get((group, block), [])
        at = bisect_right(past, step, key=lambda one: one[0])
        return past[at - 1][1] if at else ()

    def held_then(
        self, group: int, runs: tuple[Interval, ...], step: int
    ) -> Iterator[tuple[int, int, Interval]]:
        """(block, row of a request, its positions) of those who held these slots after an earlier step."""
        size = self._sizes[group]
        for block, low, high in blocks_in(runs, size):
            for holder in self.held_in(group, block, step):
                yield block, holder.row, (holder.place * size + low, holder.place * size + high)

    def held_before(self, group: int, block: int) -> set[Holder]:
        """Who has a block, and the last ones who had it."""
        past = self._past.get((group, block), [])[-_MOST_PAST:]
        return {holder for _, holders in past for holder in holders}

    def _hold(self, key: tuple[int, int], holders: tuple[Holder, ...]) -> None:
        self._holders[key] = holders
        self._past[key].append((self._step, holders))

    def _give(self, one: Given) -> list[tuple[tuple[int, int], Holder]]:
        """Gives out what a record names, and returns what of it the prefix cache had: the request that
        computes that may be given its block in the same step, by a later record."""
        hits: list[tuple[tuple[int, int], Holder]] = []
        record, row = one.record, one.row
        if rows.flags(record.head) & Flag.FIRST or row not in self._since:
            self._since[row] = record.step
        size = self._sizes[record.group] if record.group < len(self._sizes) else 0
        hit = local_hit(self._requests[row], record.step)
        by = 1 if record.count > 0 else -1
        for i in range(abs(record.count)):
            key, place = (record.group, record.block + by * i), record.first + i
            known = self._holders.get(key, ())
            mine = self._holder(row, place)
            if any(holder.row == row and holder.place == place for holder in known):
                # Said once more, or its own block that the prefix cache gave back.
                now = (mine if one.row == row and mine.since in self._resumed[row] else one for one in known)
                self._hold(key, tuple(now))
                continue
            if place * size < hit:
                hits.append((key, mine))
                continue
            self._pass_on(key, mine)
        return hits

    def _share(self, hits: Sequence[tuple[tuple[int, int], Holder]]) -> None:
        """These have a block beside those who have it; alone where nobody is known to."""
        for key, mine in hits:
            if known := self._holders.get(key, ()):
                self._hold(key, (*known, mine))
            else:
                self._pass_on(key, mine)

    def _pass_on(self, key: tuple[int, int], mine: Holder) -> None:
        self._before.setdefault(key, self._holders.get(key, ()))
        self._take_away(key[1])
        self._hold(key, (mine,))

    def _holder(self, row: int, place: int) -> Holder:
        since, resumed = self._since[row], self._resumed[row]
        after = bisect_right(resumed, since)
        return Holder(row, place, since, resumed[after] if after < len(resumed) else NEVER)

    def _take_away(self, block: int) -> None:
        """A block is given out: no group's layers hold anything in it any more. What reads it before the
        step's forward in a layer of another group, on the same memory, does so for the new holder."""
        for group in range(len(self._sizes)):
            if self._holders.pop((group, block), None):
                self._past[group, block].append((self._step, ()))


def local_hit(request: Request, step: int) -> int:
    """Positions that the GPU's own prefix cache gave a request that was let in in ``step``."""
    asked = [one for one in request.lookups if one.step <= step and one.answer is not None]
    if asked:
        return asked[-1].local
    began = [chunk.start for chunk in request.chunks if chunk.step >= step]
    return began[0] if began else 0


def computed_by(request: Request, holder: Holder, step: int, included: bool) -> int:
    """How far the table of a hold was filled by the forward of ``step`` (or only by those before it):
    positions, from 0. Of decode tokens a step computes one; after a preemption those that there were are
    computed again with the end of the prompt."""
    later = [one for one in request.chunks if holder.since <= one.step < holder.until]
    if not later:
        return request.computed if request.chunks or not request.prompt else 0
    end = later[0].start
    last = 0
    for chunk in later:
        if chunk.step < step or (included and chunk.step == step):
            end, last = max(end, chunk.end), chunk.step
    prompt, computed = request.at_step(last)
    if last and end >= prompt:
        again = [reach + 1 for at, reach in request.preempted if at < last and reach >= prompt]
        end = min(computed, max([prompt, *again]) + step - last - (not included))
        end = min([end, *(max(reach, later[-1].end) for at, reach in request.preempted if at >= last)])
    return end
