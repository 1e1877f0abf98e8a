"""What loads put into the KV cache, against what the same tokens computed to in this run.

Every loaded block is judged by itself (``judge.py``). Where no write into it was seen and the same block of
the cache held it before, it proves nothing. Then by what all of them say together: other numbers may be a
store of fewer bits, and what was written too late is no other KV.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvtrace.ledger.contents.by_layer import Differing
from kvtrace.ledger.contents.distance import FAR, Distance, sum_of
from kvtrace.ledger.contents.judge import Judge, SharedPrefixes
from kvtrace.ledger.contents.later import Later, held_later
from kvtrace.ledger.contents.prints import ZEROES, Block, Printed
from kvtrace.ledger.contents.unwritten import (
    Places,
    Written,
    pairs_written,
    remaining,
    unwritten_blocks,
)
from kvtrace.ledger.intervals import Interval, length, union
from kvtrace.ledger.requests import Request
from kvtrace.words import plural


@dataclass(frozen=True)
class Wrong:
    """Tokens [start, end) with loaded KV that is not what they compute to. ``pairs``: a bit each.
    ``unwritten``: it is what was there before, nothing was loaded. ``late``: it is that, and was written
    after its use."""

    start: int
    end: int
    pairs: int
    why: str
    unwritten: bool = False
    late: bool = False
    of: int = 0
    """The pairs of the whole block, where ``pairs`` are some of them."""
    altered: bool = False
    """It is no other KV that is known, nor what stood there before, nor zeros, but other numbers, in all
    layers; and so is all that was written and is not equal: a store of fewer bits may keep a part whole."""
    unlike: bool = False
    """All that is known is that it is not what its tokens computed to, in some layer: one that lost its part
    explains that."""
    distance: Distance | None = None
    """Of one that is ``altered``, or would be: from what its tokens computed to, where that is known."""
    whose: tuple[tuple[int, int], Interval] | None = None
    """(row of a request, its pairs), and its positions that computed to this."""


Returned = tuple[int, tuple[Interval, ...]]
"""Pairs of the engine, a bit each, and positions."""


@dataclass(frozen=True)
class Contents:
    """What the fingerprints say, by the request's row.

    Attributes:
        proved: positions whose load gave back what they compute to, and those that a later request got back
            so from the connector.
        kept: of these, those that a request of the same engine got back: another one may have read them
            where they were computed.
        sharing: (row, end of a wrong block) -> the requests that begin with the same tokens, and their pairs.
        blocks: loaded blocks (of a rank and KV cache group): "equal", "wrong", "not compared", "altered".
        written: requests into whose slots something was seen to be written.
        salted: tokens of its load that hold what a request under another cache salt computed for the same
            positions, and nobody under its own.
        apart: blocks that two engines computed, no layer of any to the same.
        from_apart: row -> tokens of its load that only such another engine had computed to this.
        altered_by: how far altered blocks are from what their tokens computed to, all together, where known.
    """

    wrong: Mapping[int, Sequence[Wrong]] = field(default_factory=dict)
    proved: Mapping[int, Sequence[Returned]] = field(default_factory=dict)
    kept: Mapping[int, Sequence[Returned]] = field(default_factory=dict)
    sharing: Mapping[tuple[int, int], Sequence[tuple[int, int]]] = field(default_factory=dict)
    blocks: Mapping[str, int] = field(default_factory=dict)
    written: frozenset[int] = frozenset()
    salted: Mapping[int, int] = field(default_factory=dict)
    apart: int = 0
    from_apart: Mapping[int, int] = field(default_factory=dict)
    altered_by: Distance | None = None

    def unequal(self, rows: Iterable[int]) -> Mapping[int, Sequence[Returned]]:
        """Positions of which another's KV, or nobody's, came back to these requests, by whoever begins with
        the same tokens; and those of the other, as it lies under a wrong name."""
        found: dict[tuple[int, int], list[Interval]] = defaultdict(list)
        for row in rows:
            for bad in self.wrong.get(row, ()):
                if not (bad.unwritten or bad.late):
                    for other in self.sharing[row, bad.end]:
                        found[other].append((bad.start, bad.end))
                    if bad.whose:
                        found[bad.whose[0]].append(bad.whose[1])
        return _by_row(found)


EQUAL, WRONG, NOT_COMPARED = "equal", "wrong", "not compared"
ALTERED = "altered"


def compare(
    workers: Sequence[Printed], requests: Sequence[Request], places: Places, written: Written
) -> Contents:
    """Judge every loaded block.

    Args:
        workers: all that is printed, of every worker and KV cache group.
    """
    prefixes = SharedPrefixes(requests)
    wrong: dict[int, list[Wrong]] = defaultdict(list)
    proved: dict[tuple[int, int], list[Interval]] = defaultdict(list)
    kept: dict[tuple[int, int], list[Interval]] = defaultdict(list)
    sharing: dict[tuple[int, int], Sequence[tuple[int, int]]] = {}
    blocks: Counter[str] = Counter()
    same_before = remaining(workers, places)
    alone = unwritten_blocks(workers, places, written)
    salted: dict[int, list[Interval]] = defaultdict(list)
    from_apart: dict[int, list[Interval]] = defaultdict(list)
    shapes = dict.fromkeys(one.shape for one in workers)
    judges = {shape: Judge(shape, workers, requests, prefixes, places) for shape in shapes}
    for judge in judges.values():
        for pairs, block in judge.loaded():
            savers = judge.savers(block)
            seen = pairs_written(written, block.row, block.start, block.end)
            if savers and (pairs, block) in same_before and pairs & ~seen:
                blocks[NOT_COMPARED] += 1
                continue
            if not savers and (pairs, block) not in same_before and judge.of_another_salt(block):
                salted[block.row].append((block.start, block.end))
            if not savers and judge.of_one_apart(block):
                from_apart[block.row].append((block.start, block.end))
            found = None if savers else _found(judge, pairs, block, alone)
            blocks[EQUAL if savers else WRONG if found else NOT_COMPARED] += 1
            for row in (block.row, *savers) if savers else ():
                key = row, pairs if row == block.row else judge.pairs_of(row)
                proved[key].append((block.start, block.end))
                if requests[row].engine == requests[block.row].engine:
                    kept[key].append((block.start, block.end))
            if found:
                wrong[block.row].append(found)
                sharing[block.row, block.end] = [
                    (row, judge.pairs_of(row)) for row in prefixes.sharing(block.row, block.end)
                ]
    later = held_later(workers, places, lambda one, block: judges[one.shape].is_its_own(block))
    _look_later(wrong, later, requests)
    _altered(wrong, blocks)
    altered = (one.distance for found in wrong.values() for one in found if one.altered)
    return Contents(
        wrong, _by_row(proved), _by_row(kept), sharing, blocks, frozenset(written),
        _tokens(salted), max((most for one in judges.values() for most in one.apart.values()), default=0),
        _tokens(from_apart), sum_of(altered),
    )  # fmt: skip


def _tokens(found: Mapping[int, Sequence[Interval]]) -> dict[int, int]:
    return {row: length(union(parts)) for row, parts in found.items()}


def _by_row(found: Mapping[tuple[int, int], Sequence[Interval]]) -> Mapping[int, Sequence[Returned]]:
    by_row: dict[int, list[Returned]] = defaultdict(list)
    for (row, pairs), intervals in found.items():
        by_row[row].append((pairs, tuple(union(intervals))))
    return by_row


def returned(found: Iterable[Returned], pairs: int) -> list[Interval]:
    """The positions in any of these pairs."""
    return union(part for of, parts in found if of & pairs for part in parts)


def _altered(wrong: dict[int, list[Wrong]], blocks: Counter[str]) -> None:
    """Tell a store of fewer bits from other KV. What is too far from what was computed was not rounded, nor
    what differs in some layers and is not near. Where one block is known to be other KV, those of which the
    distance is not known are no store of fewer bits. What was not written says nothing of that, nor what came
    too late."""
    loads = {row: sum_of(one.distance for one in found if one.altered) for row, found in wrong.items()}
    known = {row: how for row, how in loads.items() if how is not None}
    far, near = _far(known), _near(known)
    for row, found in wrong.items():
        wrong[row] = [_settled(one, row in far, row in near) for one in found]
    every = [one for found in wrong.values() for one in found]
    others = any(not (one.altered or one.unwritten or one.late) for one in every)
    for row, found in wrong.items() if others else ():
        wrong[row] = [replace(one, altered=one.altered and one.distance is not None) for one in found]
    count = sum(one.altered for found in wrong.values() for one in found)
    blocks.update({ALTERED: count, WRONG: -count})
    blocks += Counter()  # leaves zeros out


def _far(loads: Mapping[int, Distance]) -> set[int]:
    """Those of the loads that are too far from what was computed, each or together."""
    apart = {row: how for row, how in loads.items() if how.share >= FAR}
    together = sum_of(apart.values())
    found = apart if together is not None and together.far else {}
    return {row for row, how in loads.items() if how.far or row in found}


def _near(loads: Mapping[int, Distance]) -> set[int]:
    """Those that are near it, each or together."""
    apart = {row: how for row, how in loads.items() if how.share < FAR}
    together = sum_of(apart.values())
    return set(apart) if together is not None and together.near else {r for r, h in apart.items() if h.near}


def _settled(one: Wrong, far: bool, near: bool) -> Wrong:
    """``far``, ``near``: the load that it is of."""
    how = one.distance
    if not one.altered or how is None or how.near:
        return one
    rounded = not far and (near or one.pairs == one.of)
    return one if rounded else replace(one, altered=False, why=f"{one.why}, {how}")


def _found(
    judge: Judge,
    pairs: int,
    block: Block,
    alone: Mapping[tuple[int, Block], str],
) -> Wrong | None:
    """What is wrong with a loaded block that nobody with its tokens computed, as far as that is known."""
    why = judge.wrong(block)
    ours = why is not None and why.ours
    layers, what, exchanged = judge.differing(block) if why is not None else Differing(None)
    untouched = alone.get((pairs, block))
    if why is not None:
        # another's KV is the same in layers that do not depend on what stands before
        said = f"{why.text}: {what}" if what and ours else why.text
        differing = _bits(pairs, layers)
        part = differing.bit_count() / pairs.bit_count()
        rounded = ours and not untouched and not exchanged and block.value != ZEROES
        distance = judge.how_far(block, part) if rounded and part else None
        return Wrong(
            block.start, block.end, differing, said, untouched is not None, of=pairs,
            altered=rounded and (part == 1 or distance is not None), distance=distance,
            unlike=ours and layers is None and not untouched, whose=why.whose,
        )  # fmt: skip
    if untouched:
        return Wrong(block.start, block.end, pairs, untouched, unwritten=True)
    return None


def _bits(pairs: int, layers: Collection[int] | None) -> int:
    """Of the pairs of a worker and KV cache group those of the layers with these numbers; None: all."""
    if layers is None:
        return pairs
    bits = [1 << at for at in range(pairs.bit_length()) if pairs >> at & 1]
    return sum(bit for number, bit in enumerate(bits) if number in layers)


def _look_later(
    wrong: dict[int, list[Wrong]], later: Mapping[tuple[int, int, int], Later], requests: Sequence[Request]
) -> None:
    """Tell those that were written too late from those that were not. Where the loads of an engine are seen
    to come too late, one whose blocks could be looked at for less long than that takes is no other. What was
    written in part, and is right later, was late as well."""
    longest: dict[int, int] = {}
    for (_, row, _), then in later.items():
        if then.late and any(one.unwritten for one in wrong.get(row, ())):
            engine = requests[row].engine
            longest[engine] = max(longest.get(engine, 0), then.steps)
    for row, found in wrong.items():
        most = longest.get(requests[row].engine, -1)
        for at, one in enumerate(found):
            held = later.get((one.of or one.pairs, row, one.start), _NOT_LOOKED_AT)
            if held.right or (one.unwritten and (held is not _NOT_LOOKED_AT or most >= 0)):
                late = held.late or held.steps < most
                why = f"{one.why}, when attention used them; {_said(held, most)}"
                found[at] = replace(
                    one, why=why, late=late, unwritten=one.unwritten and not late,
                    altered=one.altered and not late,
                )  # fmt: skip


_NOT_LOOKED_AT = Later(False, -1)


def _said(then: Later, most: int) -> str:
    """``most``: steps after which other loads of the engine came, at the most; -1: none did."""
    if then.right:
        return f"{then.after} they are what theirs computed to"
    if then.late:
        return f"{then.after} they hold other KV"
    if then.changed:
        seen = f"{then.after} they hold other KV, which is not theirs either"
    else:
        seen = "they were not looked at again" if then.steps < 0 else f"{then.after} they still do"
    others = (
        f", and after that could not be looked at; other loads came {plural(most, 'step')} after their use"
    )
    return seen + (others if then.steps < most else "")
