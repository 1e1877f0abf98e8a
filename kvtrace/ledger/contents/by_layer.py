"""Which layers of a loaded block are not what its tokens compute to: by the fingerprints of single layers,
of 21 bits each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from kvtrace.ledger.contents.prints import Block, Numbers, Printed

_MOST_NAMED = 8


class Differing(NamedTuple):
    """``layers``: by number, None where it may be all of them, as not every layer's number is known.
    ``said``: what is in them. ``exchanged``: they hold what other layers computed."""

    layers: frozenset[int] | None
    said: str = ""
    exchanged: bool = False


class ByLayer:
    """The blocks of all workers of one shape."""

    def __init__(self, workers: Sequence[Printed]) -> None:
        self._workers, self._count = workers, len(workers[0].shape.layers)

    @cached_property
    def _numbers(self) -> Mapping[tuple[int, int, int], Numbers]:
        """Asked for where a block is wrong: they are many."""
        return {block: numbers for one in self._workers for block, numbers in one.numbers().items()}

    def of(self, block: Block) -> Numbers:
        """Its numbers, as far as there are any."""
        return self._numbers.get(_key(block), {})

    def differing(self, block: Block, computed: Iterable[Block]) -> Differing:
        """Which layers of a loaded block are not what the same tokens computed to, and what is in them."""
        own = self.of(block)
        found: list[tuple[list[int], Numbers]] = []
        for one in computed:
            right = self.of(one)
            layers = [layer for layer in sorted(own) if own[layer] != right.get(layer)]
            if len(own) == len(right) == self._count and layers:
                found.append((layers, right))
        if not found:
            return Differing(None)
        layers, right = min(found, key=lambda one: len(one[0]))
        of_whom = {right[layer]: layer for layer in sorted(right, reverse=True) if right[layer]}
        held = {layer: of_whom[own[layer]] for layer in layers if own[layer] in of_whom}
        return Differing(frozenset(layers), self._said(layers, held), bool(held))

    def _said(self, layers: Sequence[int], held: Mapping[int, int]) -> str:
        if not held:
            return f"{self._called(layers)} differ{'s' if len(layers) == 1 else ''}"
        found = self._exchanged(held)
        rest = [layer for layer in layers if layer not in held]
        return f"{found}, {self._called(rest)} other KV" if rest else found

    def _exchanged(self, held: Mapping[int, int]) -> str:
        """``held``: a layer -> the one whose KV it holds."""
        layers = sorted(held)
        if len(layers) == 2 and held == {layers[0]: layers[1], layers[1]: layers[0]}:
            return f"{self._called(layers)}: each holds the other's KV"
        first = self._called(layers)
        whose = ", ".join(str(held[layer]) for layer in layers[:_MOST_NAMED])
        more = " ..." if len(layers) > _MOST_NAMED else ""
        hold = "hold" if len(layers) > 1 else "holds"
        return f"{first} {hold} the KV of layer{'s' if len(layers) > 1 else ''} {whose}{more}"

    def _called(self, layers: Sequence[int]) -> str:
        """Numbers from 0, in the order of the model."""
        some = ", ".join(str(layer) for layer in layers[:_MOST_NAMED])
        more = " ..." if len(layers) > _MOST_NAMED else ""
        return f"layer{'s' if len(layers) > 1 else ''} {some}{more} of {self._count}"


def _key(block: Block) -> tuple[int, int, int]:
    return block.row, block.start, block.step
