"""A run directory, opened for export: its books, its processes with one clock, and what was asked for."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtrace import ledger
from kvtrace.causes import diagnose
from kvtrace.export.selection import REQUEST_WORDS, STEP_WORDS, Selection, Wanted, in_steps, parse_layers
from kvtrace.ledger import Progress, unwatched
from kvtrace.ledger.run import Run
from kvtrace.report.build import assemble, request_rows
from kvtrace.report.model import Report, RequestRow
from kvtrace.story.find import find
from kvtrace.story.locate import run_directory
from kvtrace.trace import rows
from kvtrace.trace.format import STEP_MASK, Role
from kvtrace.trace.reader import Records, Spool

NO_RANK = -1
_SAME_CLOCK_NS = 10**9
_MOST = 1 << 62


@dataclass(frozen=True)
class SpoolProcess:
    """One process with a spool.

    Attributes:
        name: for people, "worker 0".
        ranks: engine's tag -> rank of its worker in this process; empty where it has none.
        shift_ns: what makes wall time of its clock; the same for processes that share a clock.
    """

    path: Path
    size: int
    pid: int
    host: str
    name: str
    ranks: Mapping[int, int]
    shift_ns: int

    @property
    def stem(self) -> str:
        return self.path.stem

    def rank_of(self, side: int, tag: int) -> int:
        """The rank of the worker of an engine here, of step 0 that of the first one; none of other sides."""
        first = next(iter(self.ranks.values()), NO_RANK)
        return self.ranks.get(tag, first) if side == Role.WORKER else NO_RANK


@dataclass(frozen=True)
class Opened:
    """A run that is read. ``key`` names it among others: the same for a copy, another for another run."""

    key: str
    host: str
    run: Run
    report: Report
    requests: Sequence[RequestRow]
    """All that are wanted, worst first; the report has the first of them only."""
    processes: Sequence[SpoolProcess]
    selection: Selection
    clients: Mapping[str, str]
    """Engine's id of a request -> the client's, where that is another."""

    @property
    def name(self) -> str:
        """The run's name, without the number."""
        return self.key.rpartition("-")[0]

    @property
    def size(self) -> int:
        """Bytes of all spools."""
        return sum(one.size for one in self.processes)

    def chunks(
        self, process: SpoolProcess, progress: Progress = unwatched
    ) -> Iterator[tuple[Records, Mapping[int, str]]]:
        """(records that are wanted, names) of a process, chunk by chunk. ``progress`` hears how much of all
        processes has been read, once a chunk is done with.

        Raises:
            SpoolError: the spool vanished.
        """
        spool = Spool(process.path)
        before = sum(one.size for one in self.processes[: self.processes.index(process)])
        for chunk in spool.chunks():
            read = before + spool.info().size
            yield self.selection.of(chunk, spool.names), spool.names
            progress(min(read, self.size), self.size)


def open_run(path: str | Path, wanted: Wanted | None = None) -> Opened:
    """The run at `path`: a run directory, or the report.json in one.

    Raises:
        KvtraceError: no run that can be read; or no such layer or request in it.
    """
    wanted = wanted or Wanted()
    run = ledger.read_run(run_directory(path))
    processes = _processes(run)
    clients = {one.id: one.client for one in run.requests if one.client}
    host = run.run.host or next((one.host for one in processes), "")
    diagnosis, selection = diagnose(run), _selection(run, wanted, clients, processes)
    return Opened(
        key=_key(run),
        host=host,
        run=run,
        report=assemble(run, diagnosis),
        requests=[row for row in request_rows(diagnosis.requests) if _is_wanted(row, selection)],
        processes=processes,
        selection=selection,
        clients=clients,
    )


def _is_wanted(row: RequestRow, selection: Selection) -> bool:
    here = in_steps(row["first_step"], row["last_step"], selection.steps)
    return here and selection.request in ("", row["id"])


def _key(run: Run) -> str:
    """``nightly-1f2e3d4c``: the run's name, and a number made of when and where it began."""
    name = run.run.name or run.directory.resolve().name
    headers = sorted((one.header.wall_ns, one.header.host, one.pid) for one in run.processes if one.agent)
    began = repr((run.run.started_wall_ns, run.run.host, headers[:1])).encode()
    return f"{name}-{zlib.crc32(began):08x}"


def _processes(run: Run) -> list[SpoolProcess]:
    infos = {info.name: info for info in run.spools}
    clocks: list[tuple[str, int]] = []
    found = []
    for one in run.processes:
        info = infos.get(one.spool or "")
        if info is None:
            continue
        ranks = {
            worker.engine: _within(worker.rank, NO_RANK)
            for engine in run.engines
            for worker in engine.workers
            if worker.spool == one.spool
        }
        own = _within(one.header.wall_ns - one.header.perf_ns, 0)
        shift = _clock(clocks, one.header.host, own)
        pid, host = _within(one.pid, -1), one.header.host
        found.append(SpoolProcess(info.path, info.size, pid, host, one.name, ranks, shift))
    return found


def _within(value: int, otherwise: int) -> int:
    """`value`; another one where it is none that a recorder writes, and that no column can hold."""
    return value if abs(value) < _MOST else otherwise


def _clock(known: list[tuple[str, int]], host: str, own: int) -> int:
    """The first shift of that host that is near: wall clocks are set now and then, the other one never is."""
    for name, shift in known:
        if name == host and abs(shift - own) < _SAME_CLOCK_NS:
            return shift
    known.append((host, own))
    return own


def _selection(
    run: Run, wanted: Wanted, clients: Mapping[str, str], processes: Sequence[SpoolProcess]
) -> Selection:
    layers = dict.fromkeys(layer for worker in run.workers() for layer in worker.kv_layers)
    chosen = parse_layers(wanted.layers, list(layers))
    request, steps = "", np.empty(0, dtype=np.int64)
    if wanted.request:
        ids = list(dict.fromkeys(one.id for one in run.requests))
        request = find(wanted.request, ids, clients)[0]
        steps = _steps_of(request, processes)
    arrivals = None
    if wanted.steps is not None:
        arrivals = frozenset(
            one.id
            for one in run.requests
            if in_steps(one.first_step & STEP_MASK, one.last_step & STEP_MASK, wanted.steps)
        )
    return Selection(wanted.steps, chosen, request, steps, arrivals)


def _steps_of(request: str, processes: Sequence[SpoolProcess]) -> Any:
    """The steps that the records of a request name: its chunks, lookups, metadata, transfers, its end."""
    found = [np.empty(0, dtype=np.int64)]
    kinds = [kind for kind in REQUEST_WORDS if kind in STEP_WORDS]
    for process in processes:
        spool = Spool(process.path)
        for chunk in spool.chunks():
            mine = [number for number, text in spool.names.items() if text == request]
            if mine:
                found += [_named_steps(chunk, kind, mine) for kind in kinds]
    return np.unique(np.concatenate(found))


def _named_steps(chunk: Records, kind: int, ids: Sequence[int]) -> Any:
    here = (rows.kind(chunk[:, 0]) == kind) & np.isin(chunk[:, REQUEST_WORDS[kind]], ids)
    return chunk[here, STEP_WORDS[kind]]
