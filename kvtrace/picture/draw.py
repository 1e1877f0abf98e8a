"""A run directory as a picture: tokens of the ledger by step and layer, beside the calls in the spools."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from kvtrace import ledger
from kvtrace.ledger.model import Engine, Process, Run, Span
from kvtrace.ledger.steps import Array, of_engine
from kvtrace.picture import kinds
from kvtrace.picture.bins import columns, drawn, looks
from kvtrace.picture.cells import grid
from kvtrace.picture.collect import Runs, Seen, busy, collect, executions
from kvtrace.picture.lanes import KINDS, Step, Timed, chosen, lanes
from kvtrace.picture.model import Kind, Map, Picture
from kvtrace.trace import rows
from kvtrace.trace.reader import Spool, SpoolError, spool_paths
from kvtrace.words import plural

MOST_MAPS = 8


class _Everyone(Collection[str]):
    """All requests, whatever their ids."""

    def __contains__(self, one: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def draw(run_dir: Path) -> Picture:
    """The picture of a run.

    Raises:
        RunError: there is no spool that can be read.
    """
    run = ledger.read_run(run_dir, watch=_Everyone())
    clocks = _clocks(run.processes)
    of_engine = _spans(run)
    maps: list[Map] = []
    notes: list[str] = []
    steps: dict[int, Step] = {}
    for engine in run.engines:
        made, times = _engine(run.directory, engine, of_engine.get(engine.tag, []), clocks)
        maps += made
        steps.update(times)
    if len(maps) > MOST_MAPS:
        notes.append(
            f"{plural(len(maps) - MOST_MAPS, 'more map')} of workers that look different again: not drawn"
        )
        maps = maps[:MOST_MAPS]
    records = sorted(_records(run, clocks), key=lambda one: one.t)
    begin = min([*(one.t for one in records), *(t0 for t0, _ in steps.values())], default=0.0)
    for one in records:
        one.t = round(one.t - begin, 3)
    steps = {step: (round(t0 - begin, 3), round(t1 - begin, 3)) for step, (t0, t1) in steps.items()}
    used = _used(maps, run.spans)
    numbers = {number: at for at, number in enumerate(used)}
    return Picture(
        kinds=[kinds.KINDS[number] for number in used],
        maps=[_renumbered(one, numbers) for one in maps],
        lanes=lanes(run, records, run.spans, steps, numbers),
        requests=len(run.requests),
        notes=notes,
    )


def _spans(run: Run) -> dict[int, list[Span]]:
    engines = run.requests["engine"].tolist()
    found: dict[int, list[Span]] = {}
    for span in run.spans:
        if span.step > 0:
            found.setdefault(engines[span.request], []).append(span)
    return found


def _engine(
    run_dir: Path, engine: Engine, spans: Sequence[Span], clocks: Mapping[str, int]
) -> tuple[list[Map], dict[int, Step]]:
    """The maps of an engine, and when each of its steps ran (ms, on the run's clock)."""
    if not engine.workers or not engine.pairs_known:
        return [], {}
    ran = {worker.spool: executions(run_dir, worker) for worker in engine.workers}
    steps = _steps(engine, spans, ran)
    if not len(steps):
        return [], {}
    seen = collect(run_dir, engine, steps, ran)
    steps, seen = busy(steps, seen, spans)
    cells = grid(engine, steps, seen, spans)
    there = columns(steps, seen)
    maps = [drawn(engine, cells, seen, there, look) for look in looks(engine, cells, seen, there)]
    return maps, _times(steps, seen, clocks)


def _steps(engine: Engine, spans: Sequence[Span], ran: Mapping[str, Runs]) -> Array:
    """Those with prompt tokens, and those that any worker executed."""
    chunks = np.unique(np.array([span.step for span in spans], dtype=np.int64))
    return of_engine(np.unique(np.concatenate([chunks, *(one.steps for one in ran.values())])), engine.tag)


def _times(steps: Array, seen: Sequence[Seen], clocks: Mapping[str, int]) -> dict[int, Step]:
    found: dict[int, Step] = {}
    for one in seen:
        shift = clocks.get(one.worker.spool, 0)
        for step, t0, spent in zip(steps.tolist(), one.t0.tolist(), one.spent.tolist(), strict=True):
            if t0:
                begin, end = (t0 + shift) / 1e6, (t0 + spent + shift) / 1e6
                low, high = found.get(step, (begin, end))
                found[step] = (min(low, begin), max(high, end))
    return found


def _clocks(processes: Sequence[Process]) -> dict[str, int]:
    """Spool -> what turns its times into those of one clock: nothing on one host, wall time on several."""
    traced = [one for one in processes if one.spool]
    several = len({one.header.host for one in traced}) > 1
    return {
        str(one.spool): one.header.wall_ns - one.header.perf_ns if several and one.header.wall_ns else 0
        for one in traced
    }


def _records(run: Run, clocks: Mapping[str, int]) -> Iterator[Timed]:
    """The records of the requests that get a lane."""
    table = run.requests
    wanted = {str(table["id"].iloc[row]) for row in chosen(run)}
    for path in spool_paths(run.directory):
        try:
            spool = Spool(path)
            shift = clocks.get(path.name, 0)
            for chunk in spool.chunks():
                for words in chunk[np.isin(rows.kind(chunk[:, 0]), list(KINDS))].tolist():
                    row = rows.decode(words)
                    ident = spool.names.get(getattr(row, "request", 0), "")
                    if ident in wanted:
                        status = spool.names.get(getattr(row, "status_name", 0), "").rsplit(".", 1)[-1]
                        yield Timed((words[1] + shift) / 1e6, row, ident, status)
        except SpoolError:
            continue


def _used(maps: Sequence[Map], spans: Sequence[Span]) -> list[int]:
    """Numbers of the kinds that the picture has, ascending; and those that kinds of its spans merge to."""
    used = {kind for one in maps for kind, _ in one.counts}
    alone = {kinds.of_outcome(span.outcome) for span in spans if span.step > 0}
    merged: set[Kind] = {kinds.worse(one, other) for one in alone for other in alone}
    return sorted(
        used | {kinds.NUMBER[one] for one in merged | {kinds.worse(a, b) for a in merged for b in alone}}
    )


def _renumbered(one: Map, numbers: Mapping[int, int]) -> Map:
    mixes = [[numbers[v] if at % 2 == 0 else v for at, v in enumerate(mix)] for mix in one.mixes]
    counts = [[numbers[kind], total] for kind, total in one.counts]
    return Map(**{**vars(one), "mixes": mixes, "counts": counts})
