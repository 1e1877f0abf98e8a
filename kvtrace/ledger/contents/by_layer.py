"""Loads that wrote a layer's KV into another layer: what the fingerprints of single layers show, and which
layer of what was loaded is the first one of a model.

No two layers of a model compute the same KV. So where a layer of a loaded block holds what another one
computed, or two of them hold the same, it was put into the wrong one. Each needs more than one sign: a
layer's number has 21 bits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from kvtrace.ledger.contents.prints import Block, Numbers, Origin, Printed
from kvtrace.words import plural

_LEAST_PAIRS = 2
"""Of blocks with the same tokens, that show which layer is the model's first."""
_LEAST_SHARE = 0.9
"""Of all pairs that show one."""
_LEAST_SIGNS = 2
_MOST_NAMED = 8
_MOST_OF_NUMBER = 64
"""Computed blocks with the same number: more say nothing."""


@dataclass(frozen=True)
class Misplaced:
    """``layers``: those that hold another one's KV, by their numbers in the shape; ``why``: what shows it."""

    layers: frozenset[int]
    why: str


class Differing(NamedTuple):
    """``layers``: by number, None where it may be all of them, as not every layer's number is known.
    ``said``: what is in them. ``exchanged``: they hold what other layers computed."""

    layers: frozenset[int] | None
    said: str = ""
    exchanged: bool = False


class ByLayer:
    """The blocks of all workers of one shape."""

    def __init__(self, workers: Sequence[Printed]) -> None:
        self._workers = workers
        self._count = len(workers[0].shape.layers)
        self._names = workers[0].shape.layers
        self._numbers: dict[tuple[int, int, int], Numbers] = {}
        self._by_number: dict[int, list[tuple[tuple[int, int, int], int]]] = defaultdict(list)
        """Number -> where it was computed: the block, the layer."""
        self._distinct: set[tuple[int, int]] = set()
        """Two layers that computed other KV for the same block, and never the same."""
        for one in workers:
            self._numbers.update(one.numbers)
        computed = [b for one in workers for b in one.blocks if b.origin is Origin.COMPUTED]
        same: set[tuple[int, int]] = set()
        for block in computed:
            numbers = self.of(block)
            for layer, number in numbers.items():
                if number:
                    self._by_number[number].append((_key(block), layer))
            for pair in combinations(sorted(numbers), 2):
                one_s, other_s = (numbers[layer] for layer in pair)
                (same if one_s == other_s else self._distinct).add(pair)
        self._distinct -= same
        self._moved_first: int | None = None
        self._signs = 0
        self._moved()
        self._doubled = dict(found for one in workers for found in self._twice(one))

    def of(self, block: Block) -> Numbers:
        """Its numbers, as far as there are any."""
        return self._numbers.get(_key(block), {})

    def misplaced(self, block: Block) -> Misplaced | None:
        """A loaded block of which some layers hold another one's KV."""
        return (
            self._seen_by_tokens(block) or self._computed_by_others(block) or self._doubled.get(_key(block))
        )

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

    # --- what the first layer computes ----------------------------------------------------

    def _seen_by_tokens(self, block: Block) -> Misplaced | None:
        if self._moved_first is None:
            return None
        for one in self._workers:
            look = one.alike.get((block.row, block.step))
            if look is not None and look.start < block.end and block.start < look.end:
                layer = self._moved_first
                if not look.layers.get(layer) or look.layers.get(look.first):
                    return None
                why = (
                    f"{self._called([layer])} holds what only the first layer of a model holds: the same for "
                    f"the same token after other tokens (of {plural(self._signs, 'pair')} of blocks; in "
                    f"layer {look.first} of none)"
                )
                return Misplaced(frozenset((layer, look.first)), f"tokens {look.start}-{look.end}: {why}")
        return None

    def _moved(self) -> None:
        """Which layer holds the first one's KV, of all loads, where it is not the first."""
        times: Counter[int] = Counter()
        firsts = set()
        for look in (look for one in self._workers for look in one.alike.values()):
            firsts.add(look.first)
            times.update(dict(look.layers))
        if not times or firsts & {layer for layer, count in times.items() if count}:
            return
        ((layer, count),) = times.most_common(1)
        if count >= _LEAST_PAIRS and count >= times.total() * _LEAST_SHARE:
            self._moved_first, self._signs = layer, count

    # --- numbers of single layers ---------------------------------------------------------

    def _computed_by_others(self, block: Block) -> Misplaced | None:
        """Two layers or more hold what others of one block computed to."""
        held: dict[tuple[int, int, int], dict[int, int]] = defaultdict(dict)
        for layer, number in self.of(block).items():
            places = self._by_number.get(number, ()) if number else ()
            for key, whose in places if len(places) <= _MOST_OF_NUMBER else ():
                if whose == layer:
                    held[key][layer] = layer
                elif held[key].get(layer) != layer:
                    held[key][layer] = whose
        for found in held.values():
            moved = {layer: whose for layer, whose in found.items() if layer != whose}
            if len(moved) >= _LEAST_SIGNS and all(
                tuple(sorted(pair)) in self._distinct for pair in moved.items()
            ):
                why = f"tokens {block.start}-{block.end}: {self._exchanged(moved)}"
                return Misplaced(frozenset(moved), why)
        return None

    def _twice(self, one: Printed) -> Iterator[tuple[tuple[int, int, int], Misplaced]]:
        """Loaded blocks of which two layers hold the same, in several of one load, each of them other KV."""
        of_load: dict[tuple[int, int], list[Block]] = defaultdict(list)
        for block in one.blocks:
            if block.origin is Origin.LOADED and self.of(block):
                of_load[block.row, block.step].append(block)
        for blocks in of_load.values():
            signs: dict[tuple[int, int], set[int]] = defaultdict(set)
            times: Counter[tuple[int, int]] = Counter()
            for block in blocks:
                for pair in self._equal(self.of(block)):
                    signs[pair].add(self.of(block)[pair[0]])
                    times[pair] += 1
            sure = {pair for pair, found in signs.items() if len(found) >= _LEAST_SIGNS}
            for block in blocks:
                pairs = sure & set(self._equal(self.of(block)))
                if pairs:
                    layers = sorted({layer for pair in pairs for layer in pair})
                    why = (
                        f"tokens {block.start}-{block.end}: {self._called(layers)} hold the same KV, "
                        "which no two layers compute"
                    )
                    yield _key(block), Misplaced(frozenset(layers[1:]), why)

    def _equal(self, numbers: Numbers) -> list[tuple[int, int]]:
        by_number: dict[int, list[int]] = defaultdict(list)
        for layer, number in sorted(numbers.items()):
            if number:
                by_number[number].append(layer)
        return [
            pair
            for layers in by_number.values()
            for pair in combinations(layers, 2)
            if pair in self._distinct
        ]


def _key(block: Block) -> tuple[int, int, int]:
    return block.row, block.start, block.step
