"""Puts a request's story together: what its records say, in order, and where its tokens ended up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvtrace import ledger
from kvtrace.errors import KvtraceError
from kvtrace.ledger.run import Engine, Run, RunRequest
from kvtrace.story import find
from kvtrace.story.moments import Subject, moments
from kvtrace.story.ranges import ranges
from kvtrace.story.records import Source, sources
from kvtrace.story.story import Pair, Story
from kvtrace.trace import facts
from kvtrace.trace.reader import of_type
from kvtrace.trace.rows import Arrival, of_kind


def tell(run_dir: Path, wanted: str, layer: str | None = None, token: int | None = None) -> Story:
    """The story of one request.

    Args:
        wanted: the client's or the engine's id, or a prefix that fits one request only; ``ID#2``.
        layer: only this layer's calls: its name, or its number.
        token: only what concerns this position.

    Raises:
        KvtraceError: no such request, layer or position; several fit; no readable spool.
    """
    spools = sources(run_dir)
    clients = {
        fact.engine: fact.client
        for source in spools
        for _, fact in of_type(facts.ClientIdFact, source.documents)
        if fact.engine
    }
    ident, number = find.find(wanted, [one for _, one in _arrivals(spools)], clients)
    run = ledger.read_run(run_dir, watch=(ident,))
    subject, request = _subject(run, ident, number)
    pairs = _pairs(subject.engine)
    shown_layer = None if layer is None else _layer(layer, pairs)
    if token is not None and not 0 <= token < request.computed:
        last = request.computed - 1
        there = f"positions 0 to {last} had KV" if request.computed else "no position ever had KV"
        raise KvtraceError(f"no position {token} in request {ident}", there)
    happened, notes = moments(subject, run, spools)
    return Story(
        id=ident,
        client=request.client,
        prompt=int(request.prompt),
        computed=int(request.computed),
        output=int(request.output),
        status=request.status,
        finished=bool(request.t_end),
        preemptions=int(request.preemptions),
        pairs=pairs,
        moments=happened,
        ranges=ranges(run, subject.row),
        loaded=_of_loads(run, subject.row),
        notes=notes,
        token=token,
        layer=shown_layer,
    )


def _arrivals(spools: list[Source]) -> list[tuple[int, str]]:
    """(time, id) of each request that any scheduler knew, in order."""
    found: list[tuple[int, str]] = []
    for source in spools:
        seen: set[str] = set()
        arrived = of_kind(Arrival, source.rows)
        for t, request in zip(arrived.t.tolist(), arrived.request.tolist(), strict=True):
            if ident := source.names.get(request, ""):
                seen.add(ident)
                found.append((t, ident))
        found.extend((1 << 62, ident) for ident in sorted(source.ids - seen))
    return sorted(found)


def _subject(run: Run, ident: str, number: int) -> tuple[Subject, RunRequest]:
    """The request of that id, several have it, and its row in Run.requests.

    Raises:
        KvtraceError: the ledger does not know it.
    """
    same = [(at, row) for at, row in enumerate(run.requests) if row.id == ident]
    if number >= len(same):
        raise KvtraceError("no such request", ident, "its records are incomplete: it is not in the ledgers")
    at, request = same[number]
    engine = next((one for one in run.engines if one.tag == request.engine), None)
    if engine is None:
        raise KvtraceError("a request of no known engine", ident, "its scheduler left no readable record")
    after = min((row.t_first for _, row in same[number + 1 :]), default=None)
    return Subject(ident, at, engine, request.t_first, after), request


def _of_loads(run: Run, row: int) -> list[str]:
    found = [load.reasons for load in run.load_rows if load.request == row]
    found += [load.reasons for load in run.lost_resumed if load.request == row]
    return list(dict.fromkeys(line for reasons in found for lines in reasons.values() for line in lines))


def _pairs(engine: Engine) -> list[Pair]:
    """As the ledger counts them: the engine's workers in order, each with its layers."""
    pairs = [Pair(worker.rank, layer) for worker in engine.workers for layer in worker.kv_layers]
    pairs.extend(Pair(-1, "") for _ in range(engine.pairs - len(pairs)))
    return pairs


def _layer(wanted: str, pairs: Sequence[Pair]) -> str:
    names = list(dict.fromkeys(pair.layer for pair in pairs if pair.layer))
    fits = find.layers(wanted, names)
    if len(fits) == 1:
        return fits[0]
    known = f"{len(names)} layers own KV" + (f", {names[0]} to {names[-1]}" if names else "")
    name = find.shown(wanted)
    raise KvtraceError(f"{len(fits)} layers fit {name!r}" if fits else f"no layer {name!r}", known)
