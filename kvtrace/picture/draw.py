"""A run directory as a picture: tokens of the ledger by step and layer, beside the calls in the spools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvtrace import ledger
from kvtrace.ledger.run import Engine, Process, Run, Span
from kvtrace.ledger.scan import of_a_connector
from kvtrace.ledger.steps import Array, of_engine
from kvtrace.picture import kinds
from kvtrace.picture.bins import drawn, looks
from kvtrace.picture.cells import grid, loads
from kvtrace.picture.collect import Runs, WorkerMarks, busy, collect, executions
from kvtrace.picture.lanes import KINDS, Step, Timed, chosen, lanes
from kvtrace.picture.picture import Map, Picture
from kvtrace.trace import rows
from kvtrace.trace.reader import Records, Spool, SpoolError, spool_paths
from kvtrace.words import plural

MOST_MAPS = 8


class _Everyone(frozenset[str]):
    """All requests, whatever their ids."""

    def __contains__(self, one: object) -> bool:
        return True


def draw(run_dir: Path) -> Picture:
    """The picture of a run.

    Raises:
        RunError: there is no spool that can be read.
    """
    run = ledger.read_run(run_dir, watch=_Everyone())
    clocks = _clocks(run.processes)
    of_engine = _spans(run)
    read = _Read(run, clocks)
    maps: list[Map] = []
    notes: list[str] = []
    steps: dict[int, Step] = {}
    for engine in run.engines:
        made, times = _engine(run.directory, engine, of_engine.get(engine.tag, []), (clocks, read.prompt))
        maps += made
        steps.update(times)
    maps.sort(key=lambda one: one.what == "loads")  # those of the saves go first
    if len(maps) > MOST_MAPS:
        notes.append(
            f"{plural(len(maps) - MOST_MAPS, 'more map')} of workers that look different again: not drawn"
        )
        maps = maps[:MOST_MAPS]
    records = sorted(read.records, key=lambda one: one.t)
    begin = min([*(one.t for one in records), *(t0 for t0, _ in steps.values())], default=0.0)
    for one in records:
        one.t = round(one.t - begin, 3)
    steps = {step: (round(t0 - begin, 3), round(t1 - begin, 3)) for step, (t0, t1) in steps.items()}
    return Picture(
        kinds=list(kinds.KINDS),
        maps=maps,
        lanes=lanes(run, records, run.spans, steps),
        requests=len(run.requests),
        notes=notes,
    )


def _spans(run: Run) -> dict[int, list[Span]]:
    found: dict[int, list[Span]] = {}
    for span in run.spans:
        if span.step > 0:
            found.setdefault(run.requests[span.request].engine, []).append(span)
    return found


def _engine(
    run_dir: Path, engine: Engine, spans: Sequence[Span], read: tuple[Mapping[str, int], Mapping[int, int]]
) -> tuple[list[Map], dict[int, Step]]:
    """The maps of an engine, and when each of its steps ran (ms, on the run's clock).

    Args:
        read: the clocks of the spools, and the prompt tokens of each step.
    """
    if not engine.workers or not engine.pairs_known:
        return [], {}
    ran = {worker.spool: executions(run_dir, worker) for worker in engine.workers}
    steps = _steps(engine, spans, ran)
    steps, seen = busy(steps, collect(run_dir, engine, steps, ran), spans)
    if not len(steps):
        return [], {}
    prompt = np.array([read[1].get(step, 0) for step in steps.tolist()], dtype=np.int64)
    cells = grid(engine, steps, seen, spans, prompt)
    maps = [drawn(engine, cells, seen, look) for look in looks(engine, cells)]
    if (loaded := loads(cells, seen)) is not None:
        maps += [replace(drawn(engine, loaded, seen, look), what="loads") for look in looks(engine, loaded)]
    return maps, _times(steps, seen, read[0])


def _steps(engine: Engine, spans: Sequence[Span], ran: Mapping[str, Runs]) -> Array:
    """Those with prompt tokens, and those that any worker executed."""
    chunks = np.unique(np.array([span.step for span in spans], dtype=np.int64))
    return of_engine(np.unique(np.concatenate([chunks, *(one.steps for one in ran.values())])), engine.tag)


def _times(steps: Array, seen: Sequence[WorkerMarks], clocks: Mapping[str, int]) -> dict[int, Step]:
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


class _Read:
    """What the spools say of requests.

    Attributes:
        records: of the requests that get a lane.
        prompt: step (with the engine's tag) -> prompt tokens computed in it.
    """

    def __init__(self, run: Run, clocks: Mapping[str, int]) -> None:
        self.records: list[Timed] = []
        self.prompt: dict[int, int] = {}
        self._wanted = {run.requests[row].id for row in chosen(run)}
        for path in spool_paths(run.directory):
            try:
                spool = Spool(path)
                for chunk in spool.chunks():
                    self._add(chunk, spool.names, clocks.get(path.name, 0))
            except SpoolError:
                continue

    def _add(self, chunk: Records, names: Mapping[int, str], shift: int) -> None:
        head = chunk[:, 0]
        inside = of_a_connector(chunk) & (rows.detail(head) > 0)  # of a connector inside another one
        for words in chunk[np.isin(rows.kind(head), list(KINDS)) & ~inside].tolist():
            row = rows.decode(words)
            if isinstance(row, rows.Chunk):
                self.prompt[row.step] = self.prompt.get(row.step, 0) + max(0, row.tokens)
            ident = names.get(getattr(row, "request", 0), "")
            if ident in self._wanted:
                status = names.get(getattr(row, "status_name", 0), "").rsplit(".", 1)[-1]
                self.records.append(Timed((words[1] + shift) / 1e6, row, ident, status))
