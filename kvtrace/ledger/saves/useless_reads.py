"""Slots that were read in the place of others, where no metadata names those.

Two things together show it, in one layer of one worker: slots were read that can be of no use (blocks that no
request holds, the null block, slots that the step had read already, tokens of requests that are over and that
had been read before); and tokens were left out that no unit leaves out (others behind them were read, or
nothing of their request). One of the two alone says nothing: units and keys leave tokens out, and some
connectors read too much.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kvtrace.ledger.intervals import Interval, intersect, length, subtract, union
from kvtrace.ledger.requests import ComputedChunk, Request
from kvtrace.ledger.run import Engine
from kvtrace.ledger.saves.stores import positions
from kvtrace.ledger.saves.watched import Watched
from kvtrace.ledger.saves.windows import windows_of
from kvtrace.ledger.slots.reads import Slots, covered, in_layer

Holes = dict[int, list[Interval]]
"""Row of a request -> its positions that were not read."""


@dataclass(frozen=True)
class OtherSlots:
    """What one worker read in the place of other slots.

    Attributes:
        steps: -> the layers, a bit each, whose reads in that step stand for other tokens.
        missed: (step, row of a request, layer) -> positions that the step computed and in whose place others
            were read.
    """

    steps: Mapping[int, int] = field(default_factory=dict)
    missed: Mapping[tuple[int, int, int], Sequence[Interval]] = field(default_factory=dict)


def other_slots(
    watched: Watched, requests: Mapping[int, Request], engine: Engine, pending: Set[int]
) -> OtherSlots:
    """What a worker read instead of its steps' tokens. Of models with windows or several KV cache groups
    nothing is said: layers with a window need no more than their last blocks.

    Args:
        requests: those of the engine, by row.
        pending: rows of those whose asynchronous save was under way when the trace ended: nothing of them
            was missed, as it may be read yet.
    """
    slots, size = watched.slots, max(1, engine.block_size)
    computing, settled = _computing(watched, requests)
    steps: dict[int, int] = defaultdict(int)
    missed: dict[tuple[int, int, int], list[Interval]] = {}
    begun = _Begun(requests)
    one_kind = len(engine.facts.kv_groups) < 2 and not windows_of(engine, watched.worker)
    columns = len(watched.worker.kv_layers) if one_kind else 0
    layers = [_Layer(slots, begun, column, size, pending) for column in range(columns)]
    read_in: dict[int, list[int]] = defaultdict(list)
    for step, at in slots.amounts:
        if step in computing:
            read_in[at].append(step)
    for column, layer in enumerate(layers):
        read = read_in[column]
        again = {
            step: slots.amount(step, column).repeated + watched.read_repeatedly(step, column)
            for step in settled.intersection(read)
        }
        useless = {
            step for step in read if _useless(slots, requests, step, column) + again.get(step, 0) >= size
        }
        if not useless:
            continue
        odd = {}
        for step in read:
            others = slots.read_in[step] - {row for row, _ in computing[step]}
            chunks = computing[step] if step in useless or others else layer.begun(computing[step])
            if found := layer.unread(chunks, True):
                odd[step] = found
        odd |= {
            step: found
            for step in settled.difference(read)
            if (found := layer.unread(layer.begun(computing[step]), True))
        }
        ends = {step: found for step in useless if (found := layer.unread(computing[step], False))}
        for step, found in {**ends, **odd}.items() if odd else ():
            steps[step] |= 1 << column
            for row, parts in found.items():
                missed[step, row, column] = parts
    for step, column in slots.amounts:
        if column in slots.off:
            steps[step] |= 1 << column
    return OtherSlots(dict(steps), missed)


def _computing(
    watched: Watched, requests: Mapping[int, Request]
) -> tuple[dict[int, list[tuple[int, ComputedChunk]]], set[int]]:
    """The chunks of each step, with the rows of their requests; and the steps of which all is known that was
    read."""
    found: dict[int, list[tuple[int, ComputedChunk]]] = defaultdict(list)
    for row, request in requests.items():
        for chunk in request.chunks:
            found[chunk.step].append((row, chunk))
    steps = np.array(sorted(found), dtype=np.int64)
    return found, set(steps[~watched.blind(steps)].tolist())


def _useless(slots: Slots, requests: Mapping[int, Request], step: int, column: int) -> int:
    """Slots that were read in a step in a layer and can be of no use, whatever else was read; without those
    that the step had read already."""
    amount, over, mine = slots.amount(step, column), 0, 0
    here = slots.read_in.get(step, frozenset())
    for row in here if any(0 < requests[row].last_step < step for row in here) else ():
        now = slots.read_of(row, column, step)
        if 0 < requests[row].last_step < step:
            before = covered(one for one in in_layer(slots.reads[row], column) if one.step < step)
            over += length(intersect(now, before))
        else:
            mine += length(now)
    # A block of a request that is over may be another one's too, by the GPU's prefix cache.
    return amount.blank + max(0, min(over, amount.read - amount.blank - amount.repeated - mine))


class _Begun:
    """In which steps the requests began that begin with the same tokens."""

    def __init__(self, requests: Mapping[int, Request]) -> None:
        self.requests = requests

    def by_another(self, digest: int, row: int, step: int) -> bool:
        """Whether any request but `row` that begins with these tokens had begun by `step`."""
        return any(first <= step for first, other in self._first_two[digest] if other != row)

    @cached_property
    def _first_two(self) -> dict[int, list[tuple[int, int]]]:
        """Digest of a beginning -> the first two requests with it: (step of the first chunk, row)."""
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for row, request in self.requests.items():
            for digest in request.prefixes if request.chunks else ():
                found[digest] = sorted([*found[digest], (request.chunks[0].step, row)])[:2]
        return found


class _Layer:
    """What was read of requests in one layer, at whatever time."""

    def __init__(self, slots: Slots, begun: _Begun, column: int, size: int, pending: Set[int]) -> None:
        self._slots, self._requests, self._first = slots, begun.requests, begun
        self._column, self._size, self._pending = column, size, pending

    def begun(self, chunks: Iterable[tuple[int, ComputedChunk]]) -> list[tuple[int, ComputedChunk]]:
        """Those of requests of which anything was read."""
        return [one for one in chunks if in_layer(self._slots.reads.get(one[0], ()), self._column)]

    def unread(self, chunks: Iterable[tuple[int, ComputedChunk]], odd: bool) -> Holes:
        """Whole blocks that chunks completed and that were never read.

        Args:
            odd: those alone that no unit leaves out.
        """
        found: Holes = {}
        for row, chunk in chunks:
            read = self._slots.read_of(row, self._column)
            reach = max((end for _, end in read), default=0)
            left = [
                part for part in self._unread(row, chunk, read) if not (odd and read and part[0] >= reach)
            ]
            if left:
                found[row] = left
        return found

    def _unread(self, row: int, chunk: ComputedChunk, read: list[Interval]) -> list[Interval]:
        request, size = self._requests[row], self._size
        low, high = chunk.start // size * size, min(chunk.end, request.prompt) // size * size
        if high <= low or self._slots.tables.get(row, 0) < high or row in self._pending:
            return []
        # Of what the metadata names it is known already whether other slots were read instead.
        named = [positions(request, one) for one in request.entries if not one.implied]
        shared = (0, self.shared(row, chunk.step))
        known = union([*read, *named, *request.reused, *request.external, shared])
        return [part for part in subtract([(low, high)], known) if part[1] - part[0] >= size]

    def shared(self, row: int, step: int) -> int:
        """Leading positions of a request that an earlier one has too, or that the connector has."""
        request = self._requests[row]
        lookup = request.looked_up
        shared = lookup.local + max(0, lookup.answer or 0) if lookup else 0
        for digest, tokens in request.prefixes.items():
            if tokens > shared and self._first.by_another(digest, row, step):
                shared = tokens
        return shared
