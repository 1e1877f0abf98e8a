"""Which layer of what a load wrote is the model's first one. ALIKE records.

What the first layer of a model keeps of a token hangs on that token alone, its key's turn by the position
apart; in every other layer it hangs on all tokens before it. So where two prompts have the same token at the
same offset of a block, these two blocks hold some equal numbers in the first layer, and in no other. That can
be seen of loads of what is never computed here. Blocks are compared place by place: how slots lie in one
need not be known. Two loaded blocks are compared in each layer; a loaded one with a computed one, whose
layers are where they belong, in each layer with the first layer of that.

Nothing but how often a layer was the only alike one is written down. A model of which this does not hold
(learned positions, a pipeline's later stage) is alike nowhere: then it says nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvtrace.agent.watch.prompts import Span

MOST_KNOWN = 256
"""Blocks whose tokens are known."""
MOST_LOADS = 64
"""Of one worker, that are looked at."""
_LOADS_IN_A_STEP = 8
_MOST_PAIRS = 4
"""Of one load."""
_MOST_BLOCKS = 32
"""Of one load, and of what a step computes of one prompt: the last ones."""
_COMPARED = 1 << 20
"""Bytes of a layer that are compared at once; it takes about six times that while it lasts."""
_NEAR = {1: 0, 2: 1, 4: 1 << 13, 8: 1 << 42}
"""By bytes of a number: how far two may be apart, in their last bits: batches of other sizes differ there."""
_ALIKE = 0.3
"""The part of a token's numbers that are equal: values are half of it, and keys are turned."""
_CLEAR = 3.0
"""How many times as many numbers are equal as in any other layer."""
_LEAST = 16
"""Numbers of a token."""


class Place(NamedTuple):
    """A layer: the dimension of its tensor for blocks, and how many of these a block of a table is."""

    name: str
    dim: int
    split: int


class Look(NamedTuple):
    """At the blocks of one load: ``pairs`` of them and others, which lie in [start, end)."""

    request: str
    start: int
    end: int
    pairs: int


class _Block(NamedTuple):
    """What stands in a block: its tokens, from an offset on; as computed here, or from a load."""

    tokens: Sequence[int]
    offset: int
    computed: bool
    start: int


class _Pair(NamedTuple):
    block: int
    other: int
    computed: bool
    same: int
    start: int


class SameTokens:
    """Of one worker and the KV cache group of the model's first layer.

    Args:
        group: its number.
        size: tokens in a block of the group.
        layers: of the group, the model's first layer first; their tensors have one shape.
        nbytes: of a block in one layer.
    """

    def __init__(self, group: int, size: int, layers: Sequence[Place], nbytes: int) -> None:
        self.group, self.size, self.layers = group, size, layers
        self._most_pairs = max(1, _COMPARED // nbytes)
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self._with: dict[tuple[int, int], set[int]] = {}
        """(offset, token) -> the blocks that have it there."""
        self._loads = 0

    def look(
        self, torch: Any, spans: Sequence[Span], loaded: Mapping[str, int], tensors: Mapping[str, Any]
    ) -> tuple[list[Look], Any] | None:
        """Take note of what was computed and loaded; compare what was loaded.

        Args:
            spans: what the step computed.
            loaded: requests for which the connector loads -> leading tokens that the step did not compute.
            tensors: the layers'.

        Returns:
            float32 of shape (pairs of all looks, 2 + layers): how many numbers of a token a block holds, how
            many tokens are the same, and in each layer how many numbers of the block are alike.
        """
        if self._loads >= MOST_LOADS:
            return None
        looks: list[Look] = []
        pairs: list[_Pair] = []
        for span in spans:
            self._note(span)
        for span in spans:
            end = min(loaded.get(span.request, 0), span.start)
            if end and len(looks) < _LOADS_IN_A_STEP:
                found = self._pairs(span, end)[: self._most_pairs - len(pairs)]
                if found:
                    starts = [pair.start for pair in found]
                    looks.append(Look(span.request, min(starts), max(starts) + self.size, len(found)))
                    pairs += found
        self._loads += len(looks)
        return (looks, self._compared(torch, pairs, tensors)) if looks else None

    def _note(self, span: Span) -> None:
        """What the step computed."""
        last = -(-span.end // self.size)
        for place in range(max(span.start // self.size, last - _MOST_BLOCKS), last):
            block, first = self._block(span, place), place * self.size
            if block:
                start = max(span.start, first)
                tokens = span.tokens[start : min(span.end, first + self.size)]
                self._know(block, _Block(tokens, start - first, True, first))

    def _know(self, block: int, what: _Block) -> None:
        self._forget(block)
        self._blocks[block] = what
        for offset, token in enumerate(what.tokens, what.offset):
            self._with.setdefault((offset, token), set()).add(block)
        while len(self._blocks) > MOST_KNOWN:
            self._forget(next(iter(self._blocks)))

    def _forget(self, block: int) -> None:
        known = self._blocks.pop(block, None)
        for offset, token in enumerate(known.tokens, known.offset) if known is not None else ():
            there = self._with[offset, token]
            there.discard(block)
            if not there:
                del self._with[offset, token]

    def _pairs(self, span: Span, end: int) -> list[_Pair]:
        """Loaded blocks with others that have the same token at an offset, those with most first."""
        found: list[_Pair] = []
        last = end // self.size
        for place in range(max(0, last - _MOST_BLOCKS), last):
            block, first = self._block(span, place), place * self.size
            if not block:
                continue
            tokens = span.tokens[first : first + self.size]
            here = (self._with.get(at, ()) for at in enumerate(tokens))
            for other, same in Counter(one for others in here for one in others).items():
                known = self._blocks[other]
                # The same tokens in the same place are alike in every layer.
                if other != block and (known.start != first or same < len(known.tokens)):
                    found.append(_Pair(block, other, known.computed, same, first))
            self._know(block, _Block(tokens, 0, False, first))
        found.sort(key=lambda pair: -pair.same)
        return found[:_MOST_PAIRS]

    def _block(self, span: Span, place: int) -> int:
        """Its number; 0: none."""
        table = span.tables[self.group] if self.group < len(span.tables) else ()
        return table[place] if place < len(table) else 0

    def _compared(self, torch: Any, pairs: Sequence[_Pair], tensors: Mapping[str, Any]) -> Any:
        first = self.layers[0]
        device = tensors[first.name].device
        ones = _there(torch, [pair.block for pair in pairs], device)
        others = _there(torch, [pair.other for pair in pairs], device)
        computed = _there(torch, [int(pair.computed) for pair in pairs], device)[:, None] != 0
        same = _there(torch, [pair.same for pair in pairs], device)
        right = _read(torch, tensors[first.name], first, others)
        of_token = torch.full_like(same, right.shape[1] // self.size)
        columns = [of_token, same]
        for layer in self.layers:
            tensor = tensors[layer.name]
            other = torch.where(computed, right, _read(torch, tensor, layer, others))
            columns.append(_alike(torch, _read(torch, tensor, layer, ones), other))
        return torch.stack([column.to(torch.float32) for column in columns], dim=1)


def votes(looks: Sequence[Look], compared: Sequence[Sequence[float]]) -> list[list[int]]:
    """How many pairs of each look are alike in a layer, and clearly in no other; ``compared``: as of
    :meth:`SameTokens.look`."""
    found, at = [], 0
    for look in looks:
        counts = [0] * (len(compared[0]) - 2)
        for of_token, same, *layers in compared[at : at + look.pairs]:
            most = max(layers)
            layer = layers.index(most)
            others = max(layers[:layer] + layers[layer + 1 :])
            if of_token >= _LEAST and most >= same * of_token * _ALIKE and most >= others * _CLEAR:
                counts[layer] += 1
        at += look.pairs
        found.append(counts)
    return found


def _read(torch: Any, tensor: Any, layer: Place, blocks: Any) -> Any:
    """Shape (blocks, numbers in one)."""
    some = blocks
    if layer.split > 1:
        own = torch.arange(layer.split, device=blocks.device)
        some = (blocks[:, None] * layer.split + own).reshape(-1)
    return tensor.index_select(layer.dim, some).movedim(layer.dim, 0).reshape(len(blocks), -1)


def _there(torch: Any, numbers: Sequence[int], device: Any) -> Any:
    """On the device, without a wait for it."""
    made = torch.tensor(numbers, dtype=torch.int64)
    return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)


def _alike(torch: Any, one: Any, other: Any) -> Any:
    """How many numbers of each block are the same; shape (blocks,)."""
    size = one.element_size()
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    one, other = one.view(whole), other.view(whole)
    near = (one - other).abs() <= _NEAR[size] if _NEAR[size] else one == other
    return (near & (other != 0)).sum(1)
