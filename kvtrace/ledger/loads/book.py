"""Each request's loads, from the lookup to the layers, and their sum."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.loads.accepted import Accepted, until_accepted
from kvtrace.ledger.loads.arrival import Seen
from kvtrace.ledger.loads.asynchronous import load_asynchronously
from kvtrace.ledger.loads.misses import explain
from kvtrace.ledger.loads.outcome import LoadOf
from kvtrace.ledger.loads.steps_seen import Evidence, evidence
from kvtrace.ledger.loads.steps_seen import written as wrote_files
from kvtrace.ledger.loads.synchronous import Failed, failures, load_synchronously
from kvtrace.ledger.loads.written import Written
from kvtrace.ledger.model import Engine, Ledger, Worker
from kvtrace.ledger.reported import UNRECORDED, hides_writes
from kvtrace.ledger.requests import Request
from kvtrace.ledger.scan import SpoolScan
from kvtrace.ledger.slots.reads import Slots
from kvtrace.ledger.steps import Array, Executed
from kvtrace.ledger.whole import of_load
from kvtrace.terms import Grade

DECLARED = "declared: what the scheduler accepted from the connector; the slots written were not measured"
MEASURED = "measured: the slots that the load hooks wrote into each layer"
MIXED = "the slots written were measured in some load steps; the others are declared by the scheduler"
NONE = "the scheduler accepted no load: there was nothing to write"


def follow(
    requests: Sequence[Request],
    engines: Sequence[Engine],
    scans: Sequence[SpoolScan],
    executed: Mapping[tuple[int, str], Executed],
    slots: Mapping[tuple[int, str], Slots],
) -> list[LoadOf]:
    """Each request's loads, from the lookup to the layers; why a lookup missed is left to :func:`balance`.

    Args:
        executed: what each worker (Worker.key) ran.
        slots: what each worker touched.
    """
    by_tag = _with_connector(engines)
    loads: list[LoadOf] = []
    accepted: dict[int, Accepted] = {}
    for row, request in enumerate(requests):
        engine = by_tag.get(request.engine)
        if engine is None or request.prompt <= 0 or not (request.lookups or request.chunks):
            continue  # never let in: it was not asked for, and cannot have been
        load, taken = until_accepted(row, request, engine)
        loads.append(load)
        if taken is not None:
            accepted[row] = taken
    if not accepted:
        return loads
    wanted = list(accepted.values())
    found = evidence(scans, _workers(engines), _load_steps(wanted))
    written = Written(slots, executed, hides_writes(scans), hides_writes(scans, UNRECORDED))
    arrived = _into_layers(wanted, by_tag, written, found)
    return [arrived.get(load.request, load) for load in loads]


def balance(
    loads: Sequence[LoadOf],
    requests: Sequence[Request],
    engines: Sequence[Engine],
    scans: Sequence[SpoolScan],
    saved: Sequence[int],
) -> tuple[list[LoadOf], Ledger[LoadEnd]]:
    """What :func:`follow` found, with what earlier requests had saved, and its sum.

    Args:
        saved: token-layers saved of each request.

    Raises:
        AssertionError: a request's token-layers have not one end each.
    """
    by_tag = _with_connector(engines)
    explained = explain(loads, requests, by_tag, saved, wrote_files(scans, _workers(engines)))
    return explained, _sum(explained, by_tag)


def _with_connector(engines: Sequence[Engine]) -> dict[int, Engine]:
    return {engine.tag: engine for engine in engines if engine.connector is not None and engine.pairs > 0}


def _workers(engines: Sequence[Engine]) -> list[Worker]:
    return [worker for engine in engines for worker in engine.workers]


def _load_steps(accepted: Sequence[Accepted]) -> Array:
    steps = {one.load.step for one in accepted if not one.load.asynchronous}
    steps |= {entry.step for one in accepted for entry in one.request.load_entries}
    steps |= {step for one in accepted if one.load.asynchronous for step in one.window()}
    return np.array(sorted(steps), dtype=np.int64)


def _into_layers(
    accepted: Sequence[Accepted],
    engines: Mapping[int, Engine],
    written: Written,
    found: Evidence,
) -> dict[int, LoadOf]:
    synchronous = [one for one in accepted if not one.load.asynchronous]
    loads = Counter(one.load.step for one in synchronous)
    seen = Seen(found, written.executed, loads, written)
    failed = failures(synchronous, engines, seen)
    arrived = {}
    for one in accepted:
        engine, row = engines[one.load.engine], one.load.request
        arrived[row] = (
            load_asynchronously(one, engine, seen)
            if one.load.asynchronous
            else load_synchronously(one, engine, seen, failed.get(row, Failed()))
        )
    return arrived


def _sum(loads: Sequence[LoadOf], engines: Mapping[int, Engine]) -> Ledger[LoadEnd]:
    amounts: Counter[LoadEnd] = Counter()
    tokens: defaultdict[LoadEnd, float] = defaultdict(float)
    grades: defaultdict[LoadEnd, Counter[Grade]] = defaultdict(Counter)
    for load in loads:
        pairs = engines[load.engine].pairs
        short = load.prompt * pairs - sum(load.ends.values())
        assert short == 0, f"load ledger off by {short} token-layers of request {load.id}: {load.ends}"
        for end, amount in load.ends.items():
            amounts[end] += amount
            proved = min(load.proved, amount) if end == LoadEnd.LOADED else 0
            grades[end] += Counter({Grade.PROVED: proved, load.grade(end): amount - proved})
        for end, whole in of_load(load, pairs).items():
            tokens[end] += whole
    pairs_of = {engines[load.engine].pairs for load in loads}
    watched = [load.measured for load in loads if load.accepted]
    note = MEASURED if watched and all(watched) else MIXED if any(watched) else DECLARED if watched else NONE
    trust = {MEASURED: "measured", MIXED: "mixed"}.get(note, "declared")
    result = Ledger(
        total=sum(load.prompt * engines[load.engine].pairs for load in loads),
        accounts=dict(amounts),
        pairs=pairs_of.pop() if len(pairs_of) == 1 else None,
        tokens={end: tokens[end] for end in amounts},
        total_tokens=float(sum(load.prompt for load in loads)),
        trust=trust if loads else "none",
        trust_note=note if loads else "",
        grades={end: dict(of_end) for end, of_end in grades.items()},
    )
    result.check()
    return result
