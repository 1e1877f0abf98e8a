"""All spools read for their hooks and op bodies, as tables."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvtrace.ledger.coverage.spool import Counts, ScheduledCalls, SpoolReader, WorkerCoverage
from kvtrace.ledger.run import CallTimes, Engine, HookSteps, OpSteps, SkippedSteps, Worker
from kvtrace.ledger.scan import SpoolScan
from kvtrace.ledger.side_by_side import Add, each, silent
from kvtrace.ledger.steps import Array
from kvtrace.ledger.timing import Histograms
from kvtrace.trace import hooks, ops
from kvtrace.trace.format import Skip

_OfSpool: TypeAlias = tuple[Histograms, list[WorkerCoverage], ScheduledCalls]


@dataclass(frozen=True)
class CoverageTables:
    """Tables as in :class:`~kvtrace.ledger.run.Run`; ``workers`` by Worker.key."""

    hooks: Sequence[HookSteps]
    ops: Sequence[OpSteps]
    skips: Sequence[SkippedSteps]
    timing: Sequence[CallTimes]
    workers: Mapping[tuple[int, str], WorkerCoverage]


def cover(
    scans: Sequence[SpoolScan], engines: Sequence[Engine], workers: Sequence[Worker], store_steps: Array,
    add: Add = silent,
) -> CoverageTables:  # fmt: skip
    """Read every spool again.

    Args:
        store_steps: sorted, distinct steps whose metadata held a store entry.
        add: called with the bytes that were read.

    Raises:
        SpoolError: a spool vanished.
    """
    times = Histograms(hooks.CODES)
    hook_rows: list[HookSteps] = []
    op_rows: list[OpSteps] = []
    skip_rows: list[SkippedSteps] = []
    covered: dict[tuple[int, str], WorkerCoverage] = {}
    scheduled: list[ScheduledCalls] = []
    workers_of: dict[str, list[Worker]] = defaultdict(list)
    for worker in workers:
        workers_of[worker.spool].append(worker)

    def read(scan: SpoolScan, add: Add) -> _OfSpool:
        reader = SpoolReader(scan, workers_of[scan.name], store_steps)
        reader.read(add)
        here = [reader.coverage(worker) for worker in workers_of[scan.name]]
        return reader.times, here, reader.scheduled

    sizes = [scan.info.size for scan in scans]
    for scan, of_spool in zip(scans, each(read, scans, sizes, add), strict=True):
        times.merge(of_spool[0])
        scheduled.append(of_spool[2])
        for worker, found in zip(workers_of[scan.name], of_spool[1], strict=True):
            covered[worker.key] = found
            hook_rows += _hook_rows(worker, found.hooks)
            op_rows += _op_rows(worker, found.ops)
            skip_rows += [
                SkippedSteps(worker.engine, skip.name, found.skips[skip])
                for skip in Skip
                if skip in found.skips
            ]
    hook_rows += _scheduler_rows(engines, scheduled)
    exec_ns = sum(worker.exec_ns for worker in workers)
    return CoverageTables(hook_rows, op_rows, skip_rows, _timing(times, exec_ns), workers=covered)


def _scheduler_rows(engines: Sequence[Engine], of_spools: Sequence[ScheduledCalls]) -> list[HookSteps]:
    calls, work, raised = (sum((one[at] for one in of_spools), Counter()) for at in range(3))
    return [
        HookSteps(
            engine.tag, engine.pid, engine.process, -1, "", hooks.BUILD_METADATA.name, engine.steps,
            min(fired, engine.steps), work[engine.tag], raised[engine.tag],
        )
        for engine in engines
        if (fired := calls[engine.tag]) or engine.steps
    ]  # fmt: skip


def _hook_rows(worker: Worker, counts: Counts) -> list[HookSteps]:
    """Those that were seen, and those that are due in each step."""
    due = {
        (hook.name, layer)
        for hook in hooks.WORKER_DUE
        for layer in (worker.kv_layers if hook.layered else ("",))
    }
    if (hooks.TRANSFER_RESULTS.name, "") in counts:
        # it is what vLLM calls: one of the connector's own (MultiConnector's) need not ask the other
        due.discard((hooks.GET_FINISHED.name, ""))
    found = {**dict.fromkeys(due, (0, 0, 0)), **counts}
    codes = {hook.name: hook.code for hook in hooks.TABLE}
    whose = worker.engine, worker.pid, worker.process, worker.rank
    return [
        HookSteps(*whose, layer, hook, worker.steps, *found[hook, layer])
        for hook, layer in _in_order(found, codes, worker)
    ]


def _op_rows(worker: Worker, counts: Counts) -> list[OpSteps]:
    """Those that were seen; a layer without an attention body has a row of the usual one, unless bodies can't
    be seen here."""
    updates = {op.name for op in ops.UPDATES}
    bodies: Counter[str] = Counter()
    for (op, _), (fired, _, _) in counts.items():
        if op not in updates:
            bodies[op] += fired
    usual = bodies.most_common(1)[0][0] if bodies else ops.ATTENTION_WITH_OUTPUT.name
    with_body = {layer for op, layer in counts if op not in updates}
    unseen = () if worker.ops_late else worker.kv_layers
    missing = [(usual, layer) for layer in unseen if layer not in with_body]
    found = {**counts, **dict.fromkeys(missing, (0, 0, 0))}
    codes = {op.name: op.code for op in ops.TABLE}
    whose = worker.engine, worker.pid, worker.process, worker.rank
    return [
        OpSteps(*whose, layer, op, worker.steps, *found[op, layer][:2])
        for op, layer in _in_order(found, codes, worker)
    ]


def _in_order(found: Counts, codes: Mapping[str, int], worker: Worker) -> list[tuple[str, str]]:
    """By the code of the hook or op, then in the order of the worker's KV layers, others first."""
    order = {layer: i for i, layer in enumerate(worker.kv_layers)}
    return sorted(found, key=lambda key: (codes[key[0]], order.get(key[1], -1), key[1]))


def _timing(times: Histograms, exec_ns: int) -> list[CallTimes]:
    found: list[CallTimes] = []
    for hook in hooks.TABLE:
        count, total = times.count(hook.code), times.totals[hook.code]
        if count:
            share = total / exec_ns if hook.in_step and exec_ns else None
            half, most = times.quantile(hook.code, 0.5), times.quantile(hook.code, 0.99)
            found.append(CallTimes(hook.name, count, half, most, total, share))
    return found
