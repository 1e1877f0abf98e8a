"""Loads that a step waits for: each is looked for in every pair of its step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.intervals import subtract
from kvtrace.ledger.loads.accepted import Accepted
from kvtrace.ledger.loads.arrival import FEWER_NAMED, READ_ONLY, Arrival, Seen, bits, parts, waits
from kvtrace.ledger.loads.outcome import LoadOf, Part, Place
from kvtrace.ledger.loads.steps_seen import NEVER, Evidence, PairBit, StepBit, WorkerLoads
from kvtrace.ledger.loads.written import Missing
from kvtrace.ledger.model import Engine, Worker
from kvtrace.ledger.steps import StepState, locate, step_states

_WROTE_NOTHING = "the load hooks wrote 0 slots here"


@dataclass(frozen=True)
class Failed:
    """Accepted tokens that the connector reported as failed."""

    tokens: int = 0
    reason: str = ""


def failures(accepted: Sequence[Accepted], engines: Mapping[int, Engine], seen: Seen) -> dict[int, Failed]:
    """By the request's row: reported blocks are given to the loads of their step in order, as the trace
    names no request with them."""
    left = _error_blocks(seen.found)
    found: dict[int, Failed] = {}
    for one in accepted:
        step = one.load.step
        block = max(1, one.request.block or engines[one.load.engine].block_size)
        tokens = min(one.load.accepted, max(0, left.get(step, 0)) * block)
        if tokens:
            tokens = _recomputed(one) or tokens
            blocks = -(-tokens // block)
            left[step] -= blocks
            alone = seen.loads[step] == 1
            whose = "" if alone else "; which of the step's requests they belong to is not recorded"
            reason = f"{blocks} blocks reported by get_block_ids_with_load_errors{whose}"
            found[one.load.request] = Failed(tokens, reason)
    return found


def _error_blocks(found: Evidence) -> dict[int, int]:
    """Step -> blocks reported in it; ranks report the same ones."""
    blocks: dict[int, int] = {}
    for reports in found.errors.values():
        for report in reports:
            blocks[report.step] = max(blocks.get(report.step, 0), report.blocks)
    return blocks


def _recomputed(accepted: Accepted) -> int:
    """How many of the accepted tokens were computed after all; 0 where that was for a preemption, or not
    at all."""
    request, (local, end) = accepted.request, accepted.positions
    starts = [chunk.start for chunk in request.chunks[1:] if local <= chunk.start < end]
    return end - min(starts) if starts and not request.preemptions else 0


def load_synchronously(accepted: Accepted, engine: Engine, seen: Seen, failed: Failed) -> LoadOf:
    """What of a load got into the pairs in its step."""
    arrival = Arrival(accepted)
    if failed.tokens:
        arrival.because(LoadEnd.FAILED, failed.reason)
    step, whole = accepted.load.step, [accepted.positions]
    first, ready, watched = 0, 0, bool(engine.workers)
    begun = watched
    for worker in engine.workers:
        pairs = bits(first, len(worker.kv_layers))
        loads = seen.found.workers.get(worker.key)
        at = loads.row(step) if loads is not None else -1
        ended = _not_looked_at(worker, seen, step)
        if loads is None or at < 0 or (ended is not None and not _raised(loads, at)):
            # Also what lies past the steps that are looked at in detail: taken as declared.
            arrival.put(parts(ended, whole) if ended is not None else [], pairs)
            watched = begun = False
        else:
            ready = max(ready, int(loads.started_t[at]))
            in_step = _InStep(accepted, worker, loads, at, seen)
            watched &= in_step.put(arrival, failed, first)
            begun &= in_step.begun
        first += len(worker.kv_layers)
    if engine.pairs > first:  # pairs of no known worker
        arrival.put(parts(LoadEnd.NOT_OBSERVED, whole), bits(first, engine.pairs - first))
        watched = begun = False
    asked = accepted.t
    return arrival.result(watched, ready - asked if asked and ready > asked else -1, begun)


def _not_looked_at(worker: Worker, seen: Seen, step: int) -> LoadEnd | None:
    """The end of a load whose step is not in the worker's trace, None where it is."""
    if worker.connector_live is False:
        return LoadEnd.NOT_WRITTEN
    state = step_states(seen.ran(worker), worker.stop_reason, np.array([step]))[0]
    if state == StepState.RAN:
        return None if worker.hooks_seen else LoadEnd.NOT_OBSERVED
    return LoadEnd.PENDING if state == StepState.NOT_REACHED else LoadEnd.NOT_OBSERVED


def _raised(loads: WorkerLoads, at: int) -> bool:
    """An exception ends the step, and may end the worker: no record says that it was executed."""
    return loads.has(at, StepBit.RAISED) or bool(loads.having(at, PairBit.WAIT_RAISED).any())


@dataclass(frozen=True)
class _InPair:
    """A load in one pair. ``end``: where all of it ended, None where (a part of) it came."""

    end: LoadEnd | None
    reason: str = ""
    lost: tuple[Part, ...] = ()
    """Where it is known which positions did not come: these, and how each ended."""


class _InStep:
    """A load on one worker, in its step (row ``at`` of the worker's loads)."""

    def __init__(self, accepted: Accepted, worker: Worker, loads: WorkerLoads, at: int, seen: Seen) -> None:
        self._accepted, self._worker, self._seen = accepted, worker, seen
        self._step = accepted.load.step
        self._waits = waits(worker)
        self._replayed = bool(locate(seen.ran(worker).full, np.array([self._step]))[1][0])
        self._started_t = int(loads.started_t[at])
        self._start_raised = loads.has(at, StepBit.RAISED)
        self._not_called = not loads.has(at, StepBit.STARTED) and loads.ever(StepBit.STARTED)
        # Of each KV layer:
        self._wrote: list[int] = loads.measured(at, self._waits).tolist()
        self._wait_raised: list[bool] = loads.having(at, PairBit.WAIT_RAISED).tolist()
        self._op_t: list[int] = loads.op_t[at].tolist()
        self._wait_t: list[int] = loads.wait_t[at].tolist()

    @property
    def begun(self) -> bool:
        """Whether it was seen when the attention of each layer began."""
        return NEVER not in self._op_t

    def put(self, arrival: Arrival, failed: Failed, first: int) -> bool:
        """Adds what became of the load in each KV layer; ``first``: number of the worker's first pair.

        Returns whether all were watched.
        """
        start, end = self._accepted.positions
        # Which positions failed or were left out is recorded as a number alone: taken to be the last.
        good = end - failed.tokens
        watched = True
        for pair, layer in enumerate(self._worker.kv_layers):
            place = (self._worker.rank, layer)
            found = self._pair(pair)
            watched &= self._wrote[pair] >= 0 or self._missing(pair).certain
            if found.lost:
                self._put_lost(arrival, found, good, first + pair, place)
                continue
            if found.end is not None:
                ended = [*parts(found.end, [(start, good)]), *parts(LoadEnd.FAILED, [(good, end)])]
                arrival.put(ended, bits(first + pair))
                if start < good or not failed.tokens:
                    arrival.because(found.end, found.reason, place)
                if failed.tokens:
                    arrival.because(LoadEnd.FAILED, failed.reason, place)
                continue
            # Where writes are seen, all was written, whatever the metadata names.
            certain = self._missing(pair).certain
            short = [] if certain else subtract(self._accepted.unnamed, [(good, end)])
            lost = [*parts(LoadEnd.PARTLY, short), *parts(LoadEnd.FAILED, [(good, end)])]
            arrival.put(lost, bits(first + pair))
            if failed.tokens:
                arrival.because(LoadEnd.FAILED, failed.reason, place)
            if short:
                arrival.because(LoadEnd.PARTLY, FEWER_NAMED, place)
        return watched

    def _pair(self, pair: int) -> _InPair:
        if self._start_raised:
            return _InPair(LoadEnd.FAILED, "start_load_kv raised")
        if self._wait_raised[pair] or (self._op_t[pair] == NEVER and any(self._wait_raised)):
            return _InPair(LoadEnd.FAILED, "wait_for_layer_load raised")
        if self._not_called:
            return _InPair(LoadEnd.NOT_WRITTEN, "start_load_kv was not called in the step")
        return self._by_slots(pair) or self._by_time(pair)

    def _put_lost(self, arrival: Arrival, found: _InPair, good: int, pair: int, place: Place) -> None:
        """What is known position by position; ``good``: where the connector's reports of failures begin."""
        lost: list[Part] = []
        for start, end, ended in found.lost:
            lost += parts(ended, [(start, min(end, good))])
            lost += parts(LoadEnd.FAILED, [(max(start, good), end)])
            arrival.because(ended, found.reason, place)
        arrival.put(lost, bits(pair))

    def _missing(self, pair: int) -> Missing:
        accepted = self._accepted
        return self._seen.written.missing(
            self._worker, pair, accepted.load.request, accepted.positions, [self._step], self._step
        )

    def _by_position(self, pair: int) -> _InPair | None:
        """What the slots say that were written, None where they say nothing or all is there."""
        missing = self._missing(pair)
        early = self._after_use(pair) if missing.certain and missing.positions else ""
        if early:
            # Its turn to be written never came.
            reason, lost = early, parts(LoadEnd.USED_BEFORE, missing.positions)
        elif missing.certain and missing.positions:
            end = LoadEnd.NOT_WRITTEN if missing.whole else LoadEnd.PARTLY
            some = "none" if missing.whole else "not all"
            complaints = self._seen.found.complaints.get(self._step, ())
            why = [*([READ_ONLY] if missing.read else []), *complaints[:1]]
            reason = "; ".join([f"{some} of the slots of these tokens were written", *why])
            lost = parts(end, missing.positions)
        elif missing.late:
            reason = "its slots were written after its attention had begun"
            lost = parts(LoadEnd.USED_BEFORE, missing.late)
        else:
            return None
        return _InPair(None, reason, tuple(lost))

    def _by_slots(self, pair: int) -> _InPair | None:
        """What the slots that were measured say, None where they say nothing."""
        by_position = self._by_position(pair)
        if by_position is not None or self._seen.written.known(self._worker):
            return by_position
        reason = self._why_nothing() if self._wrote[pair] == 0 else ""
        return _InPair(LoadEnd.NOT_WRITTEN, reason) if reason else None

    def _why_nothing(self) -> str:
        """What shows that hooks that wrote no slot did not load, "" for nothing."""
        for complaint in self._seen.found.complaints.get(self._step, ()):
            return f"{_WROTE_NOTHING}; {complaint}"
        return "" if self._waits else "start_load_kv wrote 0 slots, and wait_for_layer_load does nothing"

    def _by_time(self, pair: int) -> _InPair:
        late = self._after_use(pair)
        return _InPair(LoadEnd.USED_BEFORE, late) if late else _InPair(None)

    def _after_use(self, pair: int) -> str:
        """What shows that a layer's attention ran before its KV was waited for."""
        op, wait, started = self._op_t[pair], self._wait_t[pair], self._started_t
        if op != NEVER and started and op < started:
            return "its attention began before start_load_kv had returned"
        if not self._waits:
            return ""
        if wait != NEVER:
            before = op != NEVER and op < wait
            return "its attention began before wait_for_layer_load was called" if before else ""
        if op != NEVER:
            return "its attention ran, and wait_for_layer_load was not called for it"
        if self._replayed:
            return "the step replayed a FULL CUDA graph, in which nothing waits for the load"
        if any(t != NEVER for t in self._wait_t):
            return "wait_for_layer_load was not called for it, as it was for other layers of the step"
        return ""
