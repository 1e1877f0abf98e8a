"""PRINTS and REPRINTS records as blocks of requests: which tokens, and where their KV came from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import NamedTuple

from kvtrace.ledger.intervals import Interval, intersect, length, union
from kvtrace.ledger.requests import Request
from kvtrace.ledger.run import Engine, Worker
from kvtrace.ledger.scan import SpoolScan
from kvtrace.trace import rows
from kvtrace.trace.format import STEP_SHIFT
from kvtrace.trace.reader import Records, layers_in

ZEROES = 1
"""The fingerprint of a block of zeroes: it says nothing about whose it is."""


_MOST_BLOCKS = 1 << 20
"""Of one record: more is damage."""


class Origin(Enum):
    """Where the KV of a block came from, at the end of a step."""

    COMPUTED = auto()
    LOADED = auto()
    OTHER = auto()
    """From the GPU's own prefix cache, of several origins, of a step whose results vLLM threw away, or not
    known."""


class Block(NamedTuple):
    """One full block of a prompt: tokens [start, end), as it stood at the end of ``step``."""

    row: int
    start: int
    end: int
    step: int
    value: int
    origin: Origin


class Shape(NamedTuple):
    """Workers of one shape compute the same KV of the same tokens, and lay it out as the same bytes: their
    fingerprints can be compared."""

    rank: tuple[int, ...]
    tp: int
    block_size: int
    layers: tuple[str, ...]
    model: str
    dtype: str | None


Numbers = Mapping[int, int]
"""Number of a layer in its shape -> of that layer's KV in a block; 0: none, or nothing but zeroes."""


@dataclass(frozen=True)
class Printed:
    """The blocks of one worker and KV cache group, in the order of their steps.

    Attributes:
        pairs: of the engine, a bit each: the group's layers on that worker.
        group: its number.
        whole: every block of a prompt stays in use: of full attention.
        later: loaded blocks as they stood some time after their first use, in the order of their steps.
    """

    shape: Shape
    engine: int
    pairs: int
    blocks: Sequence[Block]
    group: int = 0
    whole: bool = False
    later: Sequence[Block] = ()
    numbers: Callable[[], Mapping[tuple[int, int, int], Numbers]] = dict
    """Reads, by (row, begin, step) of a block, those of its layers."""
    sketches: Callable[[], Mapping[tuple[int, int, int], int]] = dict
    """Reads, by the same, how a block's KV is sketched."""


class _PrintRecords(NamedTuple):
    """A worker's records, and whose requests they speak of. ``by_id``: (engine, name) -> rows of requests."""

    engine: Engine
    scan: SpoolScan
    by_id: Mapping[tuple[int, str], Sequence[int]]
    requests: Sequence[Request]

    def row(self, request: int, step: int) -> int | None:
        """Of the request with this name id; of several with the same one the latest that had begun."""
        named = self.by_id.get((self.engine.tag, self.scan.names.get(request, "")), ())
        begun = [row for row in named if self.requests[row].first_step <= step]
        return begun[-1] if begun else None

    def block_size(self, group: int) -> int:
        return self.engine.facts.kv_groups[group].block_size or 0


def printed(
    engines: Sequence[Engine],
    scans: Sequence[SpoolScan],
    requests: Sequence[Request],
    accepted: Mapping[int, Interval],
) -> list[Printed]:
    """Every worker's blocks. ``accepted``: rows of requests -> positions that the scheduler accepted from the
    connector."""
    by_name = {scan.name: scan for scan in scans}
    by_id: dict[tuple[int, str], list[int]] = defaultdict(list)
    for row, request in enumerate(requests):
        by_id[request.engine, request.id].append(row)
    found = []
    for engine in engines:
        first = 0
        for worker in engine.workers:
            scan = by_name[worker.spool]
            source = _PrintRecords(engine, scan, by_id, requests)
            blocks = _blocks(source, scan.prints, accepted)
            again = _blocks(source, scan.reprints, accepted)
            for group, of_group in blocks.items():
                shape, pairs = _shape(engine, worker, group)
                whole, later = _whole(engine, group), again.get(group, ())
                of_layers = partial(_numbers, source, group, shape.layers)
                sketches = partial(_sketched, source, group)
                found.append(
                    Printed(
                        shape, engine.tag, pairs << first, of_group, group, whole, later, of_layers, sketches
                    )
                )
            first += len(worker.kv_layers)
    return found


def _whole(engine: Engine, group: int) -> bool:
    kind = engine.facts.kv_groups[group].kind
    return any(word in kind for word in ("FullAttention", "MLAAttention"))


def _shape(engine: Engine, worker: Worker, group: int) -> tuple[Shape, int]:
    groups = engine.facts.kv_groups
    of_group = groups[group]
    # of a pipeline the scheduler knows the layers of the first rank alone
    known = of_group.layers if len(groups) > 1 else worker.kv_layers
    layers = tuple(name for name in worker.kv_layers if name in known)
    pairs = sum(1 << at for at, name in enumerate(worker.kv_layers) if name in known)
    facts = worker.facts
    rank = (worker.rank,) if facts.tp_rank is None else (facts.tp_rank, facts.pp_rank or 0)
    size, tp, model = of_group.block_size or 0, engine.facts.tp or 1, engine.facts.model
    return Shape(rank, tp, size, layers, model, of_group.dtype), pairs


def _blocks(
    source: _PrintRecords, records: Records, accepted: Mapping[int, Interval]
) -> dict[int, list[Block]]:
    """By KV cache group. ``records``: PRINTS, or REPRINTS, which have the same columns."""
    engine, requests = source.engine, source.requests
    found: dict[int, list[Block]] = defaultdict(list)
    for words in rows.one_by_one(records):
        record = rows.BlockPrints._make(words)
        group = rows.detail(record.head)
        row = source.row(record.request, record.step)
        if record.step >> STEP_SHIFT != engine.tag or row is None or group >= len(engine.facts.kv_groups):
            continue
        size = source.block_size(group)
        for place, value in _values(record):
            start, end = place * size, (place + 1) * size
            if 0 < end <= requests[row].prompt:
                origin = origin_of(requests[row], accepted.get(row), (start, end), record.step)
                found[group].append(Block(row, start, end, record.step, value, origin))
    for blocks in found.values():
        blocks.sort(key=lambda block: block.step)
    return found


def _sketched(source: _PrintRecords, group: int) -> Mapping[tuple[int, int, int], int]:
    """As Printed.sketches, of one KV cache group."""
    blocks = _blocks(source, source.scan.sketches, {}).get(group, ())
    return {(block.row, block.start, block.step): block.value for block in blocks}


def _numbers(
    source: _PrintRecords, group: int, layers: Sequence[str]
) -> Mapping[tuple[int, int, int], Numbers]:
    """As Printed.numbers, of one KV cache group."""
    found: dict[tuple[int, int, int], dict[int, int]] = defaultdict(dict)
    at = {name: number for number, name in enumerate(layers)}
    size = source.block_size(group)
    sets: dict[int, list[int | None]] = {}
    for words in rows.one_by_one(source.scan.layers):
        record = rows.LayerPrints._make(words)
        row = source.row(record.request, record.step)
        if record.layer_set not in sets:
            names = layers_in(source.scan.names, record.layer_set)
            sets[record.layer_set] = [at.get(name) for name in names]
        own = sets[record.layer_set]
        if row is None or rows.detail(record.head) != group or not 0 < len(own) <= rows.NUMBERS:
            continue
        values = _unpacked(record)
        for number in range(rows.NUMBERS // len(own)):
            start = (record.first + number) * size
            of_block = values[number * len(own) : (number + 1) * len(own)]
            # Else there is no such block, or no KV in it.
            if any(of_block) and start < source.requests[row].prompt:
                found[row, start, record.step].update(
                    (layer, value) for layer, value in zip(own, of_block, strict=True) if layer is not None
                )
    return found


def _unpacked(record: rows.LayerPrints) -> list[int]:
    words = (record.numbers0, record.numbers1, record.numbers2)
    mask = (1 << rows.NUMBER_BITS) - 1
    in_a_word = rows.NUMBERS // len(words)
    return [word >> part * rows.NUMBER_BITS & mask for word in words for part in range(in_a_word)]


def _values(record: rows.BlockPrints) -> Iterator[tuple[int, int]]:
    """(place, fingerprint) of each block that has one."""
    four = (record.print0, record.print1, record.print2, record.print3)
    return ((record.first + at, value) for at, value in enumerate(four) if value)


def origin_of(request: Request, accepted: Interval | None, block: Interval, step: int) -> Origin:
    """Where the KV of a block of a request came from, at the end of ``step``."""
    start, end = block
    if request.preemptions > 1 or (request.preempt_step and step >= request.preempt_step):
        return Origin.OTHER  # loaded and computed a second time
    here = [chunk for chunk in request.chunks if chunk.start < end and chunk.end > start]
    computed = union((chunk.start, chunk.end) for chunk in here if chunk.step <= step)
    if length(intersect([block], computed)) == end - start:
        return Origin.OTHER if intersect([block], request.computed_anew(step)) else Origin.COMPUTED
    # What is computed after all was loaded in vain: the load failed.
    if here or accepted is None or not accepted[0] <= start < end <= accepted[1]:
        return Origin.OTHER
    return Origin.LOADED
