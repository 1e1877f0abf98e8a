"""A run directory, read into a :class:`~kvtrace.ledger.model.Run`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import pandas as pd

from kvtrace.ledger import completion, device, effects, load_trace, loads, reported, tokens, topology
from kvtrace.ledger import coverage as cov
from kvtrace.ledger import requests as reqs
from kvtrace.ledger.model import REQUEST_COLUMNS, Engine, Run, RunError, SpoolState
from kvtrace.ledger.run_file import read_run_file
from kvtrace.ledger.scan import Array, SpoolScan, Steps, scan
from kvtrace.trace.format import STEP_MASK, STEP_SHIFT
from kvtrace.trace.reader import SpoolError, spool_paths

_CHUNKS_SHOWN = 16


def read_run(run_dir: Path, watch: Collection[str] = ()) -> Run:
    """Read every spool of a run and build the tables and the token ledger.

    Args:
        watch: engine's ids of requests whose positions are kept one by one in ``Run.spans``.

    Raises:
        RunError: there is no spool that can be read; one line that says why.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise RunError(f"{run_dir}: no such run directory")
    run, notes = read_run_file(run_dir)
    scans = _scan(run_dir, notes)
    connectors = topology.connectors(scans)
    engines = topology.engines(scans, connectors)
    joined = topology.workers(scans, engines, connectors)
    processes = topology.processes(scans, run, engines)
    named = {process.pid: process.name for process in processes}
    for engine in engines:
        engine.process = named.get(engine.pid, "engine core")
    book = reqs.collect(scans)
    measured = effects.collect(joined)
    dark = Steps(np.array(effects.imply(book.requests, engines, measured, book.unreadable), dtype=np.int64))
    async_saves = completion.settle(book.requests, engines, scans)
    swallowed = reported.swallowed(scans)
    _count(engines, book, notes)
    store_steps: Array = np.unique(
        np.array([entry.step for r in book.requests for entry in r.entries], dtype=np.int64)
    )
    coverage = cov.cover(joined, engines, scans, store_steps)
    notes.extend(coverage.notes)
    executed = {
        worker.key: own.executed[worker.engine] for own, worker in joined if worker.engine in own.executed
    }
    unknown = Steps(np.concatenate([_unwatched(book, engines), dark.sorted]))
    stories = load_trace.stories(scans, book.requests)
    for request, story in zip(book.requests, stories, strict=True):
        request.prefixes = story.prefixes
    load_rows = loads.follow(book.requests, engines, joined, stories, executed)
    account = tokens.book(
        book.requests, engines, executed, coverage, unknown, watch, measured, swallowed, load_rows
    )
    loaded = loads.book(load_rows, book.requests, engines, joined, stories, account.saved)
    return Run(
        directory=run_dir,
        run=run,
        processes=processes,
        engines=engines,
        connectors=connectors,
        spools=[_state(one) for one in scans],
        targets=reported.targets(scans),
        exceptions=reported.exceptions(scans),
        agent_errors=reported.agent_errors(scans),
        hooks=coverage.hooks,
        ops=coverage.ops,
        skips=coverage.skips,
        timing=coverage.timing,
        requests=_request_table(book.requests, account, reported.clients(scans)),
        entries=account.entries,
        pieces=account.pieces,
        base=account.base,
        loads=loaded,
        load_rows=load_rows,
        device=device.merged(one.device for one in scans),
        start_failures=reported.start_failures(scans),
        total=account.total,
        notes=notes,
        spans=account.spans,
        swallowed=swallowed,
        logs=reported.logs(scans),
        config_keys=reported.config_keys(scans),
        trust=account.trust,
        async_saves=async_saves,
    )


def _scan(run_dir: Path, notes: list[str]) -> list[SpoolScan]:
    paths = spool_paths(run_dir)
    scans = []
    failures = []
    for path in paths:
        try:
            scans.append(scan(path))
        except SpoolError as error:
            failures.append(str(error))
    if scans:
        notes.extend(f"spool left out: {failure}" for failure in failures)
        return scans
    if failures:
        raise RunError(failures[0] + (f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""))
    raise RunError(
        f"{run_dir}: no spool in it, so no process of this run loaded the agent: "
        "trace a vLLM command with 'kvtrace run -- ...'"
    )


def _state(one: SpoolScan) -> SpoolState:
    return SpoolState(
        name=one.path.name,
        pid=one.pid,
        size=one.info.size,
        records=one.info.records,
        end=one.info.end,
        stop=one.info.stop,
        lost=one.info.lost,
        detail=one.info.detail,
    )


def _count(engines: list[Engine], book: reqs.Requests, notes: list[str]) -> None:
    """Requests, store entries and pairs of each engine."""
    known = {engine.tag: engine for engine in engines}
    for request in book.requests:
        if request.engine not in known and len(engines) == 1:
            request.engine = engines[0].tag
        engine = known.get(request.engine)
        if engine is None:
            continue
        engine.requests += 1
        engine.store_entries += len(request.entries)
        engine.implied_entries += sum(entry.implied for entry in request.entries)
        engine.decode_entries += sum(
            1 for e in request.entries if min(e.start + e.slots, e.available) > request.prompt
        )
    lost = sum(1 for request in book.requests if request.engine not in known)
    if lost:
        notes.append(f"{lost} requests never reached a scheduler that is known: they are not in the books")
    computing = {chunk.step for request in book.requests for chunk in request.chunks}
    for step in book.unreadable.sorted.tolist():
        engine = known.get(step >> STEP_SHIFT)
        if engine is not None:
            engine.unreadable_steps += 1
            engine.unknown_steps += step in computing and step not in engine.watched_steps
    if book.negative_answers:
        ident, step, answer = book.negative_answers[0]
        notes.append(
            f"{len(book.negative_answers)} lookups were answered with a negative number of tokens "
            f"(first: {answer} for request {ident} in step {step & STEP_MASK}): counted as 0"
        )
    for engine in engines:
        engine.pairs = sum(len(worker.kv_layers) for worker in engine.workers)
        if engine.pairs == 0:
            engine.pairs_known = False
            layers = {layer for group in engine.facts.kv_groups for layer in group.layers}
            engine.pairs = max(1, len(layers)) * max(1, engine.facts.tp or 1)
            notes.append("no worker of one engine told its KV layers: its tokens are booked on assumed pairs")
        elif len(engine.workers) < engine.facts.ranks:
            seen = f"{len(engine.workers)} of {engine.facts.ranks} workers of one engine"
            notes.append(f"{seen} were seen: the books hold those only")


def _unwatched(book: reqs.Requests, engines: list[Engine]) -> Array:
    """Steps whose metadata could not be read, and of which no measurement says everything."""
    watched = {step for engine in engines for step in engine.watched_steps}
    return np.setdiff1d(book.unreadable.sorted, np.array(sorted(watched), dtype=np.int64))


def _request_table(
    requests: list[reqs.Request], account: tokens.Account, clients: dict[str, str]
) -> pd.DataFrame:
    rows: list[tuple[object, ...]] = []
    for i, r in enumerate(requests):
        lookup = r.looked_up
        steps = [step for step in r.steps if step > 0]
        rows.append(
            (
                r.id, clients.get(r.id, ""), r.engine, r.prompt, r.computed,
                r.finish[2] if r.finish else max(0, r.computed - r.prompt),
                account.local[i], account.external[i],
                -1 if lookup is None else max(0, lookup.answer or 0),
                len(r.chunks), tuple(c.end - c.start for c in r.chunks[:_CHUNKS_SHOWN]),
                min(steps, default=0), max(steps, default=0), r.block,
                r.finish[3] if r.finish else "", r.finish is not None, r.digest, r.prefix, r.preemptions,
                bool(r.lookups), r.t_first, r.chunks[0].step if r.chunks else 0,
                account.saved[i], account.unsaved[i], account.diverged[i], r.preempt_step,
            )
        )  # fmt: skip
    table: pd.DataFrame = pd.DataFrame(rows, columns=list(REQUEST_COLUMNS))
    return table
