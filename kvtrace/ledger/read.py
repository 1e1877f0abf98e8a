"""A run directory, read into a :class:`~kvtrace.ledger.run.Run`: the one place where the stages of reading
are joined. Each of them gives values that nobody changes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from kvtrace.ledger import device, reported
from kvtrace.ledger.beginnings import in_common
from kvtrace.ledger.children import children, outermost
from kvtrace.ledger.contents.compare import compare
from kvtrace.ledger.contents.prints import printed
from kvtrace.ledger.contents.unwritten import Places, Written
from kvtrace.ledger.coverage import CoverageTables, WorkerCoverage, cover
from kvtrace.ledger.incomplete import cut_off, in_the_open, incomplete, unfinished
from kvtrace.ledger.intervals import Interval
from kvtrace.ledger.loads.book import ask, balance, follow, look
from kvtrace.ledger.loads.resumed import ask_resumed, follow_resumed
from kvtrace.ledger.places import places as written_to
from kvtrace.ledger.requests import Request, Requests, by_engine, collect
from kvtrace.ledger.run import NO_KV, Engine, PairKept, Part, PromptSteps, Run, RunError, RunRequest, Worker
from kvtrace.ledger.saves.assign import RequestSaves, Saves, assign
from kvtrace.ledger.saves.completion import settle
from kvtrace.ledger.saves.measured import MeasuredCells, measure
from kvtrace.ledger.saves.pairs import SaveEvidence
from kvtrace.ledger.saves.positions import PositionsEvidence
from kvtrace.ledger.saves.unnamed import Unnamed, unnamed
from kvtrace.ledger.saves.watched import Watched
from kvtrace.ledger.scan import SpoolScan, scan
from kvtrace.ledger.side_by_side import Add, Progress, each, silent, unwatched
from kvtrace.ledger.slots.accounts import Accounts, TracedSpool, accounts
from kvtrace.ledger.slots.reads import Slots
from kvtrace.ledger.slots.resolve import given_blocks, slots_of
from kvtrace.ledger.slots.tables import Given
from kvtrace.ledger.slots.touches import touches
from kvtrace.ledger.states.book import book_of_states
from kvtrace.ledger.steps import NEVER_RAN, Array, Executed, Steps
from kvtrace.ledger.topology import Topology, topology
from kvtrace.ledger.values import without_collector
from kvtrace.trace import facts
from kvtrace.trace.facts import Limit, WatchLimitsFact
from kvtrace.trace.format import STEP_SHIFT
from kvtrace.trace.reader import SpoolError, without_copies
from kvtrace.trace.rest_file import RestFile, read_rest_file
from kvtrace.trace.run_file import RunFile, read_run_file
from kvtrace.trace.stuck_file import read_stuck_file
from kvtrace.words import count, plural

_CHUNKS_SHOWN = 16
_Files: TypeAlias = tuple[RunFile, RestFile]


@without_collector()
def read_run(run_dir: Path, watch: Collection[str] = (), progress: Progress = unwatched) -> Run:
    """Read every spool of a run and build the tables and the ledgers.

    Args:
        watch: engine's ids of requests whose positions are kept one by one in ``Run.spans``.
        progress: called with (bytes read, of so many); each spool is read twice.

    Raises:
        RunError: there is no spool that can be read; one line that says why.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise RunError(f"{run_dir}: no such run directory")
    file, file_notes = read_run_file(run_dir)
    rest, rest_notes = read_rest_file(run_dir)
    stuck, stuck_notes = read_stuck_file(run_dir)
    paths, notes = without_copies(run_dir)
    reading = _Reading(progress, 2 * sum(map(_size, paths)))
    scans, scan_notes = _scans(run_dir, file, paths, reading.add)
    scan_notes = [*notes, *scan_notes]
    run = _joined(run_dir, (file, rest), scans, _Asked(watch, reading.add))
    run = replace(run, places=written_to(scans, run.engines, rest))
    lacks = incomplete(run)
    lines = [f"the recording is incomplete: {line}" for line in lacks]
    notes = [*lines, *file_notes, *rest_notes, *stuck_notes, *scan_notes, *run.notes]
    return replace(run, incomplete=lacks, stuck=stuck, notes=notes)


class _Reading:
    """How far it is read."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def add(self, amount: int) -> None:
        self._done = min(self._done + amount, self._total)
        self._progress(self._done, self._total)


class _Asked(NamedTuple):
    """As :func:`read_run`, of each reading."""

    watch: Collection[str] = ()
    add: Add = silent


def _joined(run_dir: Path, files: _Files, scans: Sequence[SpoolScan], asked: _Asked) -> Run:
    """The run's books; where connectors stand inside another one, those of each first."""
    who = topology(scans, files[0])
    parts = [
        (
            child.name,
            _books(run_dir, files, [child.records(one) for one in scans], child.within(who), _Asked()),
        )
        for child in children(who.engines, who.connectors, scans)
    ]
    if parts:
        scans = [outermost(one, who.connectors) for one in scans]
    whole = _books(run_dir, files, scans, who, asked, [books for _, books in parts])
    return replace(whole.run, parts=[Part(name, books.run) for name, books in parts])


class _Books(NamedTuple):
    run: Run
    requests: Sequence[Request]
    ways: Mapping[int, PositionsEvidence]

    def of(self, requests: Sequence[Request]) -> Mapping[int, PositionsEvidence]:
        """The ways, where these are the same requests, row by row."""
        same = [(one.id, one.engine, one.computed) for one in requests] == [
            (one.id, one.engine, one.computed) for one in self.requests
        ]
        return self.ways if same else {}


def _books(
    run_dir: Path, files: _Files, scans: Sequence[SpoolScan], who: Topology, asked: _Asked,
    parts: Sequence[_Books] = (),
) -> _Books:  # fmt: skip
    """The stages of reading, one after the other."""
    found = _with_kv(every := collect(scans, who.tags), who.engines)
    seen = _seen(scans, who, found.requests, files[1])
    watched = _watched(scans, who.engines, found.requests, seen)
    implied = _unnamed(found, who.engines, watched)
    requests = _with_implied(found.requests, implied)
    async_saves = settle(requests, who.engines, watched)
    coverage = cover(scans, who.engines, who.workers, _store_steps(requests), asked.add)
    engines = _all_counted(who.engines, requests, found.unreadable, implied, coverage)
    wanted, accepted = ask(requests, engines)
    prints = printed(engines, scans, requests, {one.asked.request: one.asked.positions for one in accepted})
    contents = compare(prints, requests, _places(seen.given), _written(engines, watched))
    slots = {key: one.slots for key, one in watched.items()}
    resumed = ask_resumed(requests, engines)
    looked = look([*accepted, *resumed], engines, scans, seen.executed, slots)
    arrived = follow(accepted, engines, scans, looked, contents)
    evidence = SaveEvidence(
        executed=seen.executed, coverage=coverage.workers, watched=watched,
        proved=contents.proved, kept=contents.kept,
        unequal=contents.unequal(row for row, one in arrived.items() if one.other_kv),
        unfinished={save.request: save.unfinished for save in async_saves},
        unknown=Steps(implied.unknown | cut_off(requests)),
        swallowed=reported.swallowed(scans), given_away=reported.given_away(scans),
        agent_failed=reported.agent_failed(scans),
    )  # fmt: skip
    saves = assign(requests, engines, evidence, arrived, asked.watch, [part.of(requests) for part in parts])
    loads, loads_sum = balance(wanted, arrived, requests, engines, scans, [of.saved for of in saves.requests])
    run = Run(
        directory=run_dir,
        run=files[0],
        processes=who.processes,
        engines=engines,
        connectors=who.connectors,
        spools=[one.info for one in scans],
        targets=reported.targets(scans),
        exceptions=reported.exceptions(scans),
        agent_errors=reported.agent_errors(scans),
        hooks=coverage.hooks, ops=coverage.ops, skips=coverage.skips, timing=coverage.timing,
        requests=_request_table(requests, saves.requests, reported.clients(scans)),
        entries=saves.entries, lost=saves.lost, base=saves.base,
        loads=loads_sum, load_rows=loads,
        lost_resumed=follow_resumed(resumed, engines, looked),
        in_common=in_common(requests),
        compared=contents.blocks, across_salts=contents.salted,
        apart=contents.apart, from_apart=contents.from_apart, altered_by=contents.altered_by,
        total=saves.total,
        notes=[*unfinished(requests), *_ended_badly(files[0], scans), *_notes(found, engines)],
        partly_watched=_partly_watched(scans, requests),
        spans=saves.spans,
        swallowed=evidence.swallowed,
        trust=saves.trust, whole=saves.whole, kept=_kept(engines, saves),
        async_saves=async_saves, outside=[total for one in seen.told.values() for total in one.totals],
        states=book_of_states(engines, every.requests, scans, seen.given),
        read_in_part=_read_in_part(list(slots.values())),
    )  # fmt: skip
    return _Books(_with_facts(run, scans), requests, saves.ways)


def _with_facts(run: Run, scans: Sequence[SpoolScan]) -> Run:
    """The run, with what its processes said of themselves."""
    return replace(
        run,
        device=device.merged(one.device for one in scans),
        start_failures=reported.start_failures(scans),
        ended_in_steps=reported.ended_in_steps(scans),
        logs=reported.logs(scans),
        asking=reported.asking(scans),
        flags=reported.flags(scans),
        config_keys=reported.config_keys(scans),
        unreadable_metadata=reported.unreadable_metadata(scans),
        watch_limits=reported.watch_limits(scans),
    )


def _read_in_part(slots: Sequence[Slots]) -> int:
    """How often slots were read in part alone; 0 where any was read whole."""
    return 0 if any(one.reads for one in slots) else sum(len(one.partly) for one in slots)


def _kept(engines: Sequence[Engine], saves: Saves) -> list[PairKept]:
    """The prompt tokens that were saved, layer by layer and rank by rank."""
    return [
        PairKept(engine.tag, worker.rank, layer, *map(int, tokens))
        for engine in engines
        for (worker, layer), tokens in zip(
            ((worker, layer) for worker in engine.workers for layer in worker.kv_layers),
            saves.kept.get(engine.tag, ()),
            strict=False,
        )
    ]


def _with_kv(found: Requests, engines: Sequence[Engine]) -> Requests:
    """The requests; those of a model that keeps no KV of tokens have nothing to save, look up or load."""
    without = {engine.tag for engine in engines if engine.keeps_no_kv}
    if not without:
        return found
    requests = tuple(one.without_kv() if one.engine in without else one for one in found.requests)
    return replace(found, requests=requests)


def _places(given: Mapping[int, Sequence[Given]]) -> Places:
    return Places(chain.from_iterable(given.values()))


def _written(engines: Sequence[Engine], watched: Mapping[tuple[int, str], Watched]) -> Written:
    found: dict[int, list[tuple[int, tuple[Interval, ...]]]] = defaultdict(list)
    for engine in engines:
        first = 0
        for worker in engine.workers:
            for row, writes in watched[worker.key].slots.writes.items():
                found[row] += [(touch.columns << first, touch.positions) for touch in writes]
            first += len(worker.kv_layers)
    return dict(found)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _scan(path: Path, add: Add) -> SpoolScan | str:
    """A spool, or why it cannot be read."""
    try:
        return scan(path, add)
    except SpoolError as error:
        return str(error)


def _scans(
    run_dir: Path, file: RunFile, paths: Sequence[Path], add: Add
) -> tuple[list[SpoolScan], list[str]]:
    """Every spool that can be read, and notes on those that cannot."""
    found = list(each(_scan, paths, list(map(_size, paths)), add))
    scans = [_as_it_was(one, file.spools) for one in found if isinstance(one, SpoolScan)]
    failures = [one for one in found if isinstance(one, str)]
    if scans:
        return scans, [f"spool left out: {failure}" for failure in failures]
    if failures:
        raise RunError(failures[0] + (f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""))
    raise RunError(
        f"{run_dir}: no spool in it, so no process of this run loaded the agent: "
        "trace a vLLM command with 'kvtrace run -- ...'"
    )


def _as_it_was(one: SpoolScan, sizes: Mapping[str, int]) -> SpoolScan:
    """A cut at the end of a block looks like the end: only ``run.json`` knows how long the spool was."""
    lacks = sizes.get(one.name, 0) - one.info.size
    if lacks <= 0 or one.info.end not in ("open", "cut"):
        return one
    said = f"cut: {count(lacks)} bytes shorter than when the run had ended"
    return replace(
        one, info=replace(one.info, end="cut", detail="; ".join(filter(None, (one.info.detail, said))))
    )


# ------------------------------------------------------------------------------ joining


class _Seen(NamedTuple):
    """By Worker.key what was measured and executed, by spool what became of what was read, by the engine's
    tag the blocks that were given out."""

    measured: Mapping[tuple[int, str], MeasuredCells]
    executed: Mapping[tuple[int, str], Executed]
    told: Mapping[str, Accounts]
    given: Mapping[int, Sequence[Given]]


def _seen(scans: Sequence[SpoolScan], who: Topology, requests: Sequence[Request], rest: RestFile) -> _Seen:
    executed = {(tag, one.name): ran for one in scans for tag, ran in one.executed.items()}
    told = {one.name: _accounts(one, rest) for one in scans}
    return _Seen(measure(scans, who.workers), executed, told, given_blocks(scans, requests))


def _watched(
    scans: Sequence[SpoolScan], engines: Sequence[Engine], requests: Sequence[Request], seen: _Seen
) -> dict[tuple[int, str], Watched]:
    """What each worker was seen to do with the KV cache, by Worker.key."""
    by_name = {one.name: one for one in scans}
    of_engine = by_engine(requests)
    found = {}
    for engine in engines:
        here = of_engine[engine.tag]
        for worker in engine.workers:
            scan, key = by_name[worker.spool], worker.key
            touched = touches(scan, worker)
            given = seen.given.get(engine.tag, [])
            slots = slots_of(engine, worker, touched, given, here, seen.told[scan.name])
            followed = not any(one.kind in reported.UNRECORDED for one in scan.facts_of(WatchLimitsFact))
            found[key] = Watched(
                worker, seen.measured[key], slots, seen.executed.get(key, NEVER_RAN), followed
            )
    return found


def _accounts(scan: SpoolScan, rest: RestFile) -> Accounts:
    sizes = {layer: size for one in scan.facts_of(facts.WorkerFact) for layer, size in one.slot_bytes.items()}
    return accounts(TracedSpool(scan.name, scan.names, scan.slots, scan.outside, sizes), rest)


def _unnamed(
    found: Requests, engines: Sequence[Engine], watched: Mapping[tuple[int, str], Watched]
) -> Unnamed:
    """What was read and stands in no metadata, of all engines."""
    of_engine = by_engine(found.requests)
    parts = []
    for engine in engines:
        workers = [watched[worker.key] for worker in engine.workers]
        here = of_engine[engine.tag]
        parts.append(unnamed(here, engine, workers, found.unreadable))
    return Unnamed(
        entries={row: entries for part in parts for row, entries in part.entries.items()},
        unknown=frozenset().union(*(part.unknown for part in parts)),
        watched=frozenset().union(*(part.watched for part in parts)),
        decode_stored={tag: stored for part in parts for tag, stored in part.decode_stored.items()},
    )


def _with_implied(requests: Sequence[Request], implied: Unnamed) -> list[Request]:
    """The requests, with the store entries that were measured and that no metadata names."""
    return [
        replace(
            request,
            entries=tuple(sorted((*request.entries, *implied.entries[row]), key=lambda entry: entry.step)),
        )
        if row in implied.entries
        else request
        for row, request in enumerate(requests)
    ]


def _store_steps(requests: Sequence[Request]) -> Array:
    return np.unique(np.array([e.step for request in requests for e in request.entries], dtype=np.int64))


def _all_counted(
    engines: Sequence[Engine],
    requests: Sequence[Request],
    unreadable: Steps,
    implied: Unnamed,
    coverage: CoverageTables,
) -> list[Engine]:
    of_engine = by_engine(requests)
    return [_counted(one, of_engine[one.tag].values(), unreadable, implied, coverage) for one in engines]


def _counted(
    engine: Engine, here: Collection[Request], unreadable: Steps, implied: Unnamed, coverage: CoverageTables
) -> Engine:
    """An engine with what its requests and the workers' hooks say of it."""
    entries = [(request, entry) for request in here for entry in request.entries]
    computing = {chunk.step for request in here for chunk in request.chunks}
    unread = [step for step in unreadable.sorted.tolist() if step >> STEP_SHIFT == engine.tag]
    pairs = sum(len(worker.kv_layers) for worker in engine.workers)
    layers = {layer for group in engine.facts.kv_groups for layer in group.layers}
    assumed = max(1, len(layers)) * max(1, engine.facts.tp or 1)
    return replace(
        engine,
        workers=tuple(_covered(worker, coverage.workers[worker.key]) for worker in engine.workers),
        requests=len(here),
        pairs=pairs or assumed,
        pairs_known=pairs > 0,
        store_entries=len(entries),
        implied_entries=sum(entry.implied for _, entry in entries),
        decode_entries=sum(
            min(entry.start + entry.slots, entry.available) > request.at_step(entry.step)[0]
            for request, entry in entries
        ),
        unreadable_steps=len(unread),
        unknown_steps=sum(step in computing and step not in implied.watched for step in unread),
        watched_steps=frozenset(step for step in implied.watched if step >> STEP_SHIFT == engine.tag),
        decode_measured=implied.decode_stored.get(engine.tag),
    )


def _covered(worker: Worker, coverage: WorkerCoverage) -> Worker:
    return replace(worker, hooks_seen=bool(coverage.hooks), python=coverage.python, hook_ns=coverage.hook_ns)


def _ended_badly(file: RunFile, scans: Sequence[SpoolScan]) -> Sequence[str]:
    return () if file.exit_code == 0 else in_the_open(scans)


def _notes(found: Requests, engines: Sequence[Engine]) -> list[str]:
    """What the reader of a report should know about the ledgers."""
    notes = []
    known = {engine.tag for engine in engines}
    lost = sum(request.engine not in known for request in found.requests)
    if lost:
        notes.append(f"{lost} requests never reached a scheduler that is known: they are not in the ledgers")
    for engine in engines:
        notes += _other_layers(engine)
        if engine.keeps_no_kv:
            notes.append(NO_KV)
        elif not engine.pairs_known:
            notes.append(
                "no worker of one engine reported its KV layers: "
                "its tokens are counted on assumed (layer, rank) pairs"
            )
        elif len(engine.workers) < engine.facts.ranks:
            seen = f"{len(engine.workers)} of {engine.facts.ranks} workers of one engine"
            notes.append(f"{seen} were seen: the ledgers hold those only")
    return notes


def _partly_watched(scans: Sequence[SpoolScan], requests: Sequence[Request]) -> PromptSteps | None:
    """Of workers in which not all steps were watched; None where there are none."""
    computing = np.array(sorted({chunk.step for one in requests for chunk in one.chunks}), dtype=np.int64)
    watched = steps = 0
    partly = [one for one in scans if any(it.kind == Limit.STEPS for it in one.facts_of(WatchLimitsFact))]
    for ran in (ran for one in partly for ran in one.executed.values()):
        here = np.intersect1d(ran.steps, computing)
        watched += int(np.isin(here, np.union1d(ran.watched, ran.watched_loads)).sum())
        steps += len(here)
    return PromptSteps(watched, steps) if partly else None


_KEPT = {
    "state": "a state of fixed size for each request (Mamba, linear attention) and no KV of tokens, and vLLM "
    "calls no save hook for it: in no ledger of tokens, the states have a ledger of their own",
    "encoder": "KV of the encoder's output (cross attention), none of prompt tokens: not in these ledgers",
}


def _other_layers(engine: Engine) -> Iterator[str]:
    """What is said of layers in the KV cache that keep no KV of tokens."""
    counts = Counter(engine.other_layers.values())
    for kept, said in _KEPT.items():
        if n := counts[kept]:
            yield f"{plural(n, 'layer')} {'keeps' if n == 1 else 'keep'} {said}"


def _request_table(
    requests: Sequence[Request], saves: Sequence[RequestSaves], clients: Mapping[str, str]
) -> list[RunRequest]:
    found = []
    for r, of in zip(requests, saves, strict=True):
        lookup, finish = r.looked_up, r.finish
        found.append(
            RunRequest(
                r.id, clients.get(r.id, ""), r.engine, r.prompt, r.computed,
                finish.output if finish else max(0, r.computed - r.prompt),
                of.local, of.external, -1 if lookup is None else max(0, lookup.answer or 0),
                len(r.chunks), tuple(c.end - c.start for c in r.chunks[:_CHUNKS_SHOWN]),
                r.first_step, r.last_step, r.block, finish.status if finish else "",
                finish.t if finish else 0, r.digest, r.prefix, r.preemptions, r.t_first,
                r.chunks[0].step if r.chunks else 0, of.saved, of.unsaved, of.diverged, r.preempt_step,
                r.arrived, r.grown[0].step if r.grown else 0,
            )
        )  # fmt: skip
    return found
