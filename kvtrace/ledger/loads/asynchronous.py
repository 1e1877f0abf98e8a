"""Loads in the background: a worker or the scheduler reports their end."""

from __future__ import annotations

from collections import defaultdict

from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.intervals import Interval
from kvtrace.ledger.loads.accepted import Accepted
from kvtrace.ledger.loads.decide import By, Gathered, InPair, Sign, Signs, bits, signs
from kvtrace.ledger.loads.seen import (
    ENDED_BY_FAILURE,
    OTHERS_REPORTED,
    READ_ONLY,
    REPORTED,
    Failed,
    LoadsSeen,
)
from kvtrace.ledger.loads.written import Missing
from kvtrace.ledger.run import Engine, Worker
from kvtrace.ledger.steps import NEVER
from kvtrace.words import plural

_NOT_WRITTEN = "reported as finished, and slots of these tokens were not written"
_REPORTED = "blocks were reported by get_block_ids_with_load_errors meanwhile"
_TOO_LATE = "reported as finished, and slots of these tokens were written only after attention had begun"
NEVER_FINISHED_NS = 5 * 10**9
"""A request that leaves after this long in an open load did not leave for an impatient client's sake."""
ASKED = 20
"""Steps that asked for the ends of transfers, after which an engine has heard of one."""
_ASKED_OFTEN, _LONG_NS = 5 * ASKED, 5 * 10**8
"""After so many steps that asked for it, and so long, the end of a load is not told any more."""
NO_END_TOLD = "the connector defines no get_finished, by which vLLM hears of an end"
STILL_OPEN_NS = 60 * 10**9
"""A load that is open for this long when the trace ends will not come any more."""


def look_meanwhile(accepted: Accepted, engine: Engine, seen: LoadsSeen) -> Gathered:
    """What is known of a load in each pair, by its reports and by what was measured meanwhile."""
    request = accepted.request
    by_scheduler = [one for one in accepted.reports if not one.spool]
    if not request.chunks and not by_scheduler:
        sign, open_ns = _still_open(accepted, engine, seen)
        found = InPair(signs([accepted.asked.positions], sign))
        return Gathered({found: bits(0, engine.pairs)}, open_ns)
    reports = by_scheduler or accepted.reports
    ended = min([one.t for one in reports] + [one.t for one in request.chunks[:1]] or [NEVER])
    known = ended < NEVER and bool(accepted.allocated_t)
    waited_ns = max(0, ended - accepted.allocated_t) if known else -1
    return Gathered(_in_pairs(accepted, engine, seen, _failed(accepted, seen)), waited_ns)


def _still_open(accepted: Accepted, engine: Engine, seen: LoadsSeen) -> tuple[Sign, int]:
    """The end of a load that never came to one in the trace, and how long it was open (ns, -1 unknown)."""
    finish = accepted.request.finish
    end = finish.t if finish is not None else engine.t_last
    open_ns = end - accepted.allocated_t if accepted.allocated_t and end else 0
    over = seen.written.over_since(engine.workers, accepted.asked.request, accepted.asked.positions)
    untold = over > 0 and _untold(engine, seen, over, end)
    may_come = not untold and not engine.mute
    if may_come and open_ns < (NEVER_FINISHED_NS if finish is not None else STILL_OPEN_NS):
        return Sign(By.REPORT, LoadEnd.PENDING, here=False), max(-1, open_ns)
    why = [f"all of its slots were written {(end - over) / 1e9:.1f} s before that"] if untold else []
    left = "when the request left" if finish is not None else "when the trace ends"
    why.append(f"open for {open_ns / 1e9:.1f} s {left}")
    why += [NO_END_TOLD] if engine.mute else []
    reported = {one.spool for one in accepted.reports}
    ranks = sorted({worker.rank for worker in engine.workers if worker.spool in reported})
    missing = [worker.rank for worker in engine.workers if worker.rank not in ranks]
    if ranks and missing:
        done, silent = (", ".join(map(str, group)) for group in (ranks, missing))
        why.append(f"rank {done} reported it finished; rank {silent} did not")
    return Sign(By.REPORT, LoadEnd.NOT_FINISHED, tuple(why), here=False), max(-1, open_ns)


def _untold(engine: Engine, seen: LoadsSeen, over: int, end: int) -> bool:
    """Whether a load was over long before the end, and the steps since asked for it in vain."""
    return seen.written.steps_after(engine.workers, over) >= _ASKED_OFTEN and end - over >= _LONG_NS


def _failed(accepted: Accepted, seen: LoadsSeen) -> Failed:
    asked, request = accepted.asked, accepted.request
    if any(one.failed for one in accepted.reports):
        return Failed(asked.accepted, "the transfer was reported as failed", here=False)
    blocks = _reported(accepted, seen)
    began = request.chunks[0].start if request.chunks else -1
    short = asked.positions[1] - began if began >= 0 else 0
    # vLLM asks once more, whether it ran since or not, where a load has failed.
    again = sum(lookup.accepted is not None for lookup in request.lookups) > 1
    ended = request.finish is not None and request.finish.status == ENDED_BY_FAILURE
    if not blocks or (short <= 0 and not again and not ended):
        return Failed()
    tokens = asked.accepted if short <= 0 else min(asked.accepted, short)
    # Whose they are is not recorded: a step reports those of all its loads.
    return Failed(tokens, f"{plural(max(blocks), 'block')} of the loads under way, {REPORTED}", here=False)


def _reported(accepted: Accepted, seen: LoadsSeen) -> list[int]:
    """Blocks of each report of failed blocks while the load was open: whose they are is not recorded."""
    request = accepted.request
    until = request.chunks[0].t if request.chunks else request.finish.t if request.finish else NEVER
    return [
        report.blocks
        for report in seen.found.errors.get(accepted.asked.engine, ())
        if accepted.allocated_t <= report.t <= until
    ]


def _in_pairs(accepted: Accepted, engine: Engine, seen: LoadsSeen, failed: Failed) -> dict[InPair, int]:
    """Reported as finished: loaded, but for what failed, and where hooks that write were seen not to."""
    start, end = accepted.asked.positions
    good, bad = (start, end - failed.tokens), failed.signs(accepted)
    found: dict[InPair, int] = defaultdict(int)
    first = 0
    in_steps = _InSteps(accepted, seen)
    for worker in engine.workers if good[0] < good[1] else ():
        for pair, missing in enumerate(in_steps.missing(worker, good)):
            said, watched = in_steps.said(worker, pair, good, missing)
            found[InPair((*bad, *said), watched)] |= bits(first + pair)
        first += len(worker.kv_layers)
    if first < engine.pairs:
        unknown = signs([good], Sign(By.CALL, LoadEnd.NOT_OBSERVED, here=False))
        found[InPair((*bad, *unknown))] |= bits(first, engine.pairs - first)
    return found


class _InSteps:
    """A load that was reported as finished, in the steps in which it can have run."""

    def __init__(self, accepted: Accepted, seen: LoadsSeen) -> None:
        self._accepted, self._seen, self._steps = accepted, seen, accepted.window()
        self._complaints = [line for step in self._steps for line in seen.found.complaints.get(step, ())][:1]
        chunks = accepted.request.chunks
        # vLLM computes anew from the first block on that was reported: those before it were not.
        anew = bool(chunks) and chunks[0].start < accepted.asked.positions[1]
        told = _reported(accepted, seen)
        self._failures, self._others = ([], told) if anew else (told, [])
        # The first step that computes with what was loaded.
        self._used = next((one.step for one in chunks if one.t >= accepted.allocated_t), NEVER)

    def missing(self, worker: Worker, good: Interval) -> list[Missing]:
        """What of the ``good`` positions is missing in each of a worker's pairs."""
        row = self._accepted.asked.request
        return self._seen.written.missing(worker, row, good, self._steps, self._used)

    def said(self, worker: Worker, pair: int, good: Interval, missing: Missing) -> tuple[Signs, bool]:
        """What speaks against the ``good`` positions in one pair, and whether it was watched."""
        if missing.certain:  # what was seen to be written is there, whatever the metadata names
            end = LoadEnd.NOT_WRITTEN if missing.whole else LoadEnd.PARTLY
            end = LoadEnd.FAILED if self._failures else end
            read = [READ_ONLY] if missing.read else []
            named = [_REPORTED] if self._failures else [OTHERS_REPORTED] if self._others else []
            why = "; ".join([_NOT_WRITTEN, *read, *named, *self._complaints])
            late = signs(missing.late, Sign(By.SLOT, LoadEnd.USED_BEFORE, (_TOO_LATE,)))
            return (*signs(missing.positions, Sign(By.SLOT, end, (why,))), *late), True
        wrote = self._wrote(worker, pair)
        if wrote == 0 and self._complaints:
            nothing = f"reported as finished, and the load hooks wrote 0 slots; {self._complaints[0]}"
            return signs([good], Sign(By.CALL, LoadEnd.NOT_WRITTEN, (nothing,))), True
        return (), wrote > 0

    def _wrote(self, worker: Worker, pair: int) -> int:
        """Slots that the load hooks wrote into a pair in these steps, -1 where not all were watched."""
        loads = self._seen.found.workers.get(worker.key)
        if loads is None:
            return -1
        rows = [at for step in self._steps if (at := loads.row(step)) >= 0]
        counts = [int(loads.measured(at, waits=False)[pair]) for at in rows]
        return sum(counts) if counts and min(counts) >= 0 else -1
