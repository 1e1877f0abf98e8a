"""The ledger of loads: every prompt token, from the connector's answer to the KV in the layers.

Total: the prompt tokens of every request that a scheduler with a connector let in, times pairs.
Each goes to one account: ``local-hit`` (in the GPU's own prefix cache), ``loaded``,
``clamped:<cause>`` (offered, not taken), ``missed:<cause>`` (not offered, or never asked for),
``not-loaded:<cause>`` (taken, and not in the layer), ``pending``, ``not-observed``.

A request is looked at in its first admission: what is loaded again after a preemption was
computed once already.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtrace.ledger import load_trace as trace
from kvtrace.ledger.intervals import Interval, subtract, union
from kvtrace.ledger.load_model import (
    FULL_HIT,
    NO_BLOCKS,
    NOT_LOADED,
    ROUNDED,
    SKIPS_CACHE,
    SUB_BLOCK,
    UNEXPLAINED,
    LoadOf,
    Part,
)
from kvtrace.ledger.load_trace import NEVER, Done, Evidence, Story, WorkerLoads
from kvtrace.ledger.model import (
    CLAMPED,
    LOADED,
    LOCAL_HIT,
    MISSED,
    NOT_OBSERVED,
    PENDING,
    Engine,
    Ledger,
    Worker,
)
from kvtrace.ledger.requests import Request
from kvtrace.ledger.scan import Array, Executed, SpoolScan
from kvtrace.trace.format import Stop

DECLARED = "declared: what the scheduler accepted from the connector; the slots written were not measured"
MEASURED = "measured: the slots that the load hooks wrote into each layer"
MIXED = "the slots written were measured in some load steps; the others are declared by the scheduler"

NONE = "the scheduler accepted no load: there was nothing to write"

NEVER_FINISHED_NS = 5 * 10**9
"""A request that leaves after this long in an open load did not leave for an impatient client's sake."""
STILL_OPEN_NS = 60 * 10**9
"""A load that is open for this long when the trace ends will not come any more."""
_BETWEEN = 64
"""Saves between a save and a lookup that are told apart."""
_WINDOW = 64
"""Steps of an asynchronous load that is named nowhere, at most, in which its writes are looked for."""
_SETTLED_NS = 10**9
"""A save in the background is taken for done this long after its request finished."""


@dataclass(frozen=True)
class _Want:
    """An accepted load."""

    row: LoadOf
    request: Request
    story: Story
    allocated_t: int


def follow(
    requests: list[Request],
    engines: list[Engine],
    joined: Sequence[tuple[SpoolScan, Worker]],
    stories: list[Story],
    executed: dict[tuple[int, str], Executed],
) -> list[LoadOf]:
    """Each request's loads, from the lookup to the layers; why a lookup missed is left to :func:`book`.

    Args:
        stories: the scheduler's records of each request, in the order of ``requests``.
        executed: what each worker (Worker.key) ran.
    """
    with_connector = _with_connector(engines)
    rows: list[LoadOf] = []
    wants: list[_Want] = []
    for i, (request, story) in enumerate(zip(requests, stories, strict=True)):
        engine = with_connector.get(request.engine)
        if engine is None or request.prompt <= 0 or not (request.lookups or request.chunks):
            continue  # never let in: it was not asked for, and cannot have been
        row, want = _until_accepted(i, request, story, engine)
        rows.append(row)
        if want is not None:
            wants.append(want)
    if wants:
        _load_all(wants, with_connector, executed, trace.evidence(joined, _load_steps(wants)))
    return rows


def book(
    rows: list[LoadOf],
    requests: list[Request],
    engines: list[Engine],
    joined: Sequence[tuple[SpoolScan, Worker]],
    stories: list[Story],
    saved: Sequence[int],
) -> Ledger:
    """The ledger of what :func:`follow` found.

    Args:
        saved: token-layers saved of each request.

    Raises:
        AssertionError: the books do not balance.
    """
    with_connector = _with_connector(engines)
    _shared(rows, requests, stories)
    candidates = _saved_before(rows, requests, stories, with_connector, saved)
    if candidates:
        _mismatches(candidates, requests, stories, with_connector, trace.written(joined))
    return _balance(rows, with_connector)


def _with_connector(engines: list[Engine]) -> dict[int, Engine]:
    return {engine.tag: engine for engine in engines if engine.connector is not None and engine.pairs > 0}


def _balance(rows: list[LoadOf], engines: dict[int, Engine]) -> Ledger:
    accounts: Counter[str] = Counter()
    tokens: defaultdict[str, float] = defaultdict(float)
    total = 0
    watched = [row.measured for row in rows if row.accepted]
    for row in rows:
        pairs = engines[row.engine].pairs
        short = row.prompt * pairs - sum(row.accounts.values())
        assert short == 0, f"load ledger off by {short} token-layers of request {row.id}: {row.accounts}"
        total += row.prompt * pairs
        for account, amount in row.accounts.items():
            accounts[account] += amount
            tokens[account] += amount / pairs
    pairs_of = {engines[row.engine].pairs for row in rows}
    note = MEASURED if watched and all(watched) else MIXED if any(watched) else DECLARED if watched else NONE
    trust = "measured" if note is MEASURED else "mixed" if note is MIXED else "declared"
    result = Ledger(
        total=total,
        accounts=dict(accounts),
        pairs=pairs_of.pop() if len(pairs_of) == 1 else None,
        tokens=dict(tokens),
        total_tokens=float(sum(row.prompt for row in rows)),
        trust=trust if total else "none",
        trust_note=note if total else "",
    )
    result.check()
    return result


# -------------------------------------------------------------------- until it is accepted


def _until_accepted(i: int, request: Request, story: Story, engine: Engine) -> tuple[LoadOf, _Want | None]:
    """What the scheduler's side alone tells; an accepted load is left for the workers."""
    pairs, prompt = engine.pairs, request.prompt
    lookup = request.looked_up
    row = LoadOf(i, request.id, request.engine, prompt, step=0, looked_up=bool(request.lookups))
    if lookup is None:
        if request.lookups:  # asked, and told to wait
            last = request.lookups[-1]
            row.step, row.local = last.step, min(last.local, prompt)
            row.add(LOCAL_HIT, row.local * pairs)
            row.add(NOT_OBSERVED if request.chunks else PENDING, (prompt - row.local) * pairs)
            return row, None
        row.local = min(prompt, request.chunks[0].start)
        row.step = request.chunks[0].step
        row.add(LOCAL_HIT, row.local * pairs)
        proxied = engine.connector is not None and engine.connector.proxy != "none"
        row.add(f"{MISSED}never-looked-up" if proxied else NOT_OBSERVED, (prompt - row.local) * pairs)
        return row, None
    asked = next((a for a in story.asked if (a.step, a.answer) == (lookup.step, lookup.answer)), None)
    row.step, row.answer, row.local = lookup.step, lookup.answer, min(lookup.local, prompt)
    row.asynchronous = asked is not None and asked.asynchronous
    row.add(LOCAL_HIT, row.local * pairs)
    left = prompt - row.local
    taken = lookup.accepted
    if taken is None and request.chunks:  # no word of the allocation: where it began to compute
        taken = request.external[0][1] - row.local if request.external else 0
    if taken is None:
        if request.finish is not None and row.offered:
            row.clamp = NO_BLOCKS
            row.add(f"{CLAMPED}lookup-clamped", row.offered * pairs)
            row.add(PENDING, (left - row.offered) * pairs)
        else:
            row.add(PENDING, left * pairs)
        return row, None
    row.accepted = min(max(0, taken), row.offered)
    if request.chunks and not row.asynchronous:
        row.accepted = min(row.accepted, max(0, request.chunks[0].start - row.local))
    elif row.asynchronous and request.chunks and row.local + row.accepted == prompt:
        # A whole prompt that was loaded computes its last token again.
        row.accepted -= min(1, row.accepted)
    kept_back = row.offered - row.accepted
    row.add(f"{CLAMPED}lookup-clamped", kept_back * pairs)
    row.add(f"{MISSED}lookup-miss", (left - row.offered) * pairs)
    if kept_back:
        row.clamp = _clamp(row, request.block or engine.block_size)
    if not row.accepted:
        return row, None
    allocated = [t for t, step, external in story.allocated if step == lookup.step and external > 0]
    t = allocated[0] if allocated else (asked.t if asked else 0)
    return row, _Want(row, request, story, t)


def _clamp(row: LoadOf, block: int) -> str:
    """Why the scheduler (vLLM 0.8.5 .. 0.33.0) takes less than it was offered."""
    if row.accepted == 0:
        if row.offered < block and row.local % block:
            return SUB_BLOCK
        return SKIPS_CACHE if row.offered > 1 else FULL_HIT if row.local + 1 == row.prompt else UNEXPLAINED
    kept_back = row.offered - row.accepted
    if kept_back == 1 and row.local + row.offered == row.prompt:
        return FULL_HIT
    if block > 0 and kept_back < block and (row.local + row.accepted) % block == 0:
        return ROUNDED
    return UNEXPLAINED


# ------------------------------------------------------------------------ saved before


def _shared(rows: list[LoadOf], requests: list[Request], stories: list[Story]) -> None:
    """How many leading tokens each prompt has in common with an earlier one."""
    known: dict[int, dict[int, int]] = defaultdict(dict)  # engine -> digest -> tokens
    for row in rows:
        request, story = requests[row.request], stories[row.request]
        mine = dict(story.prefixes)
        block = request.block
        if request.prefix and block > 0:
            mine[request.prefix] = (request.prompt - 1) // block * block
        if request.digest:
            mine[request.digest] = request.prompt
        seen = known[row.engine]
        row.shared = max((tokens for digest, tokens in mine.items() if seen.get(digest) == tokens), default=0)
        row.shared = min(row.shared, row.prompt)
        seen.update(mine)


def _saved_before(
    rows: list[LoadOf],
    requests: list[Request],
    stories: list[Story],
    engines: dict[int, Engine],
    saved: Sequence[int],
) -> list[tuple[LoadOf, int]]:
    """Lookups of a prompt that an earlier request of this run saved: (row, that request's row)."""
    saves: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # engine -> (step, row, tokens)
    for row in rows:
        request = requests[row.request]
        tokens = _saved_whole(request, saved[row.request], engines[row.engine].pairs)
        if tokens and request.finish is not None and stories[row.request].stores <= 0:
            saves[row.engine].append((request.finish[0], row.request, tokens))
    for done in saves.values():
        done.sort()
    same: dict[tuple[int, int, int], list[int]] = defaultdict(list)  # places in ``saves`` of one prompt
    for engine, done in saves.items():
        for at, (_, other, _) in enumerate(done):
            same[(engine, requests[other].digest, requests[other].prompt)].append(at)
    found = []
    for row in rows:
        request = requests[row.request]
        places = same.get((row.engine, request.digest, request.prompt))
        if row.answer is None or not request.digest or not places:
            continue
        done = saves[row.engine]
        ended = bisect_left(done, (row.step,))
        at = places[bisect_left(places, ended) - 1]
        if at >= ended:
            continue
        _, other, row.saved_before = done[at]
        row.saved_by = requests[other].id
        between = done[at + 1 : min(ended, at + 1 + _BETWEEN)]
        row.others_between = len({requests[r].digest for _, r, _ in between})
        found.append((row, other))
    return found


def _saved_whole(request: Request, amount: int, pairs: int) -> int:
    """Leading positions that were saved in every pair, 0 where that cannot be told."""
    if amount <= 0 or amount % pairs:
        return 0
    entries = union((e.start, min(e.start + e.slots, e.available)) for e in request.entries if e.slots > 0)
    if not entries or entries[0][0] != 0 or any(entry.asynchronous for entry in request.entries):
        return 0
    return entries[0][1] if entries[0][1] * pairs == amount else 0


def _mismatches(
    candidates: list[tuple[LoadOf, int]],
    requests: list[Request],
    stories: list[Story],
    engines: dict[int, Engine],
    written: set[int],
) -> None:
    """Misses that no eviction can explain: what was saved last is what is not found.

    A miss with other saves in between can be an eviction; it counts only where a prompt of the same
    length within its block was missed right after its save, and none of these was ever found.
    """
    by_kind: dict[tuple[int, int], list[tuple[LoadOf, int]]] = defaultdict(list)
    for row, other in candidates:
        engine = engines[row.engine]
        # A saved prompt that leaves no token to compute may be out of bounds for a lookup in whole units.
        if engine.role == "kv_producer" or row.saved_before >= row.prompt or row.saved_before <= row.local:
            continue
        if not _settled(row, requests[other], stories[other], stories[row.request], written):
            continue
        block = max(1, requests[row.request].block or engine.block_size)
        by_kind[(row.engine, row.prompt % block)].append((row, other))
    for group in by_kind.values():
        missed = [row for row, _ in group if row.answer == 0]
        hit = any((row.answer or 0) > 0 for row, _ in group)
        at_once = [row for row in missed if row.others_between == 0]
        for row in at_once if hit else missed if at_once else []:
            pairs = engines[row.engine].pairs
            tokens = min(row.saved_before - row.local, row.accounts.get(f"{MISSED}lookup-miss", 0) // pairs)
            row.add(f"{MISSED}lookup-miss", -tokens * pairs)
            row.add(f"{MISSED}key-mismatch", tokens * pairs)
            row.accounts = {name: n for name, n in row.accounts.items() if n}


def _settled(row: LoadOf, earlier: Request, its: Story, mine: Story, written: set[int]) -> bool:
    """Whether the earlier save was surely done at this lookup."""
    if all(entry.step in written for entry in earlier.entries if entry.slots > 0):
        return True
    asked = next((a.t for a in mine.asked if a.step == row.step), 0)
    return bool(asked and its.finish_t) and asked - its.finish_t >= _SETTLED_NS


# ----------------------------------------------------------------------- into the layers


def _window(want: _Want) -> list[int]:
    """The steps in which an asynchronous load can have been started: those whose metadata names it;
    where none does, from the allocation until it was reported as finished. Empty: too many to tell."""
    named = sorted({step for step, _, _ in want.story.entries if step >= want.row.step})
    if named:
        return named
    told = [one.step for one in want.story.done if one.t >= want.allocated_t and one.step >= want.row.step]
    last = min(told) if told else want.request.chunks[0].step - 1 if want.request.chunks else 0
    return list(range(want.row.step, last + 1)) if last - want.row.step < _WINDOW else []


def _load_steps(wants: list[_Want]) -> Array:
    steps = {want.row.step for want in wants if not want.row.asynchronous}
    steps |= {step for want in wants for step, _, _ in want.story.entries}
    steps |= {step for want in wants if want.row.asynchronous for step in _window(want)}
    return np.array(sorted(steps), dtype=np.int64)


@dataclass(frozen=True)
class _Seen:
    """What the workers' spools say, and what each step was to load."""

    found: Evidence
    blocks: dict[int, int]  # step -> blocks reported as not loaded, and not yet given to a request
    loads: Counter[int]  # step -> synchronous loads
    tokens: Counter[int]  # step -> tokens that they accepted
    write: set[tuple[int, str]]
    """Workers whose load hooks were seen to write: there, a watched hook that wrote nothing is one that
    loaded nothing."""
    write_all: set[tuple[int, str]]
    """Workers whose load hooks were seen to write all that a step had accepted. Elsewhere, what they wrote
    may be the part of it that can be seen."""


def _load_all(
    wants: list[_Want],
    engines: dict[int, Engine],
    executed: dict[tuple[int, str], Executed],
    found: Evidence,
) -> None:
    sync = [want for want in wants if not want.row.asynchronous]
    tokens: Counter[int] = Counter()
    for want in sync:
        tokens[want.row.step] += want.row.accepted
    seen = _Seen(
        found=found,
        blocks=_error_blocks(found),
        loads=Counter(want.row.step for want in sync),
        tokens=tokens,
        write={key for key, loads in found.workers.items() if bool((loads.wrote > 0).any())},
        write_all={
            key
            for key, loads in found.workers.items()
            if any(
                tokens[step] > 0 and bool((loads.wrote[at] >= tokens[step]).any())
                for at, step in enumerate(loads.steps.tolist())
            )
        },
    )
    for want in wants:
        if want.row.asynchronous:
            _load_async(want, engines[want.row.engine], seen)
        else:
            _load_sync(want, engines[want.row.engine], executed, seen)


def _error_blocks(found: Evidence) -> dict[int, int]:
    """Step -> blocks reported in it and not yet given to a request; ranks report the same ones."""
    blocks: dict[int, int] = {}
    for reports in found.errors.values():
        for _, step, count in reports:
            blocks[step] = max(blocks.get(step, 0), count)
    return blocks


def _computed_again(want: _Want) -> int:
    """How many of the accepted tokens were computed after all; 0 where that was for a preemption, or not
    at all."""
    row, request = want.row, want.request
    end = row.local + row.accepted
    starts = [chunk.start for chunk in request.chunks[1:] if row.local <= chunk.start < end]
    return end - min(starts) if starts and not request.preemptions else 0


def _load_sync(want: _Want, engine: Engine, executed: dict[tuple[int, str], Executed], seen: _Seen) -> None:
    row = want.row
    taken = row.accepted
    block = max(1, want.request.block or engine.block_size)
    failed = min(taken, seen.blocks.get(row.step, 0) * block)
    if failed:
        failed = _computed_again(want) or failed
        seen.blocks[row.step] -= -(-failed // block)
        alone = seen.loads[row.step] == 1
        whose = "" if alone else "; which of the step's requests they belong to is not recorded"
        reported = f"{-(-failed // block)} blocks reported by get_block_ids_with_load_errors"
        row.because("load-failed", reported + whose)
    start, end = row.local, row.local + taken
    unnamed = _unnamed(want)
    booked = 0
    watched = bool(engine.workers)
    ready = 0
    for worker in engine.workers:
        first, pairs = booked, len(worker.kv_layers)
        booked += pairs
        ran = executed.get(worker.key)
        loads = seen.found.workers.get(worker.key)
        at = loads.row(row.step) if loads is not None else -1
        state = _state(worker, ran, row.step)
        # An exception ends the step, and may end the worker: no record says that it was executed.
        raised = loads is not None and at >= 0 and bool(loads.step[at] & trace.START_RAISED)
        raised = raised or (
            loads is not None and at >= 0 and bool((loads.pair[at] & trace.WAIT_RAISED).any())
        )
        if state and not raised:
            _put(row, [(start, end, state)], _bits(first, pairs))
            watched = False
            continue
        if loads is None or at < 0:
            _put(row, [], _bits(first, pairs))  # past what is looked at in detail
            watched = False
            continue
        ready = max(ready, int(loads.started_t[at]))
        full = ran is not None and _has(ran.full, row.step)
        for pair, layer in enumerate(worker.kv_layers):
            place = (worker.rank, layer)
            cause, reason, got = _pair(worker, loads, at, pair, full, row, seen)
            watched &= loads.measured(at, pair, _waits(worker)) >= 0
            if cause:
                _put(row, [(start, end, NOT_LOADED + cause)], _bits(first + pair))
                row.because(cause, reason, place)
                continue
            # Which positions failed or were left out is recorded as a number alone: taken to be the last.
            good = end - failed
            short = [(start + got, good)] if start + got < good else []
            if got >= taken and (short := subtract(unnamed, [(good, end)])):
                reason = "the metadata names fewer slots than were accepted"
            lost = [*_of("loaded-partly", short), *_of("load-failed", [(good, end)])]
            _put(row, lost, _bits(first + pair))
            if failed:
                row.because("load-failed", row.reasons["load-failed"][0], place)
            if short:
                row.because("loaded-partly", reason, place)
    if engine.pairs > booked:  # pairs that no worker told of
        _put(row, [(start, end, NOT_OBSERVED)], _bits(booked, engine.pairs - booked))
        watched = False
    row.measured = watched
    asked = next((a.t for a in want.story.asked if a.step == row.step), 0)
    if asked and ready > asked:
        row.waited_ns = ready - asked


def _put(row: LoadOf, lost: Iterable[Part], pairs: int) -> None:
    """Book an accepted load in some pairs (a bit each): what is lost of it, the rest as loaded."""
    parts = tuple(part for part in lost if part[0] < part[1])
    for start, end, account in parts:
        row.add(account, (end - start) * pairs.bit_count())
    row.add(LOADED, (row.accepted - sum(end - start for start, end, _ in parts)) * pairs.bit_count())
    if parts and pairs:
        row.lost[parts] = row.lost.get(parts, 0) | pairs


def _bits(first: int, count: int = 1) -> int:
    return ((1 << count) - 1) << first


def _of(cause: str, positions: list[Interval]) -> list[Part]:
    return [(start, end, NOT_LOADED + cause) for start, end in positions]


def _has(steps: Array, step: int) -> bool:
    at = int(np.searchsorted(steps, step))
    return at < len(steps) and int(steps[at]) == step


def _state(worker: Worker, ran: Executed | None, step: int) -> str:
    """An account where the step is not in the worker's trace, "" where it is."""
    if worker.connector_live is False:
        return NOT_LOADED + "load-not-injected"
    if ran is not None and (_has(ran.steps, step) or _has(ran.idle, step)):
        return "" if worker.hooks_seen else NOT_OBSERVED
    if worker.stop_reason in (Stop.SIZE_LIMIT, Stop.WRITE_FAILED, Stop.AGENT_ERROR):
        return NOT_OBSERVED
    return NOT_OBSERVED if ran is not None and step <= ran.last else PENDING


def _pair(
    worker: Worker, loads: WorkerLoads, at: int, pair: int, full: bool, row: LoadOf, seen: _Seen
) -> tuple[str, str, int]:
    """(cause, what was seen, tokens that got into the pair) of a synchronous load in one pair."""
    step, taken = row.step, row.accepted
    if int(loads.step[at]) & trace.START_RAISED:
        return "load-failed", "start_load_kv raised", 0
    if int(loads.pair[at, pair]) & trace.WAIT_RAISED or (
        int(loads.op_t[at, pair]) == NEVER and bool((loads.pair[at] & trace.WAIT_RAISED).any())
    ):
        return "load-failed", "wait_for_layer_load raised", 0
    if not int(loads.step[at]) & trace.STARTED and bool((loads.step & trace.STARTED).any()):
        return "load-not-injected", "start_load_kv was not called in the step", 0
    waits = _waits(worker)
    wrote, wanted = loads.measured(at, pair, waits), seen.tokens[step]
    if wrote == 0:
        if worker.key in seen.write:
            return "load-not-injected", "the load hooks wrote 0 slots here, and did write in other steps", 0
        for complaint in seen.found.complaints.get(step, []):
            return "load-not-injected", f"the load hooks wrote 0 slots here; {complaint}", 0
        if not waits:
            return "load-not-injected", "start_load_kv wrote 0 slots, and wait_for_layer_load does nothing", 0
    elif 0 < wrote < wanted and worker.key in seen.write_all:
        # Several requests share the slots of a step: which of them got fewer is not recorded.
        alone = seen.loads[step] == 1
        got = max(0, taken - (wanted - wrote)) if alone else taken * wrote // wanted
        return "", f"the load hooks wrote {wrote} of {wanted} slots; in other steps they wrote all", got
    late = _after_use(worker, loads, at, pair, full)
    return ("load-after-use", late, 0) if late else ("", "", taken)


def _waits(worker: Worker) -> bool:
    """Whether this connector does something in wait_for_layer_load."""
    return worker.connector is not None and "wait_for_layer_load" not in worker.connector.noop


def _after_use(worker: Worker, loads: WorkerLoads, at: int, pair: int, full: bool) -> str:
    """What shows that a layer's attention ran before its KV was waited for."""
    op, wait = int(loads.op_t[at, pair]), int(loads.wait_t[at, pair])
    started = int(loads.started_t[at])
    if op != NEVER and started and op < started:
        return "its attention began before start_load_kv had returned"
    if not _waits(worker):
        return ""
    if op != NEVER and wait != NEVER and op < wait:
        return "its attention began before wait_for_layer_load was called"
    if op != NEVER and wait == NEVER:
        return "its attention ran, and wait_for_layer_load was not called for it"
    if op == NEVER and wait == NEVER and not full and bool((loads.wait_t[at] != NEVER).any()):
        return "wait_for_layer_load was not called for it, as it was for other layers of the step"
    if op == NEVER and wait == NEVER and full:
        return "the step replayed a FULL CUDA graph, in which nothing waits for the load"
    return ""


def _unnamed(want: _Want) -> list[Interval]:
    """Accepted positions that no load entry of the request names; none where the entries do not say."""
    entries = [entry for entry in want.story.entries if entry[0] >= want.row.step]
    if not entries or any(slots < 0 or start < 0 for _, slots, start in entries):
        return []
    row = want.row
    named = union((start, start + slots) for _, slots, start in entries)
    return subtract([(row.local, row.local + row.accepted)], named)


# ------------------------------------------------------------------------ asynchronously


def _load_async(want: _Want, engine: Engine, seen: _Seen) -> None:
    row, request, story = want.row, want.request, want.story
    done = [one for one in story.done if one.t >= want.allocated_t]
    told = [one for one in done if not one.spool]
    began = request.chunks[0].start if request.chunks else -1
    if began >= 0 or told:
        end = min([one.t for one in told or done] + [story.chunk_t or NEVER])
        if end < NEVER and want.allocated_t:
            row.waited_ns = max(0, end - want.allocated_t)
    if began < 0 and not told:
        account = _still_open(want, engine, done)
        _put(row, [(row.local, row.local + row.accepted, account)], _bits(0, engine.pairs))
        return
    _async_pairs(want, engine, seen, _async_failed(want, engine, seen.found, done, began))


def _async_failed(want: _Want, engine: Engine, found: Evidence, done: list[Done], began: int) -> int:
    """Tokens that the connector reported as failed."""
    row = want.row
    if any(one.failed for one in done):
        row.because("load-failed", "the transfer was reported as failed")
        return row.accepted
    until = want.story.chunk_t or want.story.finish_t or NEVER
    blocks = [count for t, _, count in found.errors.get(engine.tag, ()) if want.allocated_t <= t <= until]
    short = row.local + row.accepted - began if began >= 0 else 0
    again = sum(lookup.accepted is not None for lookup in want.request.lookups) > 1 and began >= 0
    if not blocks or (short <= 0 and not again):
        return 0
    row.because("load-failed", f"{max(blocks)} blocks reported by get_block_ids_with_load_errors")
    return row.accepted if short <= 0 else min(row.accepted, short)


def _still_open(want: _Want, engine: Engine, done: list[Done]) -> str:
    """The account of a load that never came to an end in the trace."""
    row, story = want.row, want.story
    finished = want.request.finish is not None
    end = story.finish_t if finished else engine.t_last
    open_ns = end - want.allocated_t if want.allocated_t and end else 0
    row.waited_ns = max(-1, open_ns)
    ranks = sorted({w.rank for w in engine.workers if any(one.spool == w.spool for one in done)})
    missing = [w.rank for w in engine.workers if w.rank not in ranks]
    if open_ns < (NEVER_FINISHED_NS if finished else STILL_OPEN_NS):
        return PENDING
    seconds = open_ns / 1e9
    left = "when the request left" if finished else "when the trace ends"
    row.because("load-never-finished", f"open for {seconds:.1f} s {left}")
    if ranks and missing:
        told, silent = (", ".join(map(str, group)) for group in (ranks, missing))
        row.because("load-never-finished", f"rank {told} reported it finished; rank {silent} did not")
    return NOT_LOADED + "load-never-finished"


def _async_pairs(want: _Want, engine: Engine, seen: _Seen, failed: int) -> None:
    """Reported as finished: loaded, but for what failed, and where hooks that write were seen not to."""
    row = want.row
    start, end = row.local, row.local + row.accepted
    good = end - failed
    bad = _of("load-failed", [(good, end)])
    if good <= start:
        _put(row, bad, _bits(0, engine.pairs))
        return
    steps = _window(want)
    short = subtract(_unnamed(want), [(good, end)])
    booked = 0
    watched = bool(steps)
    for worker in engine.workers:
        loads = seen.found.workers.get(worker.key)
        ats = [at for step in steps if loads is not None and (at := loads.row(step)) >= 0]
        for pair, layer in enumerate(worker.kv_layers):
            own = _bits(booked)
            booked += 1
            counts = [loads.measured(at, pair, waits=False) for at in ats] if loads is not None else []
            sure, wrote = bool(counts) and min(counts) >= 0, sum(counts)
            complaints = [said for step in steps for said in seen.found.complaints.get(step, [])]
            missing = sure and wrote == 0
            if missing and (worker.key in seen.write or complaints):
                _put(row, [*_of("load-not-injected", [(start, good)]), *bad], own)
                reason = complaints[0] if complaints else "the load hooks did write for other requests"
                row.because(
                    "load-not-injected",
                    f"reported as finished, and the load hooks wrote 0 slots; {reason}",
                    (worker.rank, layer),
                )
                continue
            watched &= sure and not missing
            _put(row, [*_of("loaded-partly", short), *bad], own)
            if short:
                row.because("loaded-partly", "the metadata names fewer slots than were accepted",
                            (worker.rank, layer))  # fmt: skip
    _put(row, [(start, good, NOT_OBSERVED), *bad], _bits(booked, engine.pairs - booked))
    row.measured = watched
