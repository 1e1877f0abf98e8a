"""Second reading of the spools: which hook and op ran, in which steps, for which layers.

Everything is counted in distinct (step, layer) pairs of real forward steps, so that a layer
that runs twice in a step (draft passes, micro-batches) counts once. Chunks overlap in a
few steps at most: the keys of the last steps are carried from chunk to chunk.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvtrace.ledger.model import HOOK_COLUMNS, OP_COLUMNS, SKIP_COLUMNS, TIMING_COLUMNS, Engine, Worker
from kvtrace.ledger.scan import Array, SpoolScan, real_step
from kvtrace.ledger.timing import Histograms
from kvtrace.trace.format import (
    HOOK_CODE,
    HOOKS,
    OP_CODE,
    OPS,
    QUIET_IS_OP,
    STEP_SHIFT,
    Dispatch,
    Flag,
    Kind,
    Role,
    Skip,
)
from kvtrace.trace.reader import Records, Spool, code, detail, flags, kind, role

# What one (step, layer) of one worker was seen to do; bits of a byte.
OP_RAN, OP_HOOKED, OP_NO_METADATA, OP_NO_CONNECTOR, SAVE_OK, SAVE_RAISED, SAVE_NO_METADATA, OP_CLEARED = (
    1 << i for i in range(8)
)
# The same for one step of one worker.
BOUND, WAIT_OK, WAIT_RAISED, WAIT_NO_METADATA = (1 << i for i in range(4))

LAYER_HOOKS = ("wait_for_layer_load", "save_kv_layer")
STEP_HOOKS = (
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "clear_connector_metadata",
)
_SCHEDULER_HOOK = "build_connector_meta"
UPDATE_OPS = ("unified_kv_cache_update", "unified_mla_kv_cache_update")
_UPDATE_CODES = np.array([OP_CODE[name] for name in UPDATE_OPS], dtype=np.int64)

_FIRED, _WORK, _RAISED = 1, 2, 4
_CARRIED_STEPS = 8
_NEVER = (1 << 62) - 1
_MAX_LAYERS = 1 << 16
_QUIET_ROWS = 2048


@dataclass
class StoreStepBits:
    """What the workers did in the steps whose metadata held a store: the ledger's evidence."""

    steps: Array  # sorted store steps of the worker's engine
    layers: NDArray[np.uint8]  # (steps, KV layers)
    step: NDArray[np.uint8]  # (steps,)
    cleared: Array  # (steps,) when the metadata was cleared first, a time that never comes where not


@dataclass
class Coverage:
    hooks: pd.DataFrame
    ops: pd.DataFrame
    skips: pd.DataFrame
    timing: pd.DataFrame
    stages: dict[tuple[int, str], StoreStepBits]  # Worker.key -> evidence
    seen: dict[tuple[int, str], set[str]]  # layers with any op or save hook, same key
    outside: dict[tuple[int, str], set[str]]  # layers with one outside of real steps (capture, warm-up)
    notes: list[str]


def cover(
    joined: list[tuple[SpoolScan, Worker]], engines: list[Engine], scans: list[SpoolScan], store_steps: Array
) -> Coverage:
    """Read every spool again.

    Args:
        joined: each worker with the spool it wrote to.
        store_steps: sorted, distinct steps whose metadata held a store entry.
    """
    hooks_time, ops_time = Histograms(len(HOOKS)), Histograms(len(OPS))
    tables = []
    notes: list[str] = []
    for scan in scans:
        mine = [worker for own, worker in joined if own is scan]
        table = _Table(scan, mine, store_steps, hooks_time, ops_time)
        table.read()
        tables.append(table)
        notes.extend(table.notes)
    hook_rows: list[tuple[object, ...]] = []
    op_rows: list[tuple[object, ...]] = []
    skip_rows: list[tuple[object, ...]] = []
    stages: dict[tuple[int, str], StoreStepBits] = {}
    seen: dict[tuple[int, str], set[str]] = {}
    outside: dict[tuple[int, str], set[str]] = {}
    for table in tables:
        for worker in table.workers:
            hook_rows.extend(table.hook_rows(worker))
            op_rows.extend(table.op_rows(worker))
            for skip, count in sorted(table.skips[worker.engine].items()):
                skip_rows.append((worker.engine, worker.pid, worker.rank, _skip_name(skip), count))
            stages[worker.key] = table.stages[worker.engine]
            seen[worker.key] = table.layers_seen(worker)
            outside[worker.key] = table.layers_outside()
            worker.python = table.python_of(worker)
            worker.hook_ns = {HOOKS[hook]: ns for hook, ns in sorted(table.spent[worker.engine].items())}
    for engine in engines:
        fired = sum(table.scheduler_calls[engine.tag] for table in tables)
        if engine.steps or fired:
            hook_rows.append(
                (engine.tag, engine.pid, engine.process, -1, "", _SCHEDULER_HOOK, engine.steps,
                 min(fired, engine.steps), sum(t.scheduler_work[engine.tag] for t in tables),
                 sum(t.scheduler_raised[engine.tag] for t in tables))
            )  # fmt: skip
    return Coverage(
        hooks=pd.DataFrame(hook_rows, columns=list(HOOK_COLUMNS)),
        ops=pd.DataFrame(op_rows, columns=list(OP_COLUMNS)),
        skips=pd.DataFrame(skip_rows, columns=list(SKIP_COLUMNS)),
        timing=_timing(hooks_time, ops_time, sum(worker.exec_ns for _, worker in joined)),
        stages=stages,
        seen=seen,
        outside=outside,
        notes=notes,
    )


def _skip_name(skip: int) -> str:
    try:
        return Skip(skip).name
    except ValueError:
        return f"SKIP_{skip}"


class _Table:
    """The counts of one spool."""

    def __init__(
        self,
        scan: SpoolScan,
        workers: list[Worker],
        store_steps: Array,
        hooks_time: Histograms,
        ops_time: Histograms,
    ) -> None:
        self.scan = scan
        self.workers = workers
        self.notes: list[str] = []
        self._hooks_time, self._ops_time = hooks_time, ops_time
        empty: Array = np.empty(0, dtype=np.int64)
        ran = list(scan.executed.values())
        self._real, first = np.unique(np.concatenate([empty, *(one.steps for one in ran)]), return_index=True)
        self._mode: NDArray[np.int8] = np.concatenate(
            [np.empty(0, dtype=np.int8), *(one.mode_of for one in ran)]
        )[first]
        self._python: Counter[tuple[int, int, int, int]] = Counter()  # tag, mode, 0 body / 1 save, layer
        self._names: dict[int, int] = {}  # name id -> dense layer index
        self._layers: list[str] = []
        self._sets: dict[int, Array] = {}  # QUIET layer_set -> dense layer indices
        self._carry: tuple[Array, Array] = (empty, empty)
        self._counts: Counter[tuple[int, int, int]] = Counter()  # (tag, op << 7 | code, layer) -> fired ...
        self._work: Counter[tuple[int, int, int]] = Counter()
        self._raised: Counter[tuple[int, int, int]] = Counter()
        self._outside: set[int] = set()  # dense layers with a body or save hook outside of real steps
        self.spent: dict[int, Counter[int]] = {worker.engine: Counter() for worker in workers}  # hook -> ns
        self.skips: dict[int, Counter[int]] = {worker.engine: Counter() for worker in workers}
        self.scheduler_calls: Counter[int] = Counter()
        self.scheduler_work: Counter[int] = Counter()
        self.scheduler_raised: Counter[int] = Counter()
        self.stages: dict[int, StoreStepBits] = {}
        self._pair_index: dict[int, NDArray[np.int64]] = {}
        self._pair_names: dict[int, dict[str, int]] = {}
        for worker in workers:
            own = store_steps[(store_steps >> STEP_SHIFT) == worker.engine]
            self.stages[worker.engine] = StoreStepBits(
                own,
                np.zeros((len(own), len(worker.kv_layers)), np.uint8),
                np.zeros(len(own), np.uint8),
                np.full(len(own), _NEVER, np.int64),
            )
            self._pair_names[worker.engine] = {layer: i for i, layer in enumerate(worker.kv_layers)}

    # -- reading

    def read(self) -> None:
        spool = Spool(self.scan.path)
        self._text = spool.names
        for chunk in spool.chunks():
            kinds = kind(chunk[:, 0])
            hooks, ops = chunk[kinds == Kind.HOOK], chunk[kinds == Kind.OP]
            keys: list[Array] = []
            bits: list[Array] = []
            if len(hooks):
                keys_bits = self._hook_chunk(hooks)
                keys.append(keys_bits[0])
                bits.append(keys_bits[1])
            if len(ops):
                keys_bits = self._op_chunk(ops)
                keys.append(keys_bits[0])
                bits.append(keys_bits[1])
            quiet = chunk[kinds == Kind.QUIET]
            for at in range(0, len(quiet), _QUIET_ROWS):
                for keys_bits in self._quiet_chunk(quiet[at : at + _QUIET_ROWS]):
                    keys.append(keys_bits[0])
                    bits.append(keys_bits[1])
                if sum(map(len, keys)) > 1 << 20:
                    self._count(np.concatenate(keys), np.concatenate(bits))
                    keys, bits = [], []
            if keys:
                self._count(np.concatenate(keys), np.concatenate(bits))

    def _dense(self, layer: Array) -> Array:
        """Dense layer indices of name ids; -1 past the limit."""
        unique, inverse = np.unique(layer, return_inverse=True)
        found = np.empty(len(unique), dtype=np.int64)
        for i, ident in enumerate(unique.tolist()):
            index = self._names.get(ident)
            if index is None:
                if len(self._layers) >= _MAX_LAYERS - 1:
                    index = -1
                else:
                    index = len(self._layers)
                    self._layers.append(self._text.get(ident, "") if ident else "")
                    self._names[ident] = index
            found[i] = index
        result: Array = found[inverse]
        return result

    def _keys(self, step: Array, op: int, codes: Array, layer: Array) -> tuple[Array, NDArray[np.bool_]]:
        """(key of each row, which rows lie in a real step of this spool)."""
        at = np.searchsorted(self._real, step)
        inside = at < len(self._real)
        inside[inside] = self._real[at[inside]] == step[inside]
        inside &= (layer >= 0) & (codes < 128)
        return at << 24 | op << 23 | (codes & 0x7F) << 16 | (layer & 0xFFFF), inside

    def _hook_chunk(self, rows: Records) -> tuple[Array, Array]:
        head, step = rows[:, 0], rows[:, 3]
        codes, marks = code(head), flags(head)
        in_step = real_step(step)
        per_step = np.isin(codes, _PER_STEP_CODES)
        timed = in_step | ~per_step
        self._hooks_time.add(codes[timed], rows[timed, 1], rows[timed, 2])
        work = (rows[:, 5] > 0) | ((rows[:, 5] < 0) & (rows[:, 6] > 0))
        raised = (marks & int(Flag.RAISED)) != 0
        on_worker = role(head) == Role.WORKER
        scheduler = ~on_worker & in_step & (codes == HOOK_CODE[_SCHEDULER_HOOK])
        if scheduler.any():
            # A connector inside another one is called in the same step: count steps.
            for tally, part in (
                (self.scheduler_calls, scheduler),
                (self.scheduler_work, scheduler & work),
                (self.scheduler_raised, scheduler & raised),
            ):
                tally.update((np.unique(step[part]) >> STEP_SHIFT).tolist())
        outside = on_worker & (codes == HOOK_CODE["save_kv_layer"])
        self._note_outside(rows[outside & ~self._is_real(step)])
        mine = on_worker & in_step
        rows, step, codes, marks, work, raised = (
            part[mine] for part in (rows, step, codes, marks, work, raised)
        )
        layer = self._dense(rows[:, 4])
        self._hook_stages(rows, step, codes, layer, marks, raised)
        for tag, spent in self.spent.items():
            own = rows[(step >> STEP_SHIFT) == tag]
            spans = np.clip(own[:, 2].astype(np.float64) - own[:, 1], 0, 2.0**62)
            for hook in np.unique(code(own[:, 0])).tolist():
                if 0 < hook < len(HOOKS):
                    spent[hook] += int(spans[code(own[:, 0]) == hook].sum())
        key, inside = self._keys(step, 0, codes, layer)
        bits = _FIRED | np.where(work, _WORK, 0) | np.where(raised, _RAISED, 0)
        return key[inside], bits[inside]

    def _op_chunk(self, rows: Records) -> tuple[Array, Array]:
        head, step = rows[:, 0], rows[:, 3]
        capture = (flags(head) & int(Flag.CAPTURE)) != 0
        counts = real_step(step) & ~capture
        self._note_outside(rows[(~self._is_real(step) | capture) & ~np.isin(code(head), _UPDATE_CODES)])
        rows, step = rows[counts], step[counts]
        head = rows[:, 0]
        codes = code(head)
        self._ops_time.add(codes, rows[:, 1], rows[:, 2])
        layer = self._dense(rows[:, 4])
        direct = detail(head) == Dispatch.DIRECT
        raised = (flags(head) & int(Flag.RAISED)) != 0
        key, inside = self._keys(step, 1, codes, layer)
        attention = ~np.isin(codes, _UPDATE_CODES)
        tags = step >> STEP_SHIFT
        for tag, tally in self.skips.items():
            skips = rows[inside & attention & (tags == tag), 7]
            values, counts = np.unique(skips, return_counts=True)
            tally.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        self._op_stages(step[attention], layer[attention], rows[attention, 7], rows[attention, 1])
        bits = _FIRED | np.where(direct, _WORK, 0) | np.where(raised, _RAISED, 0)
        return key[inside], bits[inside]

    def _quiet_chunk(self, rows: Records) -> list[tuple[Array, Array]]:
        """Collapsed calls: one row per step and hook or op, for a set of layers."""
        head = rows[:, 0]
        is_op = (detail(head) & QUIET_IS_OP) != 0
        codes = code(head)
        result: list[tuple[Array, Array]] = []
        groups = np.stack([is_op.astype(np.int64), codes, rows[:, 2]], axis=1)
        unique, inverse = np.unique(groups, axis=0, return_inverse=True)
        for i, (op, hook, layer_set) in enumerate(unique.tolist()):
            mine = rows[inverse.reshape(-1) == i]
            mine = mine[real_step(mine[:, 3])]
            if not len(mine):
                continue
            time = self._ops_time if op else self._hooks_time
            for _, _, _, _, count, total, low, high in mine.tolist():
                time.add_summed(hook, count, total, low, high)
            layers = self._layer_set(layer_set)
            if op:
                self._quiet_skips(hook, mine, len(layers))
            elif hook == HOOK_CODE[_SCHEDULER_HOOK]:
                self.scheduler_calls.update((np.unique(mine[:, 3]) >> STEP_SHIFT).tolist())
                continue
            steps = np.repeat(mine[:, 3], len(layers))
            key, inside = self._keys(
                steps, op, np.full(len(steps), hook, np.int64), np.tile(layers, len(mine))
            )
            result.append((key[inside], np.full(int(inside.sum()), _FIRED, dtype=np.int64)))
        return result

    def _quiet_skips(self, op: int, rows: Records, layers: int) -> None:
        # A quiet step is one in which nothing was odd: its bodies were hooked wherever a
        # connector is live.
        if op in _UPDATE_CODES:
            return
        for worker in self.workers:
            mine = rows[(rows[:, 3] >> STEP_SHIFT) == worker.engine, 4]
            skip = Skip.NO_CONNECTOR if worker.connector_live is False else Skip.HOOKED
            if len(mine):
                self.skips[worker.engine][int(skip)] += int(np.clip(mine, 0, None).sum())

    def _layer_set(self, ident: int) -> Array:
        known = self._sets.get(ident)
        if known is None:
            try:
                value = json.loads(self._text.get(ident, "[]"))
            except (ValueError, RecursionError):
                value = []
            ids = (
                [item for item in value if isinstance(item, int) and 0 <= item < 1 << 62]
                if isinstance(value, list)
                else []
            )
            known = self._dense(np.array(ids[:_MAX_LAYERS] or [0], dtype=np.int64))
            self._sets[ident] = np.unique(known)
            known = self._sets[ident]
        return known

    def _count(self, keys: Array, bits: Array) -> None:
        """Add what is new in (step, hook, layer) keys since the steps that are carried."""
        old_keys, old_bits = self._carry
        all_keys = np.concatenate([old_keys, keys])
        if not len(all_keys):
            return
        order = np.argsort(all_keys, kind="stable")
        ordered = all_keys[order]
        starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        merged = np.bitwise_or.reduceat(np.concatenate([old_bits, bits])[order], starts)
        before = np.bitwise_or.reduceat(
            np.concatenate([old_bits, np.zeros(len(bits), dtype=np.int64)])[order], starts
        )
        unique = ordered[starts]
        new = merged & ~before
        step_at = unique >> 24
        tags = self._real[step_at] >> STEP_SHIFT
        low = unique & 0xFFFFFF
        self._count_python(unique[(new & _FIRED) != 0])
        for bit, tally in ((_FIRED, self._counts), (_WORK, self._work), (_RAISED, self._raised)):
            mine = (new & bit) != 0
            if not mine.any():
                continue
            for tag in np.unique(tags[mine]).tolist():
                kinds, counts = np.unique(low[mine & (tags == tag)], return_counts=True)
                for value, n in zip(kinds.tolist(), counts.tolist(), strict=True):
                    tally[(tag, value >> 16, value & 0xFFFF)] += n
        latest = np.unique(step_at)[-_CARRIED_STEPS:]
        keep = step_at >= latest[0]
        self._carry = (unique[keep], merged[keep])

    def _count_python(self, keys: Array) -> None:
        """Layer-steps with an attention body or a save hook, by the graph mode of their step."""
        what = keys >> 16 & 0xFF
        attention = (what >= 0x80) & ~np.isin(what & 0x7F, _UPDATE_CODES)
        for kind_, mine in enumerate((attention, what == HOOK_CODE["save_kv_layer"])):
            at = keys[mine] >> 24
            rows = np.stack([self._real[at] >> STEP_SHIFT, self._mode[at], keys[mine] & 0xFFFF], axis=1)
            values, counts = np.unique(rows, axis=0, return_counts=True)
            for (tag, mode, layer), n in zip(values.tolist(), counts.tolist(), strict=True):
                self._python[(tag, mode, kind_, layer)] += n

    # -- evidence for the ledger

    def _pairs(self, tag: int, layer: Array) -> Array:
        """Index into the worker's KV layers of dense layer indices; -1 where it is none."""
        known = self._pair_index.get(tag)
        if known is None or len(known) < len(self._layers):
            names = self._pair_names[tag]
            known = np.array([names.get(name, -1) for name in self._layers], dtype=np.int64)
            self._pair_index[tag] = known
        result: Array = np.where(layer >= 0, known[np.maximum(layer, 0)], -1)
        return result

    def _in_store_steps(self, stage: StoreStepBits, tag: int, step: Array) -> tuple[Array, NDArray[np.bool_]]:
        at = np.searchsorted(stage.steps, step)
        inside = at < len(stage.steps)
        inside[inside] = stage.steps[at[inside]] == step[inside]
        return at, inside

    def _is_real(self, step: Array) -> NDArray[np.bool_]:
        at = np.searchsorted(self._real, step)
        inside: NDArray[np.bool_] = at < len(self._real)
        inside[inside] = self._real[at[inside]] == step[inside]
        return inside

    def _note_outside(self, rows: Records) -> None:
        if len(rows):
            self._outside.update(self._dense(np.unique(rows[:, 4])).tolist())

    def _hook_stages(
        self, rows: Records, step: Array, codes: Array, layer: Array, marks: Array, raised: NDArray[np.bool_]
    ) -> None:
        unbound = (marks & int(Flag.NO_METADATA)) != 0
        for tag, stage in self.stages.items():
            at, inside = self._in_store_steps(stage, tag, step)
            if not inside.any():
                continue
            bound = inside & (codes == HOOK_CODE["bind_connector_metadata"]) & ~raised
            stage.step[at[bound]] |= BOUND
            clear = inside & (codes == HOOK_CODE["clear_connector_metadata"]) & ~raised
            np.minimum.at(stage.cleared, at[clear], rows[clear, 2])
            wait = inside & (codes == HOOK_CODE["wait_for_save"])
            for part, bit in (
                (wait & ~raised & ~unbound, WAIT_OK),
                (wait & raised, WAIT_RAISED),
                (wait & unbound, WAIT_NO_METADATA),
            ):
                stage.step[at[part]] |= bit
            save = inside & (codes == HOOK_CODE["save_kv_layer"])
            if not save.any():
                continue
            pairs = self._pairs(tag, layer)
            save &= pairs >= 0
            for part, bit in (
                (save & ~raised & ~unbound, SAVE_OK),
                (save & raised, SAVE_RAISED),
                (save & unbound, SAVE_NO_METADATA),
            ):
                stage.layers[at[part], pairs[part]] |= bit

    def _op_stages(self, step: Array, layer: Array, skip: Array, t0: Array) -> None:
        for tag, stage in self.stages.items():
            at, inside = self._in_store_steps(stage, tag, step)
            if not inside.any():
                continue
            pairs = self._pairs(tag, layer)
            inside &= pairs >= 0
            cleared = inside & (skip == Skip.NO_CONNECTOR_METADATA)
            cleared[cleared] = t0[cleared] >= stage.cleared[at[cleared]]
            for part, bit in (
                (inside, OP_RAN),
                (cleared, OP_CLEARED),
                (inside & (skip == Skip.HOOKED), OP_HOOKED),
                (inside & (skip == Skip.NO_CONNECTOR_METADATA), OP_NO_METADATA),
                (inside & (skip == Skip.NO_CONNECTOR), OP_NO_CONNECTOR),
            ):
                stage.layers[at[part], pairs[part]] |= bit

    # -- results

    def layers_seen(self, worker: Worker) -> set[str]:
        """Layers with an attention body or a save hook in any real step of this worker."""
        update = {1 << 7 | int(c) for c in _UPDATE_CODES}
        save = HOOK_CODE["save_kv_layer"]
        return {
            self._layers[layer]
            for (tag, what, layer), n in self._counts.items()
            if n and tag == worker.engine and (what == save or (what & 0x80 and what not in update))
        }

    def layers_outside(self) -> set[str]:
        """Layers with an attention body or a save hook in no step: capture, warm-up, profiling."""
        return {self._layers[layer] for layer in self._outside if layer >= 0} - {""}

    def python_of(self, worker: Worker) -> dict[int, tuple[int, int]]:
        """Graph mode -> layer-steps of KV layers with a body, and with a save hook."""
        found: dict[int, list[int]] = {}
        own = set(worker.kv_layers)
        for (tag, mode, kind_, layer), n in self._python.items():
            if tag == worker.engine and self._layers[layer] in own:
                found.setdefault(mode, [0, 0])[kind_] += n
        return {mode: (bodies, saves) for mode, (bodies, saves) in found.items()}

    def _of(self, worker: Worker, op: bool) -> dict[tuple[str, str], tuple[int, int, int]]:
        """(name, layer) -> (fired, with work or direct, raised)."""
        names = OPS if op else HOOKS
        found: dict[tuple[str, str], tuple[int, int, int]] = {}
        for (tag, what, layer), n in self._counts.items():
            if tag != worker.engine or bool(what & 0x80) != op or not 0 < (what & 0x7F) < len(names):
                continue
            key = (names[what & 0x7F], self._layers[layer])
            old = found.get(key, (0, 0, 0))
            found[key] = (
                old[0] + n,
                old[1] + self._work[(tag, what, layer)],
                old[2] + self._raised[(tag, what, layer)],
            )
        return found

    def hook_rows(self, worker: Worker) -> list[tuple[object, ...]]:
        found = self._of(worker, op=False)
        worker.hooks_seen = bool(found)
        wanted = [(hook, "") for hook in STEP_HOOKS]
        wanted += [(hook, layer) for hook in LAYER_HOOKS for layer in worker.kv_layers]
        for hook, layer in wanted:
            found.setdefault((hook, layer), (0, 0, 0))
        order = {layer: i for i, layer in enumerate(worker.kv_layers)}
        return [
            (worker.engine, worker.pid, worker.process, worker.rank, layer, hook, worker.steps, *counts)
            for (hook, layer), counts in sorted(
                found.items(), key=lambda item: (HOOK_CODE[item[0][0]], order.get(item[0][1], -1), item[0][1])
            )
        ]

    def op_rows(self, worker: Worker) -> list[tuple[object, ...]]:
        found = self._of(worker, op=True)
        attention: Counter[str] = Counter()
        with_body = set()
        for (op, layer), (fired, _, _) in found.items():
            if op not in UPDATE_OPS:
                attention[op] += fired
                with_body.add(layer)
        worker.ops_seen = bool(attention)
        usual = attention.most_common(1)[0][0] if attention else "unified_attention_with_output"
        for layer in worker.kv_layers:
            if layer not in with_body:
                found[(usual, layer)] = (0, 0, 0)
        order = {layer: i for i, layer in enumerate(worker.kv_layers)}
        return [
            (worker.engine, worker.pid, worker.process, worker.rank, layer, op, worker.steps, fired, direct)
            for (op, layer), (fired, direct, _) in sorted(
                found.items(), key=lambda item: (OP_CODE[item[0][0]], order.get(item[0][1], -1), item[0][1])
            )
        ]


_PER_STEP_CODES = np.array(
    [HOOK_CODE[name] for name in (*STEP_HOOKS, *LAYER_HOOKS, _SCHEDULER_HOOK)], dtype=np.int64
)
_WORKER_TIMED = {*STEP_HOOKS, *LAYER_HOOKS, "handle_preemptions", "get_block_ids_with_load_errors"}


def _timing(hooks: Histograms, ops: Histograms, exec_ns: int) -> pd.DataFrame:
    rows: list[tuple[object, ...]] = []
    for kind_name, names, time in (("hook", HOOKS, hooks), ("op", OPS, ops)):
        for i, name in enumerate(names):
            count = time.count(i)
            if not name or not count:
                continue
            in_step = kind_name == "op" or name in _WORKER_TIMED
            share = time.totals[i] / exec_ns if in_step and exec_ns else None
            rows.append(
                (name, kind_name, "host", count, time.quantile(i, 0.5), time.quantile(i, 0.99),
                 time.totals[i], share)
            )  # fmt: skip
    table: pd.DataFrame = pd.DataFrame(rows, columns=list(TIMING_COLUMNS))
    table["share_of_steps"] = pd.Series([row[-1] for row in rows], dtype=object)
    return table
