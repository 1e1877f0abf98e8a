"""What the workers' spools say about the steps with loads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtrace.ledger.reported import caught_line
from kvtrace.ledger.run import Worker
from kvtrace.ledger.scan import SpoolScan
from kvtrace.ledger.slots.touches import columns_by_id, columns_of
from kvtrace.ledger.steps import NEVER, Array, Mask, locate, of_engine
from kvtrace.trace import facts, hooks, ops, rows
from kvtrace.trace.format import STEP_SHIFT, Flag, Kind, pack_head
from kvtrace.trace.reader import Records

MAX_STEPS = 20_000
"""Load steps of a worker that are looked at in detail; what comes after them is taken as declared."""

R = TypeVar("R", rows.HookCall, rows.OpCall, rows.Effect)

_UPDATES = [op.code for op in ops.UPDATES]
_LOADING = frozenset(hook.name for hook in hooks.LOADING)
_MAX_COMPLAINTS = 4


class LoadStepBit(IntFlag):
    """What was seen of start_load_kv in one step. WATCHED, UNWATCHED: of what names no layer."""

    STARTED = 1
    RAISED = 2
    WATCHED = 4
    UNWATCHED = 8


class PairBit(IntFlag):
    """What was seen of one layer in one step."""

    WATCHED = 1
    UNWATCHED = 2
    WAIT_RAISED = 4
    WAIT_WATCHED = 8


@dataclass(frozen=True)
class WorkerLoads:
    """What one worker did in the steps with loads. Rows are steps, columns its KV layers."""

    steps: Array
    step: NDArray[np.uint8]  # StepBit
    started_t: Array  # end of start_load_kv, 0 where it did not run
    pair: NDArray[np.uint8]  # PairBit
    wait_t: Array  # begin of the layer's first wait, NEVER
    op_t: Array  # begin of the layer's first attention body, NEVER
    wrote: Array  # slots measured

    def row(self, step: int) -> int:
        """-1 where the step is none of these."""
        at = int(np.searchsorted(self.steps, step))
        return at if at < len(self.steps) and int(self.steps[at]) == step else -1

    def has(self, at: int, bit: LoadStepBit) -> bool:
        return bool(self.step[at] & np.uint8(bit))

    def ever(self, bit: LoadStepBit) -> bool:
        """Whether any step has that bit."""
        return bool((self.step & np.uint8(bit)).any())

    def having(self, at: int, bit: PairBit) -> Mask:
        """Which layers of a step have that bit."""
        result: Mask = (self.pair[at] & np.uint8(bit)) != 0
        return result

    def measured(self, at: int, waits: bool) -> Array:
        """Slots that the hooks of a step wrote into each layer; -1 where not all of them were watched.

        ``waits``: wait_for_layer_load does something in this connector, and counts too.
        """
        wrote = self.wrote[at]
        # A start_load_kv that touched no layer says so once; of one that touched some, nothing is
        # known about the others: it may have left them to a thread.
        whole: Mask = np.full(len(wrote), self.has(at, LoadStepBit.WATCHED))
        if waits:
            whole &= self.having(at, PairBit.WAIT_WATCHED)
        unknown = self.having(at, PairBit.UNWATCHED) | self.has(at, LoadStepBit.UNWATCHED)
        return np.where(~unknown & ((wrote > 0) | whole), wrote, -1)


@dataclass(frozen=True)
class LoadErrors:
    """Blocks that a worker reported as not loaded; several workers say the same."""

    t: int
    step: int
    blocks: int


@dataclass(frozen=True)
class LoadEvidence:
    """The workers' side of loads."""

    workers: Mapping[tuple[int, str], WorkerLoads]  # by Worker.key
    errors: Mapping[int, Sequence[LoadErrors]]  # by engine
    complaints: Mapping[int, Sequence[str]]  # step -> what a load hook logged or swallowed there


def evidence(scans: Sequence[SpoolScan], workers: Sequence[Worker], steps: Array) -> LoadEvidence:
    """Read the workers' spools once more.

    Args:
        steps: sorted, distinct steps with loads, of all engines.

    Raises:
        SpoolError: a spool vanished.
    """
    found: dict[tuple[int, str], WorkerLoads] = {}
    errors: dict[int, list[LoadErrors]] = defaultdict(list)
    at_work = {worker.spool for worker in workers}
    for scan in scans:
        if scan.name not in at_work:
            continue
        readers = [
            _WorkerReader(worker, steps, scan.names) for worker in workers if worker.spool == scan.name
        ]
        for chunk, kinds in scan.calls():
            for engine, reported in _errors(chunk[(chunk[:, 0] & _CALL == _NAMED) & (kinds == Kind.HOOK)]):
                errors[engine].append(reported)
            near = np.flatnonzero(locate(steps, chunk[:, _STEP])[1])
            here = chunk[near[_HAS_LOADS[kinds[near]]]]
            for reader in readers if len(here) else ():
                reader.add(here)
        found.update({reader.worker.key: reader.found for reader in readers})
    spoken = [scan for scan in scans if scan.name in at_work]
    return LoadEvidence(found, errors, _complaints(spoken))


def written(scans: Sequence[SpoolScan], workers: Sequence[Worker]) -> set[int]:
    """Steps whose save hooks were seen to write files."""
    found: set[int] = set()
    at_work = {worker.spool for worker in workers}
    for scan in scans:
        if scan.name in at_work:
            effect = rows.columns(rows.Effect, scan.effects)
            stores = ((rows.flags(effect.head) & Flag.STORE) != 0) & (effect.files > 0)
            found.update(np.unique(effect.step[stores]).tolist())
    return found


def _complaints(scans: Sequence[SpoolScan]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = defaultdict(list)
    for scan in scans:
        for _, fact in scan.documents:
            if isinstance(fact, facts.LogFact):
                line = f'{fact.hook} logged "{fact.message[:200]}" ({fact.level.lower()})'
            elif isinstance(fact, facts.SwallowedFact):
                line = caught_line(fact.hook, fact)
            else:
                continue
            if fact.hook in _LOADING and fact.step > 0 and line not in found[fact.step]:
                found[fact.step].append(line)
    return {step: lines[:_MAX_COMPLAINTS] for step, lines in found.items()}


_HAS_LOADS = np.isin(np.arange(256), (Kind.HOOK, Kind.OP, Kind.EFFECT))
_STEP = rows.HookCall._fields.index("step")  # of an OP and EFFECT, too
_CALL = pack_head(0xFF, code=0xFF, flags=Flag.RAISED)
_NAMED = pack_head(Kind.HOOK, code=hooks.LOAD_ERRORS.code)


def _errors(chunk: Records) -> Iterable[tuple[int, LoadErrors]]:
    """(engine, report) of each call that named blocks as not loaded."""
    call = rows.columns(rows.HookCall, chunk)
    for t, step, blocks in zip(call.t0.tolist(), call.step.tolist(), call.extra.tolist(), strict=True):
        if blocks > 0:
            yield step >> STEP_SHIFT, LoadErrors(t, step, blocks)


class _WorkerReader:
    """Gathers what one worker did."""

    def __init__(self, worker: Worker, steps: Array, names: Mapping[int, str]) -> None:
        self.worker = worker
        self._columns = columns_by_id(names, worker)
        own = of_engine(steps, worker.engine)[:MAX_STEPS]
        n, shape = len(own), (len(own), len(worker.kv_layers))
        self.found = WorkerLoads(
            steps=own,
            step=np.zeros(n, np.uint8),
            started_t=np.zeros(n, np.int64),
            pair=np.zeros(shape, np.uint8),
            wait_t=np.full(shape, NEVER, np.int64),
            op_t=np.full(shape, NEVER, np.int64),
            wrote=np.zeros(shape, np.int64),
        )

    def add(self, chunk: Records) -> None:
        """Records of any kind."""
        head = chunk[:, 0]
        kinds, codes, marks = rows.kind(head), rows.code(head), rows.flags(head)
        called = kinds == Kind.HOOK
        self._add_starts(self._in_steps(rows.HookCall, chunk[called & (codes == hooks.START_LOAD.code)]))
        self._add_waits(self._in_steps(rows.HookCall, chunk[called & (codes == hooks.WAIT_LAYER.code)]))
        bodies = (kinds == Kind.OP) & ~np.isin(codes, _UPDATES) & ((marks & Flag.CAPTURE) == 0)
        self._add_bodies(self._in_steps(rows.OpCall, chunk[bodies]))
        loaded = (kinds == Kind.EFFECT) & ((marks & Flag.LOAD) != 0)
        self._add_effects(self._in_steps(rows.Effect, chunk[loaded]))

    def _in_steps(self, row: type[R], table: Records) -> R:
        """Those of the records that lie in a step with loads."""
        step = rows.columns(row, table).step
        return rows.columns(row, table[locate(self.found.steps, step)[1]])

    def _at(self, step: Array, layer: Array) -> tuple[Array, Array]:
        """Row and column of each call; column -1: no KV layer of this worker."""
        return locate(self.found.steps, step)[0], columns_of(layer, self._columns)

    def _add_starts(self, call: rows.HookCall) -> None:
        at, _ = locate(self.found.steps, call.step)
        raised = (rows.flags(call.head) & Flag.RAISED) != 0
        np.bitwise_or.at(self.found.step, at, np.uint8(LoadStepBit.STARTED))
        np.bitwise_or.at(self.found.step, at[raised], np.uint8(LoadStepBit.RAISED))
        np.maximum.at(self.found.started_t, at, call.t1)

    def _add_waits(self, call: rows.HookCall) -> None:
        at, column = self._at(call.step, call.layer)
        known = column >= 0
        np.minimum.at(self.found.wait_t, (at[known], column[known]), call.t0[known])
        raised = known & ((rows.flags(call.head) & Flag.RAISED) != 0)
        np.bitwise_or.at(self.found.pair, (at[raised], column[raised]), np.uint8(PairBit.WAIT_RAISED))

    def _add_bodies(self, call: rows.OpCall) -> None:
        at, column = self._at(call.step, call.layer)
        known = column >= 0
        np.minimum.at(self.found.op_t, (at[known], column[known]), call.t0[known])

    def _add_effects(self, effect: rows.Effect) -> None:
        at, column = self._at(effect.step, effect.layer)
        known = column >= 0
        codes = rows.code(effect.head)
        if self.worker.connector is not None:
            # A connector in another one is seen twice: the outer one counts.
            outer = known & (rows.detail(effect.head) == (self.worker.connector.ordinal & 0xFF))
            known = outer if outer.any() else known
        watched, unwatched = known & (effect.slots >= 0), known & (effect.slots < 0)
        for part, bit in (
            (watched, PairBit.WATCHED),
            (unwatched, PairBit.UNWATCHED),
            (watched & (codes == hooks.WAIT_LAYER.code), PairBit.WAIT_WATCHED),
        ):
            np.bitwise_or.at(self.found.pair, (at[part], column[part]), np.uint8(bit))
        np.add.at(self.found.wrote, (at[watched], column[watched]), effect.slots[watched])
        whole = (codes == hooks.START_LOAD.code) & (effect.layer == 0)
        np.bitwise_or.at(self.found.step, at[whole & (effect.slots == 0)], np.uint8(LoadStepBit.WATCHED))
        np.bitwise_or.at(self.found.step, at[whole & (effect.slots < 0)], np.uint8(LoadStepBit.UNWATCHED))
