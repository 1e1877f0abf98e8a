"""Layers that a load left out: they hold what their block held before, and the layers below do not.

What a layer computes for a token hangs on all layers below it. So where a lower layer of a block holds other
KV than before, the block has other tokens now, and no layer above can rightly hold what it held for those
before. The lowest layer proves nothing: there the same token in the same place has the same KV, whatever
comes before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvtrace.ledger.contents.prints import Block, Origin, Printed
from kvtrace.ledger.contents.residue import Places
from kvtrace.words import of_all

Digest = Callable[[int, int], int]
"""(row of a request, end) -> digest of its first tokens; 0 unknown."""


@dataclass(frozen=True)
class LeftOut:
    """``pairs``: the layers, a bit each; ``why``: what shows it."""

    pairs: int
    why: str


def left_out(
    printed: Sequence[Printed], places: Places, digest: Digest, written: Mapping[int, int]
) -> dict[tuple[int, Block], LeftOut]:
    """Loaded blocks, with the pairs of their workers, of which some layers were left out.

    Args:
        written: rows of the requests into whose slots something was seen to be written -> in which pairs, a
            bit each: these are left out.
    """
    found: dict[tuple[int, Block], LeftOut] = {}
    for one in printed:
        if not one.stayed or not one.whole:
            continue
        size = max(1, one.shape.block_size)
        before: dict[int, Block] = {}
        for block in sorted(one.blocks, key=lambda block: block.step):
            at = places.block(block.row, one.group, block.start // size, block.step)
            if block.origin is Origin.LOADED:
                of_others = bool(at) and _of_others(before.get(at), block, digest)
                left = _left_out(one, block, of_others, written.get(block.row, 0))
                if left is not None:
                    found[one.pairs, block] = left
            if at:
                before[at] = block
    return found


def _left_out(one: Printed, block: Block, of_others: bool, written: int) -> LeftOut | None:
    """``of_others``: what the block held before was other tokens'; ``written``: pairs in which something was
    seen to be written."""
    stayed = one.stayed.get((block.row, block.start, block.step), {})
    every = sum(stayed.values())
    lowest = one.pairs & ~every & -(one.pairs & ~every)
    pairs = sum(
        bit & -(lowest << 1) if lowest else 0 for zeroes, bit in stayed.items() if zeroes or of_others
    )
    pairs &= ~written
    if not pairs:
        return None
    layers = of_all(pairs.bit_count(), one.pairs.bit_count(), "layer")
    return LeftOut(
        pairs, f"tokens {block.start}-{block.end} hold in {layers} what their block held before, or zeroes"
    )


def _of_others(before: Block | None, block: Block, digest: Digest) -> bool:
    if before is None:
        return False
    own, other = digest(block.row, block.end), digest(before.row, before.end)
    return before.start != block.start or (own != 0 and other != 0 and own != other)
