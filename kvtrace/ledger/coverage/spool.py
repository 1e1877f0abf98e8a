"""One spool, read for its hooks and op bodies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvtrace.ledger.coverage.distinct import FIRED, OP, RAISED, WORK, Calls, Distinct, is_attention, what_of
from kvtrace.ledger.coverage.layers import Layers
from kvtrace.ledger.coverage.store_steps import StoreStepReader, StoreSteps
from kvtrace.ledger.run import Worker
from kvtrace.ledger.scan import SpoolScan
from kvtrace.ledger.side_by_side import Add, silent
from kvtrace.ledger.steps import Array, Mask, locate, real_step, spent
from kvtrace.ledger.timing import Histograms
from kvtrace.trace import hooks, ops, rows
from kvtrace.trace.format import DETAIL_IS_OP, STEP_SHIFT, Dispatch, Flag, Kind, Role, Skip
from kvtrace.trace.reader import Records

Counts = dict[tuple[str, str], tuple[int, int, int]]
"""(hook or op, layer) -> steps in which it fired, with work (of an op: called directly), and raised."""

ScheduledCalls = tuple[Counter[int], Counter[int], Counter[int]]
"""Engine tag -> steps in which the scheduler built metadata, put an entry into it, and raised."""

_QUIET_ROWS = 2048
_MOST_PENDING = 1 << 20
_BOTH_WAYS = int(Flag.STORE | Flag.LOAD)
_LAYERED = [hook.code for hook in hooks.TABLE if hook.layered]
_IS_DUE = np.isin(np.arange(256), [hook.code for hook in hooks.TABLE if hook.always_due])


@dataclass(frozen=True)
class WorkerCoverage:
    """What one worker's spool shows of it. Steps are real forward steps."""

    hooks: Counts
    ops: Counts
    skips: Mapping[int, int]  # Skip -> attention bodies in real steps
    layers_outside: frozenset[str]  # with a body or save hook in no step: capture, warm-up, profiling
    python: Mapping[int, tuple[int, int]]
    """graph mode -> layer-steps of KV layers with an attention body, and with a save hook"""
    hook_ns: Mapping[str, int]  # host time in each hook
    store_steps: StoreSteps

    @property
    def any_call(self) -> bool:
        """Whether any hook or attention body was seen: else the agent did not get in there."""
        return bool(self.hooks) or any(op not in _UPDATES for op, _ in self.ops)

    @property
    def layers_seen(self) -> set[str]:
        """Those with an attention body or a save hook in a step."""
        bodies = {layer for op, layer in self.ops if op not in _UPDATES}
        return bodies | {layer for hook, layer in self.hooks if hook == hooks.SAVE_LAYER.name}


_UPDATES = frozenset(op.name for op in ops.UPDATES)


class SpoolReader:
    """The counts of one spool. ``scheduled``: as ScheduledCalls says; ``times``: of hooks, by code."""

    def __init__(self, scan: SpoolScan, workers: Sequence[Worker], store_steps: Array) -> None:
        self._scan = scan
        self._workers = workers
        self._layers = Layers(scan.names)
        self._store_steps = store_steps
        self._distinct = Distinct(scan.executed.values())
        self._outside: set[int] = set()  # layers with a body or save hook outside of real steps
        self._spent: dict[int, Counter[int]] = {worker.engine: Counter() for worker in workers}  # hook -> ns
        self._skips: dict[int, Counter[int]] = {worker.engine: Counter() for worker in workers}
        self._stores = {w.engine: StoreStepReader(w, store_steps, self._layers) for w in workers}
        self.scheduled: ScheduledCalls = Counter(), Counter(), Counter()
        self.times = Histograms(hooks.CODES)
        self._distinct.worked(self._touching_calls())

    def read(self, add: Add = silent) -> None:
        """Read it once."""
        for chunk, kinds in self._scan.calls():
            add(chunk.nbytes)
            called, bodies = (np.asfortranarray(chunk[kinds == kind]) for kind in (Kind.HOOK, Kind.OP))
            quiet = chunk[kinds == Kind.QUIET]
            found: list[Calls] = []
            if len(called):
                found.append(self._hook_calls(called))
            if len(bodies):
                found.append(self._op_calls(bodies))
            for at in range(0, len(quiet), _QUIET_ROWS):
                found += self._quiet_calls(quiet[at : at + _QUIET_ROWS])
                if sum(len(calls.step) for calls in found) > _MOST_PENDING:
                    self._distinct.add(found)
                    found = []
            self._distinct.add(found)

    # -- hooks

    def _hook_calls(self, table: Records) -> Calls:
        call = rows.columns(rows.HookCall, table)
        codes, in_step = rows.code(call.head), real_step(call.step)
        on_worker: Mask = rows.role(call.head) == Role.WORKER
        timed = in_step | ~_IS_DUE[codes]
        spans = spent(call.t0, call.t1)
        self.times.add(codes[timed], spans[timed])
        building = ~on_worker & in_step & (codes == hooks.BUILD_METADATA.code)
        if building.any():
            self._count_scheduled(rows.columns(rows.HookCall, table[building]))
        at, real = locate(self._distinct.steps, call.step)
        self._note_outside(call.layer[on_worker & (codes == hooks.SAVE_LAYER.code) & ~real])
        mine = on_worker & in_step
        layer = self._layers.numbers(call.layer)
        near = mine & locate(self._store_steps, call.step)[1]
        if near.any():
            for reader in self._stores.values():
                reader.add_hooks(rows.columns(rows.HookCall, table[near]), layer[near])
        for tag, of_hook in self._spent.items():
            here = mine & ((call.step >> STEP_SHIFT) == tag)
            for hook, ns in enumerate(np.bincount(codes[here], spans[here]).tolist()):
                if ns:
                    of_hook[hook] += int(ns)
        bits = FIRED | WORK * _with_work(call) | RAISED * _raised(call)
        return self._distinct.calls(at, real & mine, what_of(codes, is_op=False), layer, bits)

    def _touching_calls(self) -> Calls:
        """Hook calls that were seen to read or write KV slots: work, whatever is declared."""
        touched = rows.columns(rows.SlotsTouched, self._scan.slots)
        codes, flags = rows.code(touched.head), rows.flags(touched.head) & _BOTH_WAYS
        layer = self._layers.numbers(np.where(np.isin(codes, _LAYERED), touched.layer, 0))
        # memory that was only given out by address (both flags) may have been left alone
        work = (
            ((touched.slots > 0) | (touched.partly > 0)) & (flags != 0) & (flags != _BOTH_WAYS) & (codes > 0)
        )
        what = what_of(codes[work], is_op=False)
        at, real = locate(self._distinct.steps, touched.step[work])
        return self._distinct.calls(at, real, what, layer[work], codes[work])

    def _count_scheduled(self, call: rows.HookCall) -> None:
        # A connector inside another one is called in the same step: count steps.
        for counts, steps in (
            (self.scheduled[0], call.step),
            (self.scheduled[1], call.step[_with_work(call)]),
            (self.scheduled[2], call.step[_raised(call)]),
        ):
            counts.update((np.unique(steps) >> STEP_SHIFT).tolist())

    # -- op bodies

    def _op_calls(self, table: Records) -> Calls:
        call = rows.columns(rows.OpCall, table)
        what = what_of(rows.code(call.head), is_op=True)
        captured = (rows.flags(call.head) & Flag.CAPTURE) != 0
        attention, counts = is_attention(what), real_step(call.step) & ~captured
        at, real = locate(self._distinct.steps, call.step)
        self._note_outside(call.layer[(~real | captured) & attention])
        layer = self._layers.numbers(call.layer)
        inside = real & counts & (layer >= 0)
        for tag, skips in self._skips.items():
            here = inside & attention & ((call.step >> STEP_SHIFT) == tag)
            values, numbers = np.unique(call.skip[here], return_counts=True)
            skips.update(dict(zip(values.tolist(), numbers.tolist(), strict=True)))
        near = counts & attention & locate(self._store_steps, call.step)[1]
        if near.any():
            for reader in self._stores.values():
                reader.add_bodies(rows.columns(rows.OpCall, table[near]), layer[near])
        direct = rows.detail(call.head) == Dispatch.DIRECT
        return self._distinct.calls(at, inside, what, layer, FIRED | WORK * direct)

    def _note_outside(self, layers: Array) -> None:
        if len(layers):
            self._outside.update(self._layers.numbers(np.unique(layers)).tolist())

    # -- collapsed calls

    def _quiet_calls(self, table: Records) -> list[Calls]:
        """QUIET records: one per step and hook or op, for a set of layers."""
        head = rows.columns(rows.QuietCalls, table).head
        is_op = (rows.detail(head) & DETAIL_IS_OP) != 0
        groups = np.stack([is_op, rows.code(head), rows.columns(rows.QuietCalls, table).layer_set], axis=1)
        unique, group_of = np.unique(groups, axis=0, return_inverse=True)
        found = []
        for group, (op, code, layer_set) in enumerate(unique.tolist()):
            here = table[group_of.reshape(-1) == group]
            call = rows.columns(rows.QuietCalls, here[real_step(rows.columns(rows.QuietCalls, here).step)])
            if not op:
                for of_step in zip(call.count, call.total_ns, call.least_ns, call.most_ns, strict=True):
                    self.times.add_summed(code, *map(int, of_step))
            if not op and code == hooks.BUILD_METADATA.code:
                self.scheduled[0].update((np.unique(call.step) >> STEP_SHIFT).tolist())
                continue
            layers = self._layers.of_set(layer_set)
            what = what_of(np.full(len(call.step) * len(layers), code, np.int64), bool(op))
            if op and is_attention(what[:1]).any():
                self._count_quiet_skips(call)
            at, real = locate(self._distinct.steps, np.repeat(call.step, len(layers)))
            fired = np.full(len(what), FIRED, np.int64)
            found.append(self._distinct.calls(at, real, what, np.tile(layers, len(call.step)), fired))
        return found

    def _count_quiet_skips(self, call: rows.QuietCalls) -> None:
        # A quiet step is one in which nothing was odd: its bodies were hooked wherever a
        # connector is live.
        for worker in self._workers:
            counts = call.count[(call.step >> STEP_SHIFT) == worker.engine]
            skip = Skip.NO_CONNECTOR if worker.connector_live is False else Skip.HOOKED
            if len(counts):
                self._skips[worker.engine][int(skip)] += int(np.clip(counts, 0, None).sum())

    # -- results

    def coverage(self, worker: Worker) -> WorkerCoverage:
        """What was read of one of the workers."""
        names = self._layers.names
        of_hook = {hooks.name_of(code): ns for code, ns in sorted(self._spent[worker.engine].items())}
        return WorkerCoverage(
            hooks=self._counts(worker, is_op=False),
            ops=self._counts(worker, is_op=True),
            skips=self._skips[worker.engine],
            layers_outside=frozenset({names[layer] for layer in self._outside if layer >= 0} - {""}),
            python=self._python(worker),
            hook_ns={name: ns for name, ns in of_hook.items() if name},
            store_steps=self._stores[worker.engine].result(),
        )

    def _counts(self, worker: Worker, is_op: bool) -> Counts:
        found: Counts = {}
        with_work, raised = self._distinct.counted(WORK), self._distinct.counted(RAISED)
        for key, fired in self._distinct.counted(FIRED).items():
            name = ops.name_of(key.what - OP) if is_op else hooks.name_of(key.what)
            if key.tag == worker.engine and name:
                found[name, self._layers.names[key.layer]] = fired, with_work[key], raised[key]
        return found

    def _python(self, worker: Worker) -> dict[int, tuple[int, int]]:
        found: dict[int, list[int]] = {}
        for (tag, mode, kind, layer), n in self._distinct.python.items():
            if tag == worker.engine and self._layers.names[layer] in worker.kv_layers:
                found.setdefault(mode, [0, 0])[kind] += n
        return {mode: (bodies, saves) for mode, (bodies, saves) in found.items()}


def _with_work(call: rows.HookCall) -> Mask:
    """Calls whose metadata named something to copy."""
    result: Mask = (call.slots > 0) | ((call.slots < 0) & (call.entries > 0))
    return result


def _raised(call: rows.HookCall) -> Mask:
    result: Mask = (rows.flags(call.head) & Flag.RAISED) != 0
    return result
