"""Loaded blocks as they stood some time after their use.

Nobody computes what was loaded. So what changes in such a block after its use was written by the load, too
late, as long as the block was given to nobody else, and does not hold by then what is known not to be its
KV: that may be another load's: of the request that had the block before, where it is what that one was to be
given. A block that held what it had held before, and stays so, says so for as long as it was looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from kvtrace.ledger.contents.prints import Block, Origin, Printed
from kvtrace.ledger.contents.unwritten import Places
from kvtrace.words import plural


class Later(NamedTuple):
    """``changed``: it holds other KV than when it was used. ``steps``: how much later that was seen first;
    where it did not change, how long it was looked at. ``right``: it is what its tokens computed to;
    ``wrong``: it never was, and is not its KV as it changed first."""

    changed: bool
    steps: int
    wrong: bool = False
    right: bool = False
    gone: bool = False
    """Another request had the block by then."""

    @property
    def late(self) -> bool:
        """The load wrote it after its use."""
        return self.changed and not self.wrong

    @property
    def after(self) -> str:
        """That time, in words."""
        when = f"{plural(self.steps, 'step')} later" if self.steps else "later in that step"
        return f"{when}, when another request had the blocks," if self.gone else when


def held_later(
    printed: Sequence[Printed], places: Places, is_its_own: Callable[[Printed, Block], bool | None]
) -> Mapping[tuple[int, int, int], Later]:
    """(pairs, row, begin) -> what is known of it, of each loaded block that was looked at again.

    Args:
        is_its_own: whether a block holds what its tokens compute to; None: it is not known.
    """
    found: dict[tuple[int, int, int], Later] = {}
    for one in printed:
        if not one.later:
            continue
        used = {(b.row, b.start): b for b in one.blocks if b.origin is Origin.LOADED}
        place = {key: places.of(block, one.group) for key, block in used.items()}
        in_place: dict[int, list[Block]] = defaultdict(list)
        for key, at in place.items():
            in_place[at].append(used[key])
        for block in one.later:
            first = used.get((block.row, block.start))
            if first is None or block.origin is not Origin.LOADED or block.step < first.step:
                continue
            at = place[block.row, block.start]
            if at and not places.given_since(at, first.step, block.step):
                looked_at = one.pairs, block.row, block.start
                before = found.get(looked_at)
                changed = block.value != first.value
                own = is_its_own(one, block) if changed else None
                if before is None or not before.changed or (own and not before.right):
                    found[looked_at] = Later(changed, block.step - first.step, own is False, own is True)
                if own is False:
                    owed = _owed(block, in_place[at], partial(is_its_own, one))
                    found |= {(one.pairs, of.row, of.start): then for of, then in owed}
    return found


def _owed(
    block: Block, in_place: Iterable[Block], is_its_own: Callable[[Block], bool | None]
) -> Iterator[tuple[Block, Later]]:
    """Loads of requests that had the same block of the cache before, and were to be given what it holds."""
    for one in in_place:
        before = one.row != block.row and one.step < block.step
        if before and is_its_own(block._replace(row=one.row, start=one.start, end=one.end)):
            yield one, Later(True, block.step - one.step, right=True, gone=True)
