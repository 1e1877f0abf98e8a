"""The token ledger: every position of every request, in every pair, on exactly one account.

A pair is one KV-owning layer on one rank. Pairs that fared alike in all steps of a request
form a class and are booked together: intervals of positions times the number of pairs.
Positions that were not saved leave here as *pieces*, with the facts that tell why; the
rules in ``kvtrace.causes`` put a name to those that no stage after the schedule explains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvtrace.ledger import completion, verify
from kvtrace.ledger import coverage as cov
from kvtrace.ledger.coverage import Coverage, StoreStepBits
from kvtrace.ledger.effects import Measured
from kvtrace.ledger.intervals import Interval, covers, length, subtract, union
from kvtrace.ledger.load_model import LoadOf, Part
from kvtrace.ledger.model import (
    ENTRY_COLUMNS,
    LOADED,
    LOCAL_HIT,
    NOT_OBSERVED,
    PENDING,
    PIECE_COLUMNS,
    SAVED,
    Engine,
    Span,
    Swallowed,
    Trust,
    Worker,
)
from kvtrace.ledger.requests import Request
from kvtrace.ledger.scan import Array, Executed, Steps
from kvtrace.trace.format import Stop

# How a store entry fared in one pair. From _CAUSES on, the stage that it failed.
_SAVED, _PENDING, _NOT_OBSERVED = 0, 1, 2
_CAUSES = (
    "connector-not-created",
    "metadata-not-bound",
    "metadata-cleared-early",
    "connector-gone",
    "full-cudagraph-replay",
    "captured-not-run",
    "direct-call-bypass",
    "no-forward",
    "layer-not-hooked",
    "hook-raised",
    "exception-swallowed",
    "stored-nothing",
    "slots-short",
    "save-lost",
    "ranks-share-store",
    "save-never-finished",
)
_CODE = {name: i + 3 for i, name in enumerate(_CAUSES)}
_VERDICTS = verify.Codes(
    saved=_SAVED,
    not_observed=_NOT_OBSERVED,
    swallowed=_CODE["exception-swallowed"],
    nothing=_CODE["stored-nothing"],
    short=_CODE["slots-short"],
    shared=_CODE["ranks-share-store"],
    lost=_CODE["save-lost"],
)

_DONE, _MISSING, _LATER = 0, 1, 2
"""A chunk's step on a worker: executed; not recorded although later ones are, or after the
recording stopped; not reached when the trace ends."""

NATIVE = frozenset(
    {
        "NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector",
        "P2pNcclConnector",
    }
)  # fmt: skip
"""Built-in connectors whose transfers go past the step's metadata: what they send is not declared there."""

Rows = list[tuple[object, ...]]


@dataclass
class Account:
    """What the ledger says before the causes are named."""

    total: int = 0
    base: pd.DataFrame = field(default_factory=pd.DataFrame)
    pieces: pd.DataFrame = field(default_factory=pd.DataFrame)
    entries: pd.DataFrame = field(default_factory=pd.DataFrame)
    saved: list[int] = field(default_factory=list)  # per request, token-layers
    unsaved: list[int] = field(default_factory=list)
    diverged: list[bool] = field(default_factory=list)
    local: list[int] = field(default_factory=list)  # positions
    external: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)  # of the watched requests
    trust: Trust = field(default_factory=Trust)


@dataclass
class _Pairs:
    """One engine's pairs, and how every step that matters went in each."""

    live: NDArray[np.bool_]
    worker: Array  # pair -> index of its worker
    layer: Array  # pair -> number of its layer; ranks that hold a part of the same layer share it
    outcome: dict[int, NDArray[np.int8]]  # store step -> outcome per pair
    ran: dict[int, NDArray[np.int8]]  # chunk step -> state per worker
    native: bool
    kept: dict[int, Array]  # store step -> slots measured per pair where fewer than declared, else -1
    declared: dict[int, int]  # store step -> slots that its metadata names, of all requests
    spools: list[str]  # of the workers, in order
    dark_decode: bool  # whether decode tokens are stored is not known


@dataclass
class _Reuse:
    """What of a request need not be computed, in positions."""

    external: list[Interval]  # the connector is to bring it
    local: list[Interval]  # in the GPU prefix cache
    computed: list[Interval]  # by some chunk
    lost: Mapping[tuple[Part, ...], int]  # as in LoadOf

    def lost_in(self, pair: int) -> tuple[Part, ...]:
        return next((parts for parts, pairs in self.lost.items() if pairs >> pair & 1), ())


def book(
    requests: list[Request],
    engines: list[Engine],
    executed: dict[tuple[int, str], Executed],
    coverage: Coverage,
    unreadable: Steps,
    watch: Collection[str] = (),
    measured: Mapping[tuple[int, str], Measured] | None = None,
    swallowed: Sequence[Swallowed] = (),
    loads: Sequence[LoadOf] = (),
) -> Account:
    """Book all positions.

    Args:
        executed: what each worker (Worker.key) ran.
        unreadable: steps of which it is not known what they stored.
        watch: ids of the requests whose spans are kept.
        measured: what sampled hook calls of each worker (Worker.key) really read.
        swallowed: exceptions that connectors handled themselves.
        loads: what became of the requests' loads.

    The sum over the accounts and the pieces equals the sum of positions x pairs, or this
    raises AssertionError.
    """
    result = Account()
    by_engine: dict[int, list[Request]] = {}
    for request in requests:
        by_engine.setdefault(request.engine, []).append(request)
    pairs = {
        engine.tag: _pairs(
            engine, by_engine.get(engine.tag, []), executed, coverage, measured or {}, swallowed, result.trust
        )
        for engine in engines
    }
    lost = {load.request: load.lost for load in loads if load.lost}
    base: Rows = []
    pieces: Rows = []
    entries: Rows = []
    for row, request in enumerate(requests):
        own = pairs.get(request.engine)
        for entry in request.entries:
            entries.append(
                (row, request.engine, entry.step, entry.slots, entry.tokens, entry.start, entry.available,
                 entry.asynchronous)
            )  # fmt: skip
        if own is None:
            result.saved.append(0)
            result.unsaved.append(0)
            result.diverged.append(False)
            result.local.append(0)
            result.external.append(0)
            continue
        reuse = _reuse(request, lost.get(row, {}))
        _book_request(row, request, own, reuse, unreadable, result, base, pieces)
        if request.id in watch:
            result.spans.extend(_spans(row, request, own, reuse, unreadable))
    result.base = pd.DataFrame(base, columns=["request", "engine", "account", "amount", "prompt"])
    result.pieces = pd.DataFrame(pieces, columns=list(PIECE_COLUMNS))
    result.entries = pd.DataFrame(entries, columns=list(ENTRY_COLUMNS))
    booked = int(result.base["amount"].sum()) + int(
        ((result.pieces["end"] - result.pieces["start"]) * result.pieces["pairs"]).sum()
    )
    assert booked == result.total, f"token ledger: booked {booked} of {result.total} token-layers"
    return result


# ------------------------------------------------------------------------------ pairs


def _pairs(
    engine: Engine,
    requests: list[Request],
    executed: dict[tuple[int, str], Executed],
    coverage: Coverage,
    measured: Mapping[tuple[int, str], Measured],
    swallowed: Sequence[Swallowed],
    trust: Trust,
) -> _Pairs:
    store_steps = np.unique(np.array([e.step for r in requests for e in r.entries], dtype=np.int64))
    chunk_steps = np.unique(np.array([c.step for r in requests for c in r.chunks], dtype=np.int64))
    native = bool(engine.connector and engine.connector.cls in NATIVE and engine.store_entries == 0)
    columns: list[NDArray[np.int8]] = []
    states: list[NDArray[np.int8]] = []
    live: list[bool] = []
    owner: list[int] = []
    layers: dict[str, int] = {}
    layer: list[int] = []
    for index, worker in enumerate(engine.workers):
        key = worker.key
        ran = executed.get(key)
        states.append(_states(worker, ran, chunk_steps))
        columns.append(
            _outcomes(
                worker, ran, store_steps, coverage.stages[key], coverage.seen[key], coverage.outside[key]
            )
        )
        live.extend([worker.connector_live is not False] * len(worker.kv_layers))
        owner.extend([index] * len(worker.kv_layers))
        layer.extend(layers.setdefault(name, len(layers)) for name in worker.kv_layers)
    stores = verify.Stores.of(requests, store_steps, engine.block_size)
    kept = verify.check(engine, stores, columns, _VERDICTS, measured, list(swallowed), trust)
    missing = engine.pairs - len(owner)
    if missing > 0:
        # No worker told its layers: the books still have pairs, and say that nothing was seen.
        columns.append(np.full((len(store_steps), missing), _NOT_OBSERVED, dtype=np.int8))
        kept.append(np.full((len(store_steps), missing), -1, dtype=np.int64))
        states.append(np.full(len(chunk_steps), _MISSING, dtype=np.int8))
        live.extend([True] * missing)
        owner.extend([len(engine.workers)] * missing)
        layer.extend(range(len(layers), len(layers) + missing))
    outcome = np.concatenate(columns, axis=1) if columns else np.empty((len(store_steps), 0), dtype=np.int8)
    short = np.concatenate(kept, axis=1) if kept else np.empty((len(store_steps), 0), dtype=np.int64)
    state = np.stack(states, axis=1) if states else np.empty((len(chunk_steps), 0), dtype=np.int8)
    return _Pairs(
        live=np.array(live, dtype=bool),
        worker=np.array(owner, dtype=np.int64),
        layer=np.array(layer, dtype=np.int64),
        outcome={step: outcome[i] for i, step in enumerate(store_steps.tolist())},
        ran={step: state[i] for i, step in enumerate(chunk_steps.tolist())},
        native=native,
        kept={step: short[i] for i, step in enumerate(store_steps.tolist())},
        declared=dict(zip(store_steps.tolist(), stores.slots.tolist(), strict=True)),
        spools=[worker.spool for worker in engine.workers],
        dark_decode=bool(engine.implied_entries)
        and engine.implied_entries == engine.store_entries
        and engine.decode_measured is not False,
    )


def _in(steps: Array, wanted: Array) -> NDArray[np.bool_]:
    return np.isin(wanted, steps, assume_unique=True)


def _states(worker: Worker, ran: Executed | None, steps: Array) -> NDArray[np.int8]:
    """How each step went on a worker."""
    state = np.full(len(steps), _LATER, dtype=np.int8)
    if ran is not None:
        state[steps <= ran.last] = _MISSING
        state[_in(ran.steps, steps) | _in(ran.idle, steps)] = _DONE
    if worker.stop_reason in (Stop.SIZE_LIMIT, Stop.WRITE_FAILED, Stop.AGENT_ERROR):
        state[state == _LATER] = _MISSING
    return state


def _outcomes(
    worker: Worker,
    ran: Executed | None,
    steps: Array,
    stage: StoreStepBits,
    seen: set[str],
    outside: set[str],
) -> NDArray[np.int8]:
    """Outcome of each store step in each KV layer of a worker: the first stage that failed.

    Shape (steps, layers).
    """
    shape = (len(steps), len(worker.kv_layers))
    if not len(steps):
        return np.zeros(shape, dtype=np.int8)
    assert len(stage.steps) == len(steps), "store steps of the ledger and of the coverage differ"
    pair, step = stage.layers, stage.step[:, None]

    def every(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return np.broadcast_to(mask[:, None], shape)

    state = _states(worker, ran, steps)
    idle = every(_in(ran.idle, steps) if ran is not None else np.zeros(len(steps), bool))
    full = every(_in(ran.full, steps) if ran is not None else np.zeros(len(steps), bool))
    known = np.broadcast_to(np.array([layer in seen for layer in worker.kv_layers], dtype=bool), shape)
    # Graphs were in use, and this layer's body is known from outside of real steps alone.
    graphs = any(mode > 0 for mode in worker.modes)
    captured = np.broadcast_to(
        np.array([graphs and layer in outside for layer in worker.kv_layers], dtype=bool), shape
    )
    direct = np.broadcast_to(
        np.array([worker.facts.direct_call.get(layer) is True for layer in worker.kv_layers], dtype=bool),
        shape,
    )
    per_layer = worker.connector is None or worker.connector.saves_per_layer
    wait_ok, saved = (step & cov.WAIT_OK) != 0, (pair & cov.SAVE_OK) != 0
    good = saved if per_layer else np.broadcast_to(wait_ok, shape)
    raised = (pair & cov.SAVE_RAISED) != 0
    if not per_layer:
        raised = np.broadcast_to((step & cov.WAIT_RAISED) != 0, shape)
    # An exception ends the step: the layers after the one that raised never ran.
    raised = raised | np.broadcast_to(raised.any(axis=1, keepdims=True), shape)
    bound = (step & (cov.BOUND | cov.WAIT_OK)) != 0
    cleared = ((pair & cov.OP_CLEARED) != 0) & bound & saved.any(axis=1, keepdims=True)
    not_bound = (pair & (cov.OP_NO_METADATA | cov.SAVE_NO_METADATA)) != 0
    unbound = not_bound | ((step & cov.WAIT_NO_METADATA) != 0)
    never_bound = ((step & cov.BOUND) == 0) & (pair == 0) & ((step & cov.WAIT_OK) == 0)
    gone = (pair & cov.OP_NO_CONNECTOR) != 0
    no_body = (pair & (cov.OP_RAN | cov.SAVE_OK)) == 0
    yes = np.ones(shape, dtype=bool)
    tests: list[tuple[NDArray[np.bool_], int]] = [
        (yes & (worker.connector_live is False), _CODE["connector-not-created"]),
        (raised & ~good, _CODE["hook-raised"]),
        (every(state == _LATER), _PENDING),
        (every(state == _MISSING), _NOT_OBSERVED),
        (good, _SAVED),
        # A worker of which no hook at all was seen: the agent did not get in there.
        (yes & (not worker.hooks_seen and not worker.ops_seen), _NOT_OBSERVED),
        (gone, _CODE["connector-gone"]),
        (cleared, _CODE["metadata-cleared-early"]),
        (unbound, _CODE["metadata-not-bound"]),
        (idle, _CODE["no-forward"]),
        (full & no_body, _CODE["full-cudagraph-replay"]),
        (no_body & ~known & captured, _CODE["captured-not-run"]),
        (no_body & direct, _CODE["direct-call-bypass"]),
        (no_body & ~known, _CODE["layer-not-hooked"]),
        (np.broadcast_to(never_bound, shape), _CODE["metadata-not-bound"]),
        # The body was inside the hook's frame, and the call itself is not in the trace.
        ((pair & cov.OP_HOOKED) != 0, _NOT_OBSERVED),
    ]
    return np.select(
        [np.broadcast_to(test, shape) for test, _ in tests],
        [np.int8(code) for _, code in tests],
        default=np.int8(_CODE["layer-not-hooked"]),
    ).astype(np.int8)


# --------------------------------------------------------------------------- requests


def _book_request(
    row: int,
    request: Request,
    pairs: _Pairs,
    reuse: _Reuse,
    unreadable: Steps,
    result: Account,
    base: Rows,
    pieces: Rows,
) -> None:
    computed, prompt = request.computed, request.prompt
    result.local.append(length(reuse.local))
    result.external.append(length(reuse.external))
    amounts: Counter[str] = Counter()
    prompts: Counter[str] = Counter()
    unsaved = 0
    saved_of: list[int] = []  # of each class
    classes, class_of = _classes(request, pairs, reuse)
    for count, representative in classes:
        saved_here = 0
        for segment in _segments(request, pairs, representative, reuse, unreadable):
            start, end, account, chunk, stage = segment
            size = (end - start) * count
            if account:
                amounts[account] += size
                prompts[account] += max(0, min(end, prompt) - start) * count
                if account == SAVED:
                    saved_here += end - start
                continue
            unsaved += size
            live = bool(pairs.live[representative])
            step = request.chunks[chunk].step if chunk >= 0 else 0
            for low, high, phase in (
                (start, min(end, prompt), "prefill"),
                (max(start, prompt), end, "decode"),
            ):
                if low < high:
                    pieces.append((row, request.engine, low, high, count, phase, chunk, step, stage, live))
        saved_of.append(saved_here)
    for account, amount in amounts.items():
        base.append((row, request.engine, account, amount, prompts[account]))
    result.total += computed * len(pairs.live)
    result.saved.append(amounts[SAVED])
    result.unsaved.append(unsaved)
    result.diverged.append(_ranks_differ(pairs.layer, np.array(saved_of, dtype=np.int64)[class_of]))


def _reuse(request: Request, lost: Mapping[tuple[Part, ...], int]) -> _Reuse:
    chunks = union((chunk.start, chunk.end) for chunk in request.chunks)
    external = [(a, min(b, request.computed)) for a, b in union(request.external)]
    if not request.preemptions:
        # What was computed after all, without a preemption, was loaded in vain: the load failed.
        external = subtract(external, chunks)
    local = subtract(subtract(union(request.reused), chunks), external)
    return _Reuse(external, local, chunks, lost)


def _spans(row: int, request: Request, pairs: _Pairs, reuse: _Reuse, unreadable: Steps) -> list[Span]:
    """The same as :func:`_book_request`, pair by pair, and kept."""
    alike: dict[tuple[tuple[int, int, str, int, str, bool], ...], list[int]] = {}
    for pair in range(len(pairs.live)):
        live = bool(pairs.live[pair])
        fate = tuple((*s, live) for s in _segments(request, pairs, pair, reuse, unreadable))
        alike.setdefault(fate, []).append(pair)
    return [
        Span(row, start, end, account, stage, chunk, request.chunks[chunk].step if chunk >= 0 else 0, live,
             tuple(members))
        for fate, members in alike.items()
        for start, end, account, chunk, stage, live in fate
    ]  # fmt: skip


def _ranks_differ(layer: Array, saved: Array) -> bool:
    """Whether a layer was saved to different extents by the ranks that hold a part of it. Layers of one
    rank may differ: that is another cause's."""
    if not len(saved) or (saved == saved[0]).all():
        return False
    found_pairs = np.unique(np.stack([layer, saved]), axis=1)
    return bool(len(np.unique(found_pairs[0])) < found_pairs.shape[1])


def _classes(request: Request, pairs: _Pairs, reuse: _Reuse) -> tuple[list[tuple[int, int]], Array]:
    """Pairs with the same fate in this request: (how many, one of them) each, and the class of each pair."""
    n = len(pairs.live)
    if not n:
        return [], np.empty(0, dtype=np.int64)
    rows: list[Array] = [pairs.live.astype(np.int64)]
    for members in reuse.lost.values():
        rows.append(np.array([members >> pair & 1 for pair in range(n)], dtype=np.int64))
    stores = list(dict.fromkeys(entry.step for entry in request.entries))
    rows += [pairs.outcome[step].astype(np.int64) for step in stores]
    rows += [pairs.kept[step] for step in stores if (pairs.kept[step] >= 0).any()]
    if any(request.saves.get(spool) for spool in pairs.spools):
        ends = np.array(
            [request.saves.get(spool, "") != "" for spool in (*pairs.spools, "?")], dtype=np.int64
        )
        rows.append(ends[pairs.worker])
    rows += [
        pairs.ran[step][pairs.worker].astype(np.int64)
        for step in dict.fromkeys(chunk.step for chunk in request.chunks)
    ]
    table = np.stack(rows)
    if (table == table[:, :1]).all():
        return [(n, 0)], np.zeros(n, dtype=np.int64)
    _, first, class_of, counts = np.unique(
        table, axis=1, return_index=True, return_inverse=True, return_counts=True
    )
    return list(zip(counts.tolist(), first.tolist(), strict=True)), class_of.reshape(-1)


def _segments(
    request: Request,
    pairs: _Pairs,
    pair: int,
    reuse: _Reuse,
    unreadable: Steps,
) -> list[tuple[int, int, str, int, str]]:
    """(start, end, account or "" for unsaved, chunk index or -1, stage's cause or "")."""
    computed, prompt = request.computed, request.prompt
    worker = int(pairs.worker[pair])
    by_outcome: dict[int, list[Interval]] = {}
    for entry in request.entries:
        end = min(entry.start + max(0, entry.slots), entry.available, computed)
        if end <= entry.start:
            continue
        fate, kept = int(pairs.outcome[entry.step][pair]), int(pairs.kept[entry.step][pair])
        middle = entry.start
        if kept >= 0:
            # What was read of the step's stores is shared out as they were declared.
            part = max(0, entry.slots) * kept // max(1, pairs.declared[entry.step])
            middle = min(end, entry.start + part)
        if middle > entry.start:
            by_outcome.setdefault(_SAVED, []).append((entry.start, middle))
        if end > middle:
            by_outcome.setdefault(fate, []).append((middle, end))
    taken = {code: union(intervals) for code, intervals in by_outcome.items()}
    done = taken.pop(_SAVED, [])
    failed = sorted(taken.items())  # by stage: the codes are in the order of the stages
    lost = reuse.lost_in(pair)
    loaded = subtract(reuse.external, union((a, b) for a, b, _ in lost))
    # To come from the connector, not there when it was needed, and computed by no step.
    never = subtract(reuse.external, union([*loaded, *reuse.computed])) if lost else []
    local = reuse.local
    cuts = {0, computed, min(prompt, computed)}
    for intervals in (loaded, never, local, done, *(taken.values()), [(a, b) for a, b, _ in lost]):
        for a, b in intervals:
            cuts.update((a, b))
    # The chunk that computed a position is the first one that ran.
    spans: list[tuple[int, int, int]] = []
    for i, chunk in enumerate(request.chunks):
        spans.append((chunk.start, min(chunk.end, computed), i))
        cuts.update((chunk.start, chunk.end))
    marks = sorted(cut for cut in cuts if 0 <= cut <= computed)
    owner = _owners(marks, spans, request, pairs, worker)
    # Decode steps name no request: all steps of its life count.
    decode_unreadable = pairs.dark_decode or (
        bool(request.steps) and unreadable.any_within(min(request.steps), max(request.steps))
    )
    ended = ""
    if request.saves:
        spool = pairs.spools[worker] if worker < len(pairs.spools) else "?"
        ended = request.saves.get("") or request.saves.get(spool) or ""
    found: list[tuple[int, int, str, int, str]] = []
    for at, (start, end) in enumerate(pairwise(marks)):
        chunk_index, state = owner[at]
        account, stage = "", ""
        if covers(loaded, start):
            account = LOADED
        elif covers(never, start):
            account = next(account for a, b, account in lost if a <= start < b)
        elif covers(done, start):
            account = SAVED
            if ended == completion.PENDING:
                account = PENDING
            elif ended:
                account, stage = "", "save-lost" if ended == completion.LOST else "save-never-finished"
        elif covers(local, start):
            account = LOCAL_HIT
        elif chunk_index < 0 and start < prompt:
            account = NOT_OBSERVED  # no chunk of the trace computed it
        elif state == _LATER:
            account = PENDING
        elif state == _MISSING or pairs.native:
            account = NOT_OBSERVED
        else:
            code = next((code for code, intervals in failed if covers(intervals, start)), None)
            if code == _PENDING:
                account = PENDING
            elif code == _NOT_OBSERVED:
                account = NOT_OBSERVED
            elif code is not None:
                stage = _CAUSES[code - 3]
            elif chunk_index >= 0:
                if request.chunks[chunk_index].step in unreadable:
                    account = NOT_OBSERVED
            elif decode_unreadable:
                account = NOT_OBSERVED
        if found and found[-1][1] == start and found[-1][2:] == (account, chunk_index, stage):
            found[-1] = (found[-1][0], end, account, chunk_index, stage)
        else:
            found.append((start, end, account, chunk_index, stage))
    return found


def _owners(
    marks: list[int],
    spans: list[tuple[int, int, int]],
    request: Request,
    pairs: _Pairs,
    worker: int,
) -> list[tuple[int, int]]:
    """Per elementary interval: (chunk index, state of its step); (-1, done) where none."""
    at = {mark: i for i, mark in enumerate(marks)}
    owner = [(-1, _DONE)] * max(0, len(marks) - 1)
    best = {_DONE: 0, _MISSING: 1, _LATER: 2}
    for start, end, index in spans:
        state = int(pairs.ran[request.chunks[index].step][worker])
        if end <= start:
            continue
        for i in range(at[start], at[end]):
            chunk, known = owner[i]
            if chunk < 0 or best[state] < best[known]:
                owner[i] = (index, state)
    return owner
