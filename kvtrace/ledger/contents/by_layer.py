"""Which layers of a loaded block are not what its tokens compute to: by the fingerprints of single layers,
of 21 bits each.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cached_property
from typing import NamedTuple

from kvtrace.ledger.contents.prints import Block, Numbers, Printed

OF_LAYER, OF_RANK = "the KV of layer", " of rank "
"""Words of what is said of layers that hold the KV of others."""
_MOST_NAMED = 8


class Differing(NamedTuple):
    """``layers``: by their order in the shape, None where it may be all of them, as not every one is known.
    ``said``: what is in them. ``exchanged``: they hold what other layers computed."""

    layers: frozenset[int] | None
    said: str = ""
    exchanged: bool = False


class Whose(NamedTuple):
    """A layer on a rank (of tensor parallelism)."""

    rank: int
    layer: int


class ByLayer:
    """The blocks of all workers of one shape. ``others``: those of other ranks and KV cache groups, of the
    same size."""

    def __init__(self, workers: Sequence[Printed], others: Sequence[Printed] = ()) -> None:
        shape = workers[0].shape
        self._workers, self._rank = workers, shape.rank[0]
        # what stands last counts: the layers of the same rank
        self._others = sorted(others, key=lambda one: one.shape.rank[0] == self._rank)
        self._layers = numbered(shape.layers)
        self._in_order = self._layers == list(range(len(self._layers)))

    @cached_property
    def _numbers(self) -> Mapping[tuple[int, int, int], Numbers]:
        """Asked for where a block is wrong: they are many."""
        return {block: numbers for one in self._workers for block, numbers in one.numbers().items()}

    @cached_property
    def _in_others(self) -> Mapping[tuple[int, int], Mapping[int, Whose]]:
        """(row, begin) of a block -> the numbers of the others' layers, each with whose it is."""
        found: dict[tuple[int, int], dict[int, Whose]] = defaultdict(dict)
        for one in self._others:
            layers, rank = numbered(one.shape.layers), one.shape.rank[0]
            for (row, start, _), numbers in one.numbers().items():
                found[row, start] |= {
                    value: Whose(rank, layers[at]) for at, value in numbers.items() if value
                }
        return found

    def of(self, block: Block) -> Numbers:
        """Its numbers, as far as there are any."""
        return self._numbers.get(_key(block), {})

    def differing(self, block: Block, computed: Iterable[Block]) -> Differing:
        """Which layers of a loaded block are not what the same tokens computed to, and what is in them."""
        own = self.of(block)
        found: list[tuple[list[int], Numbers, Block]] = []
        for one in computed:
            right = self.of(one)
            layers = [at for at in sorted(own) if own[at] != right.get(at)]
            if len(own) == len(right) == len(self._layers) and layers:
                found.append((layers, right, one))
        if not found:
            return Differing(None)
        layers, right, of = min(found, key=lambda one: len(one[0]))
        whose = {
            right[at]: Whose(self._rank, self._layers[at]) for at in sorted(right, reverse=True) if right[at]
        }
        if any(own[at] not in whose for at in layers):
            whose = {**self._in_others.get((of.row, of.start), {}), **whose}
        held = {self._layers[at]: whose[own[at]] for at in layers if own[at] in whose}
        return Differing(frozenset(layers), self._said([self._layers[at] for at in layers], held), bool(held))

    def _said(self, layers: Sequence[int], held: Mapping[int, Whose]) -> str:
        if not held:
            return f"{self._called(layers)} differ{'s' if len(layers) == 1 else ''}"
        ranks = {one.rank for one in held.values()}
        found = self._exchanged({at: one.layer for at, one in held.items()}, ranks - {self._rank})
        rest = [layer for layer in layers if layer not in held]
        return f"{found}, {self._called(rest)} other KV" if rest else found

    def _exchanged(self, held: Mapping[int, int], ranks: Set[int]) -> str:
        """``held``: a layer -> the one whose KV it holds, of these other ``ranks``, if any."""
        layers = sorted(held)
        of_rank = OF_RANK + ", ".join(map(str, sorted(ranks))) if ranks else ""
        first, hold = self._called(layers), "hold" if len(layers) > 1 else "holds"
        if of_rank and all(at == layer for at, layer in held.items()):
            return f"{first} {hold} the KV{of_rank}"
        whose = ", ".join(str(held[layer]) for layer in layers[:_MOST_NAMED])
        more = " ..." if len(layers) > _MOST_NAMED else ""
        return f"{first} {hold} {OF_LAYER}{'s' if len(layers) > 1 else ''} {whose}{more}{of_rank}"

    def _called(self, layers: Sequence[int]) -> str:
        """By their numbers in the model."""
        some = ", ".join(map(str, layers[:_MOST_NAMED]))
        more = " ..." if len(layers) > _MOST_NAMED else ""
        of_all = f" of {len(self._layers)}" * self._in_order
        return f"layer{'s' if len(layers) > 1 else ''} {some}{more}{of_all}"


def numbered(names: Sequence[str]) -> list[int]:
    """The layers' numbers in the model, as their names have it; else by their order."""
    found = [re.search(r"\d+", name) for name in names]
    numbers = [int(one[0]) for one in found if one]
    return numbers if len({*numbers}) == len(names) else list(range(len(names)))


def _key(block: Block) -> tuple[int, int, int]:
    return block.row, block.start, block.step
