"""From the lookup to the accepted load: what the scheduler's side alone tells."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.intervals import Interval, subtract, union
from kvtrace.ledger.loads.outcome import (
    FROM_ANOTHER,
    FULL_HIT,
    NO_BLOCKS,
    ROUNDED,
    SKIPS_CACHE,
    SUB_BLOCK,
    UNEXPLAINED,
    LoadOf,
)
from kvtrace.ledger.model import Engine
from kvtrace.ledger.requests import Lookup, Request
from kvtrace.ledger.values import replace

_WINDOW = 64
"""Steps of an asynchronous load that is named nowhere, at most, in which its writes are looked for."""


@dataclass(frozen=True)
class Accepted:
    """A load that the scheduler accepted. ``t``: when the lookup began; ``allocated_t``: when its blocks
    were allocated, else the same."""

    load: LoadOf
    request: Request
    t: int
    allocated_t: int

    @property
    def positions(self) -> Interval:
        return self.load.local, self.load.local + self.load.accepted

    @cached_property
    def unnamed(self) -> list[Interval]:
        """Accepted positions that no load entry of the request names; none where the entries do not say."""
        entries = [entry for entry in self.request.load_entries if entry.step >= self.load.step]
        if not entries or any(entry.slots < 0 or entry.start < 0 for entry in entries):
            return []
        return subtract([self.positions], union((one.start, one.start + one.slots) for one in entries))

    def window(self) -> list[int]:
        """The steps in which an asynchronous load can have been started: those whose metadata names it;
        where none does, from the allocation until it was reported as finished. Empty: too many to tell."""
        begin = self.load.step
        named = sorted({entry.step for entry in self.request.load_entries if entry.step >= begin})
        if named:
            return named
        reported = [
            one.step
            for one in self.request.transfers
            if one.load and not one.begun and one.t >= self.allocated_t and one.step >= begin
        ]
        chunks = self.request.chunks
        last = min(reported) if reported else chunks[0].step - 1 if chunks else 0
        return list(range(begin, last + 1)) if last - begin < _WINDOW else []


def until_accepted(row: int, request: Request, engine: Engine) -> tuple[LoadOf, Accepted | None]:
    """One request's load as far as the scheduler decided it; an accepted one is left for the workers."""
    load = LoadOf(row, request.id, request.engine, request.arrived, 0, looked_up=bool(request.lookups))
    lookup = request.looked_up
    if lookup is None:
        return _without_answer(load, request, engine), None
    local = min(lookup.local, load.prompt)
    load = replace(
        load, step=lookup.step, answer=lookup.answer, local=local, asynchronous=lookup.asynchronous
    )
    taken = lookup.accepted
    if taken is None and request.chunks:  # no word of the allocation: where it began to compute
        taken = request.external[0][1] - local if request.external else 0
    if taken is None:
        return _not_allocated(load, request, engine), None
    load = replace(load, accepted=_accepted(load, request, taken))
    kept_back = load.offered - load.accepted
    left = load.prompt - local
    load = replace(
        load,
        clamp=_clamp(load, request, engine) if kept_back else "",
        ends=_ends(
            engine,
            (LoadEnd.LOCAL_HIT, local),
            (LoadEnd.CLAMPED, kept_back),
            (LoadEnd.MISSED, left - load.offered),
        ),
    )
    if not load.accepted:
        return load, None
    return load, Accepted(load, request, lookup.t, lookup.allocated_t or lookup.t)


def _ends(engine: Engine, *tokens: tuple[LoadEnd, int]) -> dict[LoadEnd, int]:
    """Token-layers by end, of tokens that fared alike in all pairs."""
    found: Counter[LoadEnd] = Counter()
    for end, n in tokens:
        if n:
            found[end] += n * engine.pairs
    return dict(found)


def _without_answer(load: LoadOf, request: Request, engine: Engine) -> LoadOf:
    if request.lookups:  # asked, and the connector had it wait
        last: Lookup = request.lookups[-1]
        step, local = last.step, min(last.local, load.prompt)
        rest = LoadEnd.NOT_OBSERVED if request.chunks else LoadEnd.PENDING
    else:
        step, local = request.chunks[0].step, min(load.prompt, request.chunks[0].start)
        proxied = engine.connector is not None and engine.connector.proxy != "none"
        rest = LoadEnd.NEVER_ASKED if proxied else LoadEnd.NOT_OBSERVED
    ends = _ends(engine, (LoadEnd.LOCAL_HIT, local), (rest, load.prompt - local))
    return replace(load, step=step, local=local, ends=ends)


def _not_allocated(load: LoadOf, request: Request, engine: Engine) -> LoadOf:
    """Asked for, and never let in within the trace."""
    left = load.prompt - load.local
    clamped = load.offered if request.finish is not None else 0
    ends = _ends(
        engine,
        (LoadEnd.LOCAL_HIT, load.local),
        (LoadEnd.CLAMPED, clamped),
        (LoadEnd.PENDING, left - clamped),
    )
    return replace(load, clamp=NO_BLOCKS if clamped else "", ends=ends)


def _accepted(load: LoadOf, request: Request, taken: int) -> int:
    accepted = min(max(0, taken), load.offered)
    if request.chunks and not load.asynchronous:
        return min(accepted, max(0, request.chunks[0].start - load.local))
    if load.asynchronous and request.chunks and load.local + accepted == load.prompt:
        # A whole prompt that was loaded computes its last token again.
        accepted -= min(1, accepted)
    return accepted


def _clamp(load: LoadOf, request: Request, engine: Engine) -> str:
    """Why vLLM's scheduler takes less than it was offered; or, of connectors inside another one, that one."""
    block = request.block or engine.block_size
    if load.accepted == 0:
        inside = engine.connector is not None and engine.connector.parent is not None
        if inside and request.chunks and request.chunks[0].start > load.local:
            return FROM_ANOTHER
        if load.offered < block and load.local % block:
            return SUB_BLOCK
        return SKIPS_CACHE if load.offered > 1 else FULL_HIT if load.local + 1 == load.prompt else UNEXPLAINED
    kept_back = load.offered - load.accepted
    if kept_back == 1 and load.local + load.offered == load.prompt:
        return FULL_HIT
    if block > 0 and kept_back < block and (load.local + load.accepted) % block == 0:
        return ROUNDED
    return UNEXPLAINED
