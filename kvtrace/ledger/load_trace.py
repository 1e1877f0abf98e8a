"""What the spools say about loads: the scheduler's side request by request, the workers' step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvtrace.ledger.model import Worker
from kvtrace.ledger.requests import Request
from kvtrace.ledger.scan import Array, SpoolScan
from kvtrace.trace import facts
from kvtrace.trace.format import (
    HOOK_CODE,
    NONE_ANSWER,
    OP_CODE,
    STEP_MASK,
    STEP_SHIFT,
    Flag,
    Kind,
    Role,
)
from kvtrace.trace.reader import Records, Spool, code, detail, flags, kind

NEVER = (1 << 62) - 1
"""The time of what did not happen."""

MAX_STEPS = 20_000
"""Load steps of a worker that are looked at in detail; what comes after them is taken as declared."""

_START, _WAIT = HOOK_CODE["start_load_kv"], HOOK_CODE["wait_for_layer_load"]
_ERRORS = HOOK_CODE["get_block_ids_with_load_errors"]
_UPDATES = np.array([OP_CODE["unified_kv_cache_update"], OP_CODE["unified_mla_kv_cache_update"]])

# Bits of WorkerLoads.step and .pair
STARTED, START_RAISED, START_WATCHED, START_UNWATCHED = 1, 2, 4, 8
WATCHED, UNWATCHED, WAIT_RAISED, WAIT_WATCHED = 1, 2, 4, 8


@dataclass
class Asked:
    t: int
    step: int
    local: int
    answer: int | None
    asynchronous: bool


@dataclass
class Done:
    t: int
    step: int
    spool: str  # "" where the scheduler was told
    failed: bool


@dataclass
class Story:
    """The scheduler's records about one request's loads, in order."""

    asked: list[Asked] = field(default_factory=list)
    allocated: list[tuple[int, int, int]] = field(default_factory=list)  # t, step, external
    entries: list[tuple[int, int, int]] = field(default_factory=list)  # step, slots, start
    done: list[Done] = field(default_factory=list)
    stores: int = 0  # asynchronous saves that began, less those that ended
    finish_t: int = 0
    chunk_t: int = 0
    prefixes: dict[int, int] = field(default_factory=dict)  # digest -> tokens


@dataclass
class WorkerLoads:
    """What one worker did in the steps with loads. Rows are steps, columns its KV layers."""

    steps: Array
    step: NDArray[np.uint8]
    started_t: Array  # end of start_load_kv, 0 where it did not run
    slots: Array  # load slots that the metadata bound there declares, -1 unknown
    pair: NDArray[np.uint8]
    wait_t: Array  # begin of the layer's first wait, NEVER
    op_t: Array  # begin of the layer's first attention body, NEVER
    wrote: Array  # slots measured

    def measured(self, at: int, pair: int, waits: bool) -> int:
        """Slots that the hooks of a step wrote into a pair; -1 where not all of them were watched.

        ``waits``: wait_for_layer_load does something in this connector, and counts too.
        """
        step, seen = int(self.step[at]), int(self.pair[at, pair])
        if seen & UNWATCHED or step & START_UNWATCHED:
            return -1
        wrote = int(self.wrote[at, pair])
        # A start_load_kv that touched no layer says so once; of one that touched some, nothing is
        # known about the others: it may have left them to a thread.
        whole = step & START_WATCHED and (not waits or seen & WAIT_WATCHED)
        return wrote if wrote or whole else -1

    def row(self, step: int) -> int:
        """-1 where the step is none of these."""
        at = int(np.searchsorted(self.steps, step))
        return at if at < len(self.steps) and int(self.steps[at]) == step else -1


@dataclass
class Evidence:
    workers: dict[tuple[int, str], WorkerLoads] = field(default_factory=dict)
    errors: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    """Engine -> (t, step, blocks) that a worker reported as not loaded; several workers say the same."""
    complaints: dict[int, list[str]] = field(default_factory=dict)
    """Step -> what a load hook logged or swallowed there."""


# ---------------------------------------------------------------------------- scheduler


def stories(scans: list[SpoolScan], requests: list[Request]) -> list[Story]:
    """One a request, in the order of ``requests``."""
    found = [Story() for _ in requests]
    by_id: dict[str, list[int]] = {}
    for row, request in enumerate(requests):
        by_id.setdefault(request.id, []).append(row)
    for scan in scans:
        _read(scan, requests, by_id, found)
    for story in found:
        story.asked.sort(key=lambda asked: asked.t)
        story.allocated.sort()
        story.done.sort(key=lambda done: done.t)
    return found


def _read(scan: SpoolScan, requests: list[Request], by_id: dict[str, list[int]], found: list[Story]) -> None:
    arrived: dict[int, int] = {}  # name id -> row

    def story(name_id: int, step: int, t: int) -> Story | None:
        rows = by_id.get(scan.names.get(name_id, ""))
        if not rows:
            return None
        tag = step >> STEP_SHIFT
        rows = [row for row in rows if not tag or requests[row].engine == tag]
        before = [row for row in rows if requests[row].t_first <= t]
        return found[before[-1] if before else rows[0]] if rows else None

    for w0, a, b, c, d, e, f, g in scan.rows.tolist():
        what, marks = w0 & 0xFF, (w0 >> 32) & 0xFFFF
        mine: Story | None
        if what == Kind.LOOKUP and (mine := story(d, c, a)):
            answer = None if f == NONE_ANSWER else f
            mine.asked.append(Asked(a, c, max(0, e), answer, bool(marks & Flag.ASYNC)))
        elif what == Kind.ALLOC and (mine := story(d, c, a)):
            mine.allocated.append((a, c, e))
        elif what == Kind.META and marks & Flag.LOAD and b and c & STEP_MASK and (mine := story(b, c, a)):
            entry = (c, d, f)
            if entry not in mine.entries[-8:]:  # a connector in another one says the same again
                mine.entries.append(entry)
        elif what == Kind.CHUNK and (mine := story(b, c, a)):
            mine.chunk_t = mine.chunk_t or a
        elif what == Kind.FINISH and (mine := story(b, c, a)):
            mine.finish_t = a
        elif what == Kind.OPEN and marks & Flag.STORE and (mine := story(b, c, a)):
            mine.stores += 1
        elif what == Kind.DONE and (mine := story(b, c, a)):
            if marks & Flag.LOAD:
                of_worker = (w0 >> 8) & 0xFF == Role.WORKER
                mine.done.append(Done(a, c, scan.path.name if of_worker else "", d > 0))
            elif (w0 >> 8) & 0xFF == Role.SCHEDULER:
                mine.stores -= 1
        elif what == Kind.REQUEST:
            rows = [row for row in by_id.get(scan.names.get(b, ""), ()) if requests[row].t_first <= a]
            if rows:
                arrived[b] = rows[-1]
        elif what == Kind.PREFIX and a in arrived and b > 0 and c > 0:
            for i, digest in enumerate((d, e, f, g)):
                if digest:
                    found[arrived[a]].prefixes[digest] = b + i * c


# ------------------------------------------------------------------------------ workers


def evidence(joined: Sequence[tuple[SpoolScan, Worker]], steps: Array) -> Evidence:
    """Read the workers' spools once more.

    Args:
        steps: sorted, distinct steps with loads, of all engines.
    """
    result = Evidence()
    by_spool: dict[str, list[Worker]] = {}
    scans: dict[str, SpoolScan] = {}
    for scan, worker in joined:
        by_spool.setdefault(scan.path.name, []).append(worker)
        scans[scan.path.name] = scan
    for name, workers in by_spool.items():
        _complaints(scans[name], result)
        _worker_spool(scans[name], workers, steps, result)
    return result


def written(joined: Sequence[tuple[SpoolScan, Worker]]) -> set[int]:
    """Steps whose save hooks were seen to write files."""
    found: set[int] = set()
    for scan, _ in joined:
        effects = scan.effects
        stores = ((flags(effects[:, 0]) & int(Flag.STORE)) != 0) & (effects[:, 6] > 0)
        found.update(np.unique(effects[stores, 3]).tolist())
    return found


def _complaints(scan: SpoolScan, result: Evidence) -> None:
    for _, fact in scan.documents:
        if isinstance(fact, facts.Log):
            line = f'{fact.hook} logged "{fact.message[:200]}" ({fact.level.lower()})'
        elif isinstance(fact, facts.Swallowed):
            line = f"{fact.hook} raised and caught {fact.type}: {fact.message[:160]} (at {fact.where})"
        else:
            continue
        if fact.hook not in ("start_load_kv", "wait_for_layer_load") or fact.step <= 0:
            continue
        known = result.complaints.setdefault(fact.step, [])
        if line not in known and len(known) < 4:
            known.append(line)


def _worker_spool(scan: SpoolScan, workers: list[Worker], steps: Array, result: Evidence) -> None:
    tables: dict[int, tuple[Worker, WorkerLoads, dict[str, int]]] = {}
    for worker in workers:
        own = steps[(steps >> STEP_SHIFT) == worker.engine][:MAX_STEPS]
        shape = (len(own), len(worker.kv_layers))
        loads = WorkerLoads(
            steps=own,
            step=np.zeros(len(own), np.uint8),
            started_t=np.zeros(len(own), np.int64),
            slots=np.full(len(own), -1, np.int64),
            pair=np.zeros(shape, np.uint8),
            wait_t=np.full(shape, NEVER, np.int64),
            op_t=np.full(shape, NEVER, np.int64),
            wrote=np.zeros(shape, np.int64),
        )
        result.workers[worker.key] = loads
        tables[worker.engine] = (worker, loads, {name: i for i, name in enumerate(worker.kv_layers)})
    spool = Spool(scan.path)
    for chunk in spool.chunks():
        head = chunk[:, 0]
        kinds, codes = kind(head), code(head)
        wrong = chunk[(kinds == Kind.HOOK) & (codes == _ERRORS) & (chunk[:, 7] > 0)]
        for row in wrong[(flags(wrong[:, 0]) & int(Flag.RAISED)) == 0].tolist():
            result.errors.setdefault(row[3] >> STEP_SHIFT, []).append((row[1], row[3], row[7]))
        effects = kinds == Kind.EFFECT
        wanted = (kinds == Kind.HOOK) & ((codes == _START) | (codes == _WAIT))
        wanted |= (kinds == Kind.OP) & ~np.isin(codes, _UPDATES) & ((flags(head) & int(Flag.CAPTURE)) == 0)
        wanted |= effects & ((flags(head) & int(Flag.LOAD)) != 0)
        rows = chunk[wanted]
        if not len(rows):
            continue
        tags = rows[:, 3] >> STEP_SHIFT
        for tag, (worker, loads, layers) in tables.items():
            _rows(rows[tags == tag], worker, loads, layers, spool.names)


def _rows(
    rows: Records, worker: Worker, loads: WorkerLoads, layers: dict[str, int], names: dict[int, str]
) -> None:
    at = np.searchsorted(loads.steps, rows[:, 3])
    inside = at < len(loads.steps)
    inside[inside] = loads.steps[at[inside]] == rows[inside, 3]
    rows, at = rows[inside], at[inside]
    if not len(rows):
        return
    head = rows[:, 0]
    kinds, codes, marks = kind(head), code(head), flags(head)
    raised = (marks & int(Flag.RAISED)) != 0
    start = (kinds == Kind.HOOK) & (codes == _START)
    np.bitwise_or.at(loads.step, at[start], np.uint8(STARTED))
    np.bitwise_or.at(loads.step, at[start & raised], np.uint8(START_RAISED))
    np.maximum.at(loads.started_t, at[start], rows[start, 2])
    np.maximum.at(loads.slots, at[start & ~raised], rows[start & ~raised, 5])
    column_of_layer = np.where(kinds == Kind.EFFECT, rows[:, 2], rows[:, 4])
    column: Array = np.full(len(rows), -1, np.int64)
    for ident in np.unique(column_of_layer).tolist():
        column[column_of_layer == ident] = layers.get(names.get(ident, ""), -1)
    known = column >= 0
    wait = known & (kinds == Kind.HOOK) & (codes == _WAIT)
    np.minimum.at(loads.wait_t, (at[wait], column[wait]), rows[wait, 1])
    np.bitwise_or.at(loads.pair, (at[wait & raised], column[wait & raised]), np.uint8(WAIT_RAISED))
    op = known & (kinds == Kind.OP)
    np.minimum.at(loads.op_t, (at[op], column[op]), rows[op, 1])
    effect = known & (kinds == Kind.EFFECT)
    if worker.connector is not None:
        # A connector in another one is seen twice: the outer one counts.
        outer = effect & (detail(head) == (worker.connector.ordinal & 0xFF))
        effect = outer if outer.any() else effect
    watched, dark = effect & (rows[:, 4] >= 0), effect & (rows[:, 4] < 0)
    for part, bit in ((watched, WATCHED), (dark, UNWATCHED), (watched & (codes == _WAIT), WAIT_WATCHED)):
        np.bitwise_or.at(loads.pair, (at[part], column[part]), np.uint8(bit))
    np.add.at(loads.wrote, (at[watched], column[watched]), rows[watched, 4])
    nothing = (kinds == Kind.EFFECT) & (codes == _START) & (rows[:, 2] == 0)
    np.bitwise_or.at(loads.step, at[nothing & (rows[:, 4] == 0)], np.uint8(START_WATCHED))
    np.bitwise_or.at(loads.step, at[nothing & (rows[:, 4] < 0)], np.uint8(START_UNWATCHED))
