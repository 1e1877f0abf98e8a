"""From the lookup to the accepted load: what the scheduler's side alone tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.loads.outcome import (
    FROM_ANOTHER,
    FULL_HIT,
    NO_BLOCKS,
    ROUNDED,
    SKIPS_CACHE,
    SUB_BLOCK,
    UNEXPLAINED,
    AskedLoad,
)
from kvtrace.ledger.requests import Admission, Request, Transfer
from kvtrace.ledger.run import Engine
from kvtrace.ledger.values import replace

_WINDOW = 64
"""Steps of an asynchronous load that is named nowhere, at most, in which its writes are looked for."""


@dataclass(frozen=True)
class Accepted:
    """A load that the scheduler accepted."""

    asked: AskedLoad
    request: Request

    @property
    def t(self) -> int:
        """When the lookup began."""
        return self.request.looked_up.t if self.request.looked_up else 0

    @property
    def allocated_t(self) -> int:
        """When its blocks were allocated, or else when the lookup began."""
        return (self.request.looked_up.allocated_t if self.request.looked_up else 0) or self.t

    @cached_property
    def reports(self) -> list[Transfer]:
        """Of its end, in the order of time."""
        ended = (one for one in self.request.transfers if one.load and not one.begun)
        return sorted((one for one in ended if one.t >= self.allocated_t), key=lambda one: one.t)

    def window(self) -> list[int]:
        """The steps in which an asynchronous load can have been started: those whose metadata names it;
        where none does, from the allocation until it was reported as finished. Empty: too many to tell."""
        begin = self.asked.step
        named = [step for step in self.request.load_steps if step >= begin]
        if named:
            return named
        reported = [one.step for one in self.reports if one.step >= begin]
        chunks = self.request.chunks
        last = min(reported) if reported else chunks[0].step - 1 if chunks else 0
        return list(range(begin, last + 1)) if last - begin < _WINDOW else []


def with_connector(engines: Sequence[Engine]) -> dict[int, Engine]:
    """By tag, those that can load."""
    return {engine.tag: engine for engine in engines if engine.connector is not None and engine.pairs > 0}


def asked_for(row: int, request: Request, engine: Engine) -> AskedLoad:
    """One request's load as far as the scheduler decided it."""
    asked = AskedLoad(row, request.id, request.engine, request.arrived, 0, looked_up=bool(request.lookups))
    lookup = request.looked_up
    if lookup is None:
        return _without_answer(asked, request, engine)
    local = min(lookup.local, asked.prompt)
    asked = replace(
        asked,
        step=lookup.step,
        t=lookup.t,
        answer=lookup.answer,
        local=local,
        asynchronous=lookup.asynchronous,
    )
    left = asked.prompt - local
    taken = lookup.accepted
    if taken is None and request.chunks:  # no word of the allocation: where it began to compute
        taken = request.external[0][1] - local if request.external else 0
    if taken is None:  # never let in within the trace
        clamped = asked.offered if request.finish is not None else 0
        ends = _tokens(local, (LoadEnd.CLAMPED, clamped), (LoadEnd.PENDING, left - clamped))
        return replace(asked, clamp=NO_BLOCKS if clamped else "", not_taken=ends)
    asked = replace(asked, accepted=_accepted(asked, request, taken))
    kept_back = asked.offered - asked.accepted
    return replace(
        asked,
        clamp=_clamp(asked, request, engine) if kept_back else "",
        not_taken=_tokens(local, (LoadEnd.CLAMPED, kept_back), (LoadEnd.MISSED, left - asked.offered)),
    )


def _tokens(local: int, *others: tuple[LoadEnd, int]) -> dict[LoadEnd, int]:
    return {end: n for end, n in ((LoadEnd.LOCAL_HIT, local), *others) if n}


def _without_answer(asked: AskedLoad, request: Request, engine: Engine) -> AskedLoad:
    if request.lookups:  # asked, and the connector had it wait
        last: Admission = request.lookups[-1]
        step, local = last.step, min(last.local, asked.prompt)
        rest = LoadEnd.NOT_OBSERVED if request.chunks else LoadEnd.PENDING
    else:
        step, local = request.chunks[0].step, min(asked.prompt, request.chunks[0].start)
        proxied = engine.connector is not None and engine.connector.proxy != "none"
        rest = LoadEnd.NEVER_ASKED if proxied else LoadEnd.NOT_OBSERVED
    return replace(asked, step=step, local=local, not_taken=_tokens(local, (rest, asked.prompt - local)))


def _accepted(asked: AskedLoad, request: Request, taken: int) -> int:
    accepted = min(max(0, taken), asked.offered)
    if request.chunks and not asked.asynchronous:
        return min(accepted, max(0, request.chunks[0].start - asked.local))
    if asked.asynchronous and request.chunks and asked.local + accepted == asked.prompt:
        # A whole prompt that was loaded computes its last token again.
        accepted -= min(1, accepted)
    return accepted


def _clamp(asked: AskedLoad, request: Request, engine: Engine) -> str:
    """Why vLLM's scheduler takes less than it was offered; or, of connectors inside another one, that one."""
    block = request.block or engine.block_size
    if asked.accepted == 0:
        inside = engine.connector is not None and engine.connector.parent is not None
        if inside and request.chunks and request.chunks[0].start > asked.local:
            return FROM_ANOTHER
        if asked.offered < block and asked.local % block:
            return SUB_BLOCK
        if asked.offered > 1:
            return SKIPS_CACHE
        return FULL_HIT if asked.local + 1 == asked.prompt else UNEXPLAINED
    kept_back = asked.offered - asked.accepted
    if kept_back == 1 and asked.local + asked.offered == asked.prompt:
        return FULL_HIT
    if block > 0 and kept_back < block and (asked.local + asked.accepted) % block == 0:
        return ROUNDED
    return UNEXPLAINED
