"""Loads that a step waits for: each is looked for in every pair of its step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.loads.accepted import Accepted
from kvtrace.ledger.loads.decide import STEPS_LATER, TOO_LATE, By, Gathered, InPair, Sign, Signs, bits, signs
from kvtrace.ledger.loads.seen import (
    ANEW,
    ELSEWHERE,
    ENDED_BY_FAILURE,
    OF_HIT,
    OF_NOBODY,
    READ_ONLY,
    Failed,
    LoadsSeen,
    reported,
)
from kvtrace.ledger.loads.steps_seen import LoadEvidence, LoadStepBit, PairBit, WorkerLoads
from kvtrace.ledger.loads.written import Missing
from kvtrace.ledger.run import Engine, Worker
from kvtrace.ledger.steps import NEVER, StepState, holds, step_states
from kvtrace.trace import hooks
from kvtrace.words import plural


def failures(
    accepted: Sequence[Accepted], engines: Mapping[int, Engine], seen: LoadsSeen
) -> dict[int, Failed]:
    """By the request's row. The trace names no request with reported blocks: they are of those that vLLM
    then computed anew, from the first of them on, or ended; else they are given to the loads of their step
    in order. Where each of these ran on as if nothing had been said, they are of none of them.
    """
    of_step: dict[int, list[Accepted]] = defaultdict(list)
    for one in accepted:
        of_step[one.asked.step].append(one)
    found: dict[int, Failed] = {}
    for step, blocks in _error_blocks(seen.found).items():
        here, left = of_step.get(step, []), blocks
        known = [one for one in here if _recomputed(one) or _ended(one) == ENDED_BY_FAILURE]
        whole = seen.alone and not known and len(seen.loads.get(step, ())) == len(here)
        heard = not (whole and all(_ended(one) in _RAN_ON for one in here))
        of_nobody = f"{reported(blocks)} in this step {OF_NOBODY}: vLLM computed nothing anew"
        whose = "" if known or len(seen.loads.get(step, ())) == 1 else _NOT_RECORDED
        for one in known or here:
            size = max(1, one.request.block or engines[one.asked.engine].block_size)
            if anew := _recomputed(one):
                found[one.asked.request] = Failed(anew, f"{plural(anew, 'token')} {ANEW}", anew=True)
                left = max(0, left - 1)
            elif (tokens := min(one.asked.accepted, left * size)) or not heard:
                own = -(-tokens // size)
                left -= own
                why = f"{reported(own)}{whose}" if heard else of_nobody
                found[one.asked.request] = Failed(tokens, why, heard=heard)
    return found


_NOT_RECORDED = "; which of the step's requests they belong to is not recorded"
_RAN_ON = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


def _ended(accepted: Accepted) -> str:
    """How a request ended; "" not yet, or it was preempted, which begins it anew."""
    finish = accepted.request.finish
    return finish.status if finish is not None and not accepted.request.preemptions else ""


def _error_blocks(found: LoadEvidence) -> dict[int, int]:
    """Step -> blocks reported in it; ranks report the same ones."""
    blocks: dict[int, int] = {}
    for reports in found.errors.values():
        for report in reports:
            blocks[report.step] = max(blocks.get(report.step, 0), report.blocks)
    return blocks


def _recomputed(accepted: Accepted) -> int:
    """How many of the accepted tokens were computed after all; 0 where that was for a preemption, or not
    at all."""
    request, (local, end) = accepted.request, accepted.asked.positions
    starts = [chunk.start for chunk in request.chunks[1:] if local <= chunk.start < end]
    return end - min(starts) if starts and not request.preemptions else 0


def look_in_step(accepted: Accepted, engine: Engine, seen: LoadsSeen, failed: Failed) -> Gathered:
    """What is known of a load in each pair, in its step."""
    step, whole = accepted.asked.step, [accepted.asked.positions]
    in_pairs: dict[InPair, int] = defaultdict(int)
    first, ready, begun = 0, 0, bool(engine.workers)
    for worker in engine.workers:
        loads = seen.found.workers.get(worker.key)
        at = loads.row(step) if loads is not None else -1
        ended = _not_looked_at(worker, seen, step)
        if loads is None or at < 0 or (ended is not None and not _raised(loads, at)):
            # Also what lies past the steps that are looked at in detail: taken as declared.
            said = () if ended is None else signs(whole, Sign(By.CALL, ended, here=False))
            in_pairs[InPair(said)] |= bits(first, len(worker.kv_layers))
            begun = False
        else:
            ready = max(ready, int(loads.started_t[at]))
            in_step = _InStep(accepted, worker, loads, at, seen)
            begun &= in_step.begun
            for pair in range(len(worker.kv_layers)):
                in_pairs[in_step.pair(pair, failed)] |= bits(first + pair)
        first += len(worker.kv_layers)
    if engine.pairs > first:  # pairs of no known worker
        unknown = signs(whole, Sign(By.CALL, LoadEnd.NOT_OBSERVED, here=False))
        in_pairs[InPair(unknown)] |= bits(first, engine.pairs - first)
        begun = False
    return Gathered(in_pairs, ready - accepted.t if accepted.t and ready > accepted.t else -1, begun)


def _not_looked_at(worker: Worker, seen: LoadsSeen, step: int) -> LoadEnd | None:
    """The end of a load whose step is not in the worker's trace, None where it is."""
    if worker.connector_live is False:
        return LoadEnd.NOT_WRITTEN
    state = step_states(seen.written.ran(worker), worker.stop_reason, np.array([step]))[0]
    if state == StepState.RAN:
        return None if worker.hooks_seen else LoadEnd.NOT_OBSERVED
    return LoadEnd.PENDING if state == StepState.NOT_REACHED else LoadEnd.NOT_OBSERVED


def _raised(loads: WorkerLoads, at: int) -> bool:
    """An exception ends the step, and may end the worker: no record says that it was executed."""
    return loads.has(at, LoadStepBit.RAISED) or bool(loads.having(at, PairBit.WAIT_RAISED).any())


class _InStep:
    """A load on one worker, in its step (row ``at`` of the worker's loads)."""

    def __init__(
        self, accepted: Accepted, worker: Worker, loads: WorkerLoads, at: int, seen: LoadsSeen
    ) -> None:
        self._accepted, self._worker, self._seen = accepted, worker, seen
        self._step = accepted.asked.step
        self._waits = worker.connector is not None and worker.connector.does(hooks.WAIT_LAYER)
        self._replayed = holds(seen.written.ran(worker).full, self._step)
        self._started_t = int(loads.started_t[at])
        self._start_raised = loads.has(at, LoadStepBit.RAISED)
        self._not_called = not loads.has(at, LoadStepBit.STARTED) and loads.ever(LoadStepBit.STARTED)
        self._complaints = seen.found.complaints.get(self._step, ())
        # Of each KV layer:
        asked = accepted.asked
        self._missing = seen.written.missing(worker, asked.request, asked.positions, [self._step], self._step)
        self._wrote: list[int] = loads.measured(at, self._waits).tolist()
        self._wait_raised: list[bool] = loads.having(at, PairBit.WAIT_RAISED).tolist()
        self._op_t: list[int] = loads.op_t[at].tolist()
        self._wait_t: list[int] = loads.wait_t[at].tolist()

    @property
    def begun(self) -> bool:
        """Whether it was seen when the attention of each layer began."""
        return NEVER not in self._op_t

    @cached_property
    def _beside(self) -> str:
        """What its step wrote where nothing is to be loaded, "" nothing."""
        asked = self._accepted.asked
        loads = self._seen.loads.get(self._step, {})
        own, others = self._seen.written.beside(self._worker, asked.request, self._step, loads)
        parts = ", ".join(f"{start}-{end}" for start, end in own[:3])
        said = [f"slots of its tokens {parts} were, {OF_HIT}"] if own else []
        if others and self._seen.alone:
            said.append(f"slots of {plural(len(others), 'other request')} were, {ELSEWHERE}")
        return "; ".join(said)

    def pair(self, pair: int, failed: Failed) -> InPair:
        """What is known of the load in one KV layer."""
        missing = self._missing[pair]
        call = self._by_calls(pair)
        slots = () if call else self._by_slots(pair, missing, "" if failed.heard else failed.why)
        if not call and not slots:
            call = self._nothing(pair) or self._used_before(pair)
        # What vLLM did not hear of is told by the slots where these are seen.
        told = failed.heard or not missing.certain
        found = [*(failed.signs(self._accepted, slots) if told else ()), *slots]
        if call:
            found += signs([self._accepted.asked.positions], call)
        return InPair(tuple(found), self._wrote[pair] >= 0 or missing.certain)

    def _by_calls(self, pair: int) -> Sign | None:
        """How the calls went that were to load it, where they did not return."""
        if self._start_raised:
            return Sign(By.CALL, LoadEnd.FAILED, ("start_load_kv raised",))
        if self._wait_raised[pair] or (self._op_t[pair] == NEVER and any(self._wait_raised)):
            return Sign(By.CALL, LoadEnd.FAILED, ("wait_for_layer_load raised",))
        if self._not_called:
            return Sign(By.CALL, LoadEnd.NOT_WRITTEN, ("start_load_kv was not called in the step",))
        return None

    def _by_slots(self, pair: int, missing: Missing, of_nobody: str) -> Signs:
        """What the slots say that were not written, or not in time. ``of_nobody``: reports that are."""
        when = STEPS_LATER if missing.steps_later else TOO_LATE
        late = signs(missing.late, Sign(By.SLOT, LoadEnd.USED_BEFORE, (when,)))
        if not (missing.certain and missing.positions):
            return late
        early = self._used_before(pair)
        if early:  # its turn to be written never came
            return *signs(missing.positions, early), *late
        some = "none" if missing.whole else "not all"
        why = [*([READ_ONLY] if missing.read else []), self._beside, of_nobody, *self._complaints[:1]]
        reason = "; ".join([f"{some} of the slots of these tokens were written", *filter(None, why)])
        end = LoadEnd.NOT_WRITTEN if missing.whole else LoadEnd.PARTLY
        return *signs(missing.positions, Sign(By.SLOT, end, (reason,))), *late

    def _nothing(self, pair: int) -> Sign | None:
        """What shows that hooks that wrote no slot did not load, where it is not seen which they write."""
        if self._wrote[pair] != 0 or self._seen.written.known(self._worker):
            return None
        if self._complaints:
            reason = f"the load hooks wrote 0 slots here; {self._complaints[0]}"
        elif self._waits:
            return None
        else:
            reason = "start_load_kv wrote 0 slots, and wait_for_layer_load does nothing"
        return Sign(By.CALL, LoadEnd.NOT_WRITTEN, (reason,))

    def _used_before(self, pair: int) -> Sign | None:
        reason = self._after_use(pair)
        return Sign(By.CALL, LoadEnd.USED_BEFORE, (reason,)) if reason else None

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
