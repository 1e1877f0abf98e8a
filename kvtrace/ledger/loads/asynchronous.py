"""Loads in the background: a worker or the scheduler reports their end."""

from __future__ import annotations

from collections.abc import Sequence

from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.intervals import subtract
from kvtrace.ledger.loads.accepted import Accepted
from kvtrace.ledger.loads.arrival import FEWER_NAMED, READ_ONLY, Arrival, Seen, bits, parts
from kvtrace.ledger.loads.outcome import LoadOf
from kvtrace.ledger.loads.steps_seen import NEVER
from kvtrace.ledger.model import Engine, Worker
from kvtrace.ledger.requests import Transfer

_NOT_WRITTEN = "reported as finished, and slots of these tokens were not written"
_TOO_LATE = "reported as finished, and slots of these tokens were written only after attention had begun"
NEVER_FINISHED_NS = 5 * 10**9
"""A request that leaves after this long in an open load did not leave for an impatient client's sake."""
ASKED = 20
"""Steps that asked for the ends of transfers, after which an engine has heard of one."""
_ASKED_OFTEN, _LONG_NS = 5 * ASKED, 5 * 10**8
"""After so many steps that asked for it, and so long, the end of a load is not told any more."""
_ENDED_BY_FAILURE = "FINISHED_ERROR"
"""What vLLM makes of a request whose load failed, unless kv_load_failure_policy is "recompute"
(``v1/core/sched/scheduler.py``, 0.32.0)."""
STILL_OPEN_NS = 60 * 10**9
"""A load that is open for this long when the trace ends will not come any more."""


def load_asynchronously(accepted: Accepted, engine: Engine, seen: Seen) -> LoadOf:
    """What of a load got into the pairs, by its reports and by what was measured meanwhile."""
    arrival = Arrival(accepted)
    request = accepted.request
    reports = [one for one in request.transfers if one.load and not one.begun]
    reports = sorted((one for one in reports if one.t >= accepted.allocated_t), key=lambda one: one.t)
    by_scheduler = [one for one in reports if not one.spool]
    if not request.chunks and not by_scheduler:
        end, open_ns = _still_open(arrival, accepted, engine, reports, seen)
        arrival.put(parts(end, [accepted.positions]), bits(0, engine.pairs))
        return arrival.result(False, open_ns)
    ended = min([one.t for one in by_scheduler or reports] + [one.t for one in request.chunks[:1]] or [NEVER])
    known = ended < NEVER and bool(accepted.allocated_t)
    waited_ns = max(0, ended - accepted.allocated_t) if known else -1
    failed = _failed(arrival, accepted, seen, reports)
    return arrival.result(_put_pairs(arrival, accepted, engine, seen, failed), waited_ns)


def _still_open(
    arrival: Arrival, accepted: Accepted, engine: Engine, reports: Sequence[Transfer], seen: Seen
) -> tuple[LoadEnd, int]:
    """The end of a load that never came to one in the trace, and how long it was open (ns, -1 unknown)."""
    finish = accepted.request.finish
    end = finish.t if finish is not None else engine.t_last
    open_ns = end - accepted.allocated_t if accepted.allocated_t and end else 0
    over = seen.written.over_since(engine.workers, accepted.load.request, accepted.positions)
    untold = over > 0 and _untold(engine, seen, over, end)
    if not untold and open_ns < (NEVER_FINISHED_NS if finish is not None else STILL_OPEN_NS):
        return LoadEnd.PENDING, max(-1, open_ns)
    if untold:
        ago = (end - over) / 1e9
        arrival.because(LoadEnd.NOT_FINISHED, f"all of its slots were written {ago:.1f} s before that")
    left = "when the request left" if finish is not None else "when the trace ends"
    arrival.because(LoadEnd.NOT_FINISHED, f"open for {open_ns / 1e9:.1f} s {left}")
    reported = {one.spool for one in reports}
    ranks = sorted({worker.rank for worker in engine.workers if worker.spool in reported})
    missing = [worker.rank for worker in engine.workers if worker.rank not in ranks]
    if ranks and missing:
        done, silent = (", ".join(map(str, group)) for group in (ranks, missing))
        arrival.because(LoadEnd.NOT_FINISHED, f"rank {done} reported it finished; rank {silent} did not")
    return LoadEnd.NOT_FINISHED, max(-1, open_ns)


def _untold(engine: Engine, seen: Seen, over: int, end: int) -> bool:
    """Whether a load was over long before the end, and the steps since asked for it in vain."""
    return seen.written.steps_after(engine.workers, over) >= _ASKED_OFTEN and end - over >= _LONG_NS


def _failed(arrival: Arrival, accepted: Accepted, seen: Seen, reports: Sequence[Transfer]) -> int:
    """Tokens that the connector reported as failed."""
    load, request = accepted.load, accepted.request
    if any(one.failed for one in reports):
        arrival.because(LoadEnd.FAILED, "the transfer was reported as failed")
        return load.accepted
    blocks = _reported(accepted, seen)
    began = request.chunks[0].start if request.chunks else -1
    short = load.local + load.accepted - began if began >= 0 else 0
    # vLLM asks once more, whether it ran since or not, where a load has failed.
    again = sum(lookup.accepted is not None for lookup in request.lookups) > 1
    ended = request.finish is not None and request.finish.status == _ENDED_BY_FAILURE
    if not blocks or (short <= 0 and not again and not ended):
        return 0
    arrival.because(LoadEnd.FAILED, f"{max(blocks)} blocks reported by get_block_ids_with_load_errors")
    return load.accepted if short <= 0 else min(load.accepted, short)


def _reported(accepted: Accepted, seen: Seen) -> list[int]:
    """Blocks of each report of failed blocks while the load was open: whose they are is not recorded."""
    request = accepted.request
    until = request.chunks[0].t if request.chunks else request.finish.t if request.finish else NEVER
    return [
        report.blocks
        for report in seen.found.errors.get(accepted.load.engine, ())
        if accepted.allocated_t <= report.t <= until
    ]


def _put_pairs(arrival: Arrival, accepted: Accepted, engine: Engine, seen: Seen, failed: int) -> bool:
    """Reported as finished: loaded, but for what failed, and where hooks that write were seen not to.

    Returns whether each pair was watched.
    """
    start, end = accepted.positions
    good = end - failed
    bad = parts(LoadEnd.FAILED, [(good, end)])
    if good <= start:
        arrival.put(bad, bits(0, engine.pairs))
        return False
    steps = accepted.window()
    short = subtract(accepted.unnamed, [(good, end)])
    complaints = [line for step in steps for line in seen.found.complaints.get(step, ())]
    failures = _reported(accepted, seen)
    named = "blocks were reported by get_block_ids_with_load_errors meanwhile"
    why = [*([named] if failures else []), *complaints[:1]]
    # The first step that computes with what was loaded.
    used = next((one.step for one in accepted.request.chunks if one.t >= accepted.allocated_t), NEVER)
    first, watched = 0, bool(steps)
    for worker in engine.workers:
        for pair, layer in enumerate(worker.kv_layers):
            place = (worker.rank, layer)
            missing = seen.written.missing(worker, pair, accepted.load.request, (start, good), steps, used)
            if missing.certain and missing.positions:
                ended = LoadEnd.NOT_WRITTEN if missing.whole else LoadEnd.PARTLY
                ended = LoadEnd.FAILED if failures else ended
                too_late = parts(LoadEnd.USED_BEFORE, missing.late)
                arrival.put([*parts(ended, missing.positions), *too_late, *bad], bits(first + pair))
                if too_late:
                    arrival.because(LoadEnd.USED_BEFORE, _TOO_LATE, place)
                read = [READ_ONLY] if missing.read else []
                arrival.because(ended, "; ".join([_NOT_WRITTEN, *read, *why]), place)
                continue
            if missing.certain:  # all of it was seen to be written, whatever the metadata names
                arrival.put([*parts(LoadEnd.USED_BEFORE, missing.late), *bad], bits(first + pair))
                if missing.late:
                    arrival.because(LoadEnd.USED_BEFORE, _TOO_LATE, place)
                continue
            wrote = _wrote(worker, pair, steps, seen)
            if wrote == 0 and complaints:
                arrival.put([*parts(LoadEnd.NOT_WRITTEN, [(start, good)]), *bad], bits(first + pair))
                nothing = f"reported as finished, and the load hooks wrote 0 slots; {complaints[0]}"
                arrival.because(LoadEnd.NOT_WRITTEN, nothing, place)
                continue
            watched &= wrote > 0
            arrival.put([*parts(LoadEnd.PARTLY, short), *bad], bits(first + pair))
            if short:
                arrival.because(LoadEnd.PARTLY, FEWER_NAMED, place)
        first += len(worker.kv_layers)
    rest = bits(first, engine.pairs - first)
    arrival.put([*parts(LoadEnd.NOT_OBSERVED, [(start, good)]), *bad], rest)
    return watched


def _wrote(worker: Worker, pair: int, steps: Sequence[int], seen: Seen) -> int:
    """Slots that the load hooks wrote into a pair in these steps, -1 where not all were watched."""
    loads = seen.found.workers.get(worker.key)
    if loads is None:
        return -1
    rows = [at for step in steps if (at := loads.row(step)) >= 0]
    counts = [int(loads.measured(at, waits=False)[pair]) for at in rows]
    return sum(counts) if counts and min(counts) >= 0 else -1
