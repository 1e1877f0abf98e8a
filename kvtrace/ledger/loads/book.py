"""Each request's loads, from the lookup to the layers, and their sum."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from kvtrace.ledger.contents.compare import Contents
from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.loads.accepted import Accepted, asked_for, with_connector
from kvtrace.ledger.loads.asynchronous import look_meanwhile
from kvtrace.ledger.loads.decide import Gathered, LoadContents, judge
from kvtrace.ledger.loads.misses import explain
from kvtrace.ledger.loads.outcome import Arrived, AskedLoad, Before, LoadOf
from kvtrace.ledger.loads.seen import Failed, LoadsSeen
from kvtrace.ledger.loads.steps_seen import LoadEvidence, evidence
from kvtrace.ledger.loads.steps_seen import written as wrote_files
from kvtrace.ledger.loads.synchronous import failures, look_in_step
from kvtrace.ledger.loads.written import Written
from kvtrace.ledger.reported import UNRECORDED, caught_in_loading, hides_writes, swallowed
from kvtrace.ledger.requests import Request
from kvtrace.ledger.run import Engine, Ledger, Worker
from kvtrace.ledger.scan import SpoolScan
from kvtrace.ledger.slots.reads import Slots
from kvtrace.ledger.steps import Array, Executed
from kvtrace.ledger.whole import of_load
from kvtrace.terms import Grade


def ask(requests: Sequence[Request], engines: Sequence[Engine]) -> tuple[list[AskedLoad], list[Accepted]]:
    """Each request's loads as far as the scheduler decided them, and those that it accepted."""
    by_tag = with_connector(engines)
    asked = [
        asked_for(row, request, by_tag[request.engine])
        for row, request in enumerate(requests)
        # Never let in: it was not asked for, and cannot have been.
        if request.engine in by_tag and request.prompt > 0 and (request.lookups or request.chunks)
    ]
    return asked, [Accepted(one, requests[one.request]) for one in asked if one.accepted]


def look(
    accepted: Sequence[Accepted],
    engines: Sequence[Engine],
    scans: Sequence[SpoolScan],
    executed: Mapping[tuple[int, str], Executed],
    slots: Mapping[tuple[int, str], Slots],
) -> LoadsSeen:
    """What the spools say of the steps of these loads.

    Args:
        executed: what each worker (Worker.key) ran.
        slots: what each worker touched.
    """
    written = Written(slots, executed, hides_writes(scans), hides_writes(scans, UNRECORDED))
    found = LoadEvidence({}, {}, {})  # where nothing was accepted, no spool is read for it
    if accepted:
        found = evidence(scans, _workers(engines), _load_steps(accepted))
    at_once = _synchronous(accepted)
    loads: dict[int, dict[int, int]] = defaultdict(dict)
    for one in at_once:
        loads[one.asked.step][one.asked.request] = one.asked.positions[0]
    return LoadsSeen(found, dict(loads), len(at_once) == len(accepted), written)


def _synchronous(accepted: Sequence[Accepted]) -> list[Accepted]:
    return [one for one in accepted if not one.asked.asynchronous]


def follow(
    accepted: Sequence[Accepted],
    engines: Sequence[Engine],
    scans: Sequence[SpoolScan],
    seen: LoadsSeen,
    contents: Contents,
) -> dict[int, Arrived]:
    """What of the accepted loads got into the layers, by the request's row."""
    by_tag = with_connector(engines)
    failed = failures(_synchronous(accepted), by_tag, seen)
    caught = caught_in_loading(swallowed(scans))
    found = {
        one.asked.request: gather(
            one, by_tag[one.asked.engine], seen, failed.get(one.asked.request, Failed())
        )
        for one in accepted
    }
    late = {one.asked.engine for one in accepted if found[one.asked.request].came_late}
    arrived = {}
    for one in accepted:
        engine, row = by_tag[one.asked.engine], one.asked.request
        by_exceptions = () if row in contents.written else _caught(one, caught)
        wrong = contents.wrong.get(row, ())
        lacking = engine.tag in late or any(block.unwritten or block.late for block in wrong)
        said = LoadContents(wrong, contents.proved.get(row, ()), by_exceptions, lacking)
        arrived[row] = judge(one.asked.positions, found[row], said, engine)
    return arrived


def gather(accepted: Accepted, engine: Engine, seen: LoadsSeen, failed: Failed) -> Gathered:
    """All that hooks, writes and reports say of a load."""
    if accepted.asked.asynchronous:
        return look_meanwhile(accepted, engine, seen)
    return look_in_step(accepted, engine, seen, failed)


def _caught(accepted: Accepted, caught: Mapping[int, Sequence[str]]) -> tuple[str, ...]:
    """The exceptions that work for this load may have caught, of the steps in which it can have run."""
    asked, chunks = accepted.asked, accepted.request.chunks
    until = chunks[0].step if chunks and asked.asynchronous else asked.step
    steps = (step for step in sorted(caught) if asked.step <= step <= until)
    return tuple(dict.fromkeys(line for step in steps for line in caught[step]))


def balance(
    asked: Sequence[AskedLoad],
    arrived: Mapping[int, Arrived],
    requests: Sequence[Request],
    engines: Sequence[Engine],
    scans: Sequence[SpoolScan],
    saved: Sequence[int],
) -> tuple[list[LoadOf], Ledger[LoadEnd]]:
    """Each request's loads, and their sum.

    Args:
        saved: token-layers saved of each request.

    Raises:
        AssertionError: a request's token-layers have not one end each.
    """
    by_tag = with_connector(engines)
    before = explain(asked, requests, by_tag, saved, wrote_files(scans, _workers(engines)))
    loads = [
        _load(one, arrived.get(one.request, Arrived()), of, by_tag[one.engine].pairs)
        for one, of in zip(asked, before, strict=True)
    ]
    return loads, _sum(loads, by_tag)


def _load(asked: AskedLoad, arrived: Arrived, before: Before, pairs: int) -> LoadOf:
    ends: Counter[LoadEnd] = Counter({end: n * pairs for end, n in asked.not_taken.items()})
    if before.missed:
        known = min((before.saved_before - asked.local) * pairs, ends[LoadEnd.MISSED])
        ends.update({LoadEnd.MISSED_SAVED: known, LoadEnd.MISSED: -known})
    grades = {end: Grade.NOT_OBSERVED if end == LoadEnd.NOT_OBSERVED else Grade.READ for end in ends}
    ends[LoadEnd.LOADED] += asked.accepted * pairs
    for parts, of in arrived.lost.items():
        for start, stop, end in parts:
            amount = (stop - start) * of.bit_count()
            ends.update({end: amount, LoadEnd.LOADED: -amount})
    found = vars(asked) | vars(arrived) | vars(before)
    found |= {"ends": {end: n for end, n in ends.items() if n}, "grades": grades | dict(arrived.grades)}
    return LoadOf(**found)


def _workers(engines: Sequence[Engine]) -> list[Worker]:
    return [worker for engine in engines for worker in engine.workers]


def _load_steps(accepted: Sequence[Accepted]) -> Array:
    steps = {one.asked.step for one in _synchronous(accepted)}
    steps |= {step for one in accepted for step in one.request.load_steps}
    steps |= {step for one in accepted if one.asked.asynchronous for step in one.window()}
    return np.array(sorted(steps), dtype=np.int64)


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
    result = Ledger(
        total=sum(load.prompt * engines[load.engine].pairs for load in loads),
        accounts=dict(amounts),
        pairs=pairs_of.pop() if len(pairs_of) == 1 else None,
        tokens={end: tokens[end] for end in amounts},
        total_tokens=float(sum(load.prompt for load in loads)),
        grades={end: dict(of_end) for end, of_end in grades.items()},
    )
    result.check()
    return result
