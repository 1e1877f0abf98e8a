"""Merges runs: reads them one after the other, joins their requests, and says what came of each.

Two passes: the requests' ids of all runs, then the books of each run by itself, so that one run at a time is
in memory, and of each request a few numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvtrace import causes, ledger
from kvtrace.errors import KvtraceError
from kvtrace.ledger.run import Run
from kvtrace.merge.asked import EngineRequest, RunIds, read_ids
from kvtrace.merge.clocks import Clocks, clocks
from kvtrace.merge.compare import added, numbers
from kvtrace.merge.hosts import EngineRuns, groups, put_together
from kvtrace.merge.join import JoinResult, join
from kvtrace.merge.merged import SCHEMA, Alone, EngineOf, Joined, Merged, RunOf, Sums
from kvtrace.merge.merged import End as EndOf
from kvtrace.merge.sides import EngineSide, sides
from kvtrace.report.running import still_running
from kvtrace.story.locate import traced_directory
from kvtrace.terms import SAVED
from kvtrace.words import duration, listed, plural


@dataclass
class MergedRuns:
    """A merge: its head, and its requests in order of arrival."""

    merged: Merged
    requests: list[Joined | Alone] = field(default_factory=list)


def merge(paths: Sequence[str], error_ns: int, place: Path) -> MergedRuns:
    """The runs at `paths`, joined; paths in the answer are as given.

    Args:
        error_ns: by how much wall clocks of two hosts may be off.
        place: an empty directory. Runs that hold parts of one engine are put together there.

    Raises:
        KvtraceError: no runs, one of them twice, or one that cannot be read.
    """
    folders = _folders(paths)
    found = [read_ids(number, folder) for number, folder in enumerate(folders)]
    _none_twice(folders, found)
    grouped = groups(found)
    notes: list[str] = []
    if grouped:
        folders, notes = _grouped(grouped, folders, found, place)
        found = [read_ids(number, folder) for number, folder in enumerate(folders)]
    placed = clocks(
        (
            (number, spool, header)
            for number, ids in enumerate(found)
            for spool, header in ids.headers.items()
        ),
        error_ns,
    )
    engines = _engines(found, placed)
    if len(engines) < 2 and not grouped:
        where, what = ", ".join(map(str, folders)), "merge needs the runs of two engines or more"
        raise KvtraceError(f"{plural(len(engines), 'engine')} in all of this", where, what)
    requests = [one for ids in found for one in ids.requests]
    at = {(one.run, one.tag): number for number, one in enumerate(engines)}
    for one in requests:
        one.engine = at.get((one.run, one.tag), -1)
    answer = _told(folders, found, engines, placed, requests, join(requests, engines, placed))
    return replace(answer, merged=replace(answer.merged, notes=(*notes, *answer.merged.notes)))


def _grouped(
    grouped: Sequence[EngineRuns], folders: Sequence[Path], found: Sequence[RunIds], place: Path
) -> tuple[list[Path], list[str]]:
    """The runs, those that hold parts of one engine as one, in its first one's place; and notes on these."""
    instead: dict[int, Path | None] = {}
    notes = []
    for number, group in enumerate(grouped, 1):
        together = put_together(group, folders, found, place / f"joined-{number}")
        instead |= {**dict.fromkeys(group.runs, None), group.runs[0]: together}
        names = [folders[run].resolve().name for run in group.runs]
        moved = [
            f"times of {name} were moved by {duration(abs(shift) / 1e9)}"
            for name, shift in zip(names, group.shifts, strict=True)
            if shift
        ]
        how = f"; {', '.join(moved)}, by the engine's steps" if moved else ""
        notes.append(f"{listed(names)} hold parts of one engine and are {together.name}{how}")
    kept = [instead.get(run, folder) for run, folder in enumerate(folders)]
    return [folder for folder in kept if folder is not None], notes


def _folders(paths: Sequence[str]) -> list[Path]:
    if not paths:
        raise KvtraceError("no run to merge", "give the run directories of two engines or more")
    folders = []
    for path in paths:
        folder = traced_directory(path)
        if folder is None:
            there = Path(path).exists()
            what = "no spools in it" if there else "no such run directory"
            raise KvtraceError(what, ascii(path)[1:-1], "give run directories of kvtrace run")
        folders.append(folder)
    return folders


def _none_twice(folders: Sequence[Path], found: Sequence[RunIds]) -> None:
    """Processes tell: a run that was copied, or given by two paths, is the same run."""
    owner: dict[tuple[str, int, int, int], int] = {}
    for number, ids in enumerate(found):
        for header in ids.headers.values():
            who = (header.host, header.pid, header.wall_ns, header.perf_ns)
            before = owner.setdefault(who, number)
            if header.wall_ns and before != number:
                raise KvtraceError("the same run twice", f"{folders[before]} and {folders[number]}")


def _engines(found: Sequence[RunIds], placed: Clocks) -> list[EngineOf]:
    engines = []
    for run, ids in enumerate(found):
        for tag, (spool, fact) in ids.engines.items():
            transfer = fact.kv_transfer
            engines.append(
                EngineOf(
                    run=run, tag=tag, clock=placed.of[run, spool],
                    id=(transfer.engine_id or "") if transfer else "",
                    role=(transfer.role or "") if transfer else "",
                )
            )  # fmt: skip
    return engines


# ------------------------------------------------------------------------- what came of them


def _told(
    folders: Sequence[Path], found: Sequence[RunIds], engines: Sequence[EngineOf], placed: Clocks,
    requests: Sequence[EngineRequest], result: JoinResult,
) -> MergedRuns:  # fmt: skip
    ends = {end for one in result.found for end in (one.there, one.here)}
    runs, numbered, of_request = [], list(engines), {}
    for number, (folder, ids) in enumerate(zip(folders, found, strict=True)):
        mine = {at: requests[at] for at in ends if requests[at].run == number}
        book = ledger.read_run(folder, watch=sorted({one.id for one in mine.values()}))
        runs.append(_run(folder, book, ids, len(ids.requests)))
        numbered = [_with_numbers(one, book) if one.run == number else one for one in numbered]
        of_request.update(_sides(book, mine))
    # where something came before its cause, the clocks are off by that at least
    placed = replace(placed, error_ns=max([placed.error_ns, *result.skews.values()]))
    rows = sorted(_rows(requests, result, placed, numbered, of_request), key=lambda row: row.ends[0].at_ns)
    sums = Sums()
    for row in rows:
        sums = added(sums, row) if isinstance(row, Joined) else sums
    merged = Merged(
        schema=SCHEMA,
        uncertainty_ns=placed.error_ns,
        runs=tuple(runs),
        engines=tuple(numbered),
        clocks=placed.all,
        joins=dict(Counter(row.how for row in rows if isinstance(row, Joined))),
        alone=dict(Counter(row.why for row in rows if isinstance(row, Alone)).most_common()),
        sums=sums,
        notes=tuple(_notes(placed, result, numbered, runs)),
    )
    return MergedRuns(merged, rows)


def _run(folder: Path, book: Run, ids: RunIds, requests: int) -> RunOf:
    headers = ids.headers.values()
    return RunOf(
        path=str(folder),
        name=folder.resolve().name,
        hosts=tuple(dict.fromkeys(one.host for one in headers if one.host)),
        kvtrace=tuple(sorted({one.kvtrace for one in headers if one.kvtrace})),
        running=still_running(book),
        requests=requests,
        verdict=causes.diagnose(book).verdict,
        notes=tuple(dict.fromkeys((*ids.notes, *book.incomplete))),
    )


def _with_numbers(one: EngineOf, book: Run) -> EngineOf:
    engine = next((each for each in book.engines if each.tag == one.tag), None)
    if engine is None:
        return one
    mine = [request for request in book.requests if request.engine == one.tag]
    saved = [row for row in book.base if row.engine == one.tag and row.outcome == SAVED]
    return replace(
        one,
        ranks=tuple(worker.rank for worker in engine.workers),
        missing=max(0, engine.facts.ranks - len(engine.workers)) if engine.facts.known else 0,
        requests=len(mine),
        prompt=sum(request.prompt for request in mine),
        reused=sum(request.local for request in mine),
        accepted=sum(request.external for request in mine),
        saved=sum(row.amount for row in saved) / max(1, engine.pairs),
        grade=min(row.grade for row in saved).label if saved else "",
    )


def _sides(book: Run, mine: dict[int, EngineRequest]) -> dict[int, EngineSide]:
    """Index of a request of this run -> where its tokens ended up."""
    of_row, rows = sides(book), {}
    uses: Counter[tuple[int, str]] = Counter()
    for row, one in enumerate(book.requests):
        rows[one.engine, one.id, uses[one.engine, one.id]] = row
        uses[one.engine, one.id] += 1
    known = ((at, rows.get((one.tag, one.id, one.number), -1)) for at, one in mine.items())
    return {at: of_row[row] for at, row in known if row in of_row}


def _rows(
    requests: Sequence[EngineRequest], result: JoinResult, placed: Clocks, engines: Sequence[EngineOf],
    of_request: dict[int, EngineSide],
) -> Iterator[Joined | Alone]:  # fmt: skip
    ends = [_end(one, placed, engines) for one in requests]
    nothing = EngineSide(0, ())
    for one in result.found:
        there, here = ends[one.there], ends[one.here]
        counts = numbers(of_request.get(one.there, nothing), of_request.get(one.here, nothing))
        after = here.at_ns - there.at_ns
        off = placed.off_by(engines[there.engine].clock, engines[here.engine].clock)
        yield Joined(
            there=there, here=here, how=one.how, key=one.key, value=one.value, after_ns=after,
            sure=abs(after) > off or off == 0, **counts,
        )  # fmt: skip
    for at, why in result.why.items():
        yield Alone(ends[at], why)


def _end(one: EngineRequest, placed: Clocks, engines: Sequence[EngineOf]) -> EndOf:
    clock = engines[one.engine].clock if one.engine >= 0 else placed.of[one.run, one.spool]
    at_ns = placed.wall(clock, one.t)
    return EndOf(one.engine, one.id, one.client, one.number, one.prompt, at_ns)


# ------------------------------------------------------------------------------ what to know


def _notes(
    placed: Clocks, result: JoinResult, engines: Sequence[EngineOf], runs: Sequence[RunOf]
) -> Iterator[str]:
    for (one, two), early in sorted(result.skews.items()):
        names = " and ".join(", ".join(placed.all[at].hosts) or "a host" for at in (one, two))
        yield (
            f"the wall clocks of {names} differ by {early / 1e6:.1f} ms or more: a request came before "
            "the ids that it brought had been returned"
        )
    if any(not one.boot for one in placed.all) and len(placed.all) > 1:
        yield "a run does not say which boot its clock counts from: it is placed by its wall clock alone"
    for run in runs:
        if run.running:
            yield f"{run.name} is still running: it is told as far as it goes; merge again when it has ended"
        if not run.requests:
            yield f"{run.name}: no request reached a scheduler"
    kvtraces = sorted({version for run in runs for version in run.kvtrace})
    if len(kvtraces) > 1:
        yield f"the runs were recorded by different versions of kvtrace: {', '.join(kvtraces)}"
    for engine in engines:
        if engine.missing:
            ranks = plural(engine.missing, "rank")
            yield f"{runs[engine.run].name}: {ranks} of an engine left no trace in this run"
