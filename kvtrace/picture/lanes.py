"""Requests in time: when each came, what was computed, loaded and saved of it, and when it was over."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from kvtrace.ledger.run import Run, Span
from kvtrace.picture import kinds
from kvtrace.picture.picture import Bar, CellKind, Lane, Mark
from kvtrace.trace import rows
from kvtrace.trace.format import NONE_ANSWER, STEP_MASK, Flag
from kvtrace.words import count

MOST_LANES = 120
MOST_BARS = 48
MOST_MARKS = 40
Step = tuple[float, float]
"""When it began and ended, in ms."""


@dataclass
class Timed:
    """A record of a request: its time in ms, and where it stands in its process."""

    t: float
    row: Any
    id: str
    status: str = ""


def _share(outcome: Counter[CellKind]) -> float:
    """How much of it was saved."""
    saved = sum(n for kind, n in outcome.items() if kind.state in kinds.SAVED_STATES)
    return round(saved / max(1, outcome.total()), 4)


def _bars(
    records: Iterable[Timed],
    outcomes: Mapping[int, Counter[CellKind]],
    steps: Mapping[int, Step],
) -> list[Bar]:
    """The prefill chunks of a request, also those of which the ledger counts no token there."""
    found = []
    for one in records:
        if isinstance(one.row, rows.Chunk) and one.row.step in steps:
            step, outcome = one.row.step, outcomes.get(one.row.step, Counter())
            kind = reduce(kinds.worse, outcome) if outcome else kinds.AGAIN
            where = (*steps[step], step & STEP_MASK, one.row.start, one.row.start + one.row.tokens)
            found.append(Bar(*where, kinds.NUMBER[kind], _share(outcome)))
    return found


def chosen(run: Run) -> list[int]:
    """The rows of the requests that get a lane: half the places for those that lost most."""
    every = range(len(run.requests))
    if len(every) <= MOST_LANES:
        return list(every)
    worst = sorted(every, key=lambda row: (-run.requests[row].unsaved, -row))[: MOST_LANES // 2]
    rest = [row for row in every if row not in set(worst)]
    return sorted([*worst, *rest[: MOST_LANES - len(worst)]])


def lanes(run: Run, records: Iterable[Timed], spans: Sequence[Span], steps: Mapping[int, Step]) -> list[Lane]:
    """One lane a chosen request, in order of arrival.

    Args:
        records: of the chosen requests, in order of time.
        steps: with the engine's tag.
    """
    of_id: dict[str, list[Timed]] = defaultdict(list)
    for one in records:
        of_id[one.id].append(one)
    outcomes = _step_outcomes(spans)
    found = []
    for row in chosen(run):
        request = run.requests[row]
        bars = _bars(of_id.get(request.id, ()), outcomes.get(row, {}), steps)
        marks = _marks(of_id.get(request.id, ()))
        times = [*(bar.t0 for bar in bars), *(mark.t for mark in marks)]
        if not times:
            continue
        ended = [mark.t for mark in marks if mark.what == "finish"]
        bars.sort(key=lambda bar: bar.t0)
        found.append(
            Lane(
                id=request.id, prompt=request.prompt, begin=min(times),
                end=max(ended) if ended else None, bars=bars[:MOST_BARS], marks=_few(marks),
                more=max(0, len(bars) - MOST_BARS) + max(0, len(marks) - MOST_MARKS),
            )
        )  # fmt: skip
    return sorted(found, key=lambda lane: lane.begin)


def _few(marks: list[Mark]) -> list[Mark]:
    return marks if len(marks) <= MOST_MARKS else [*marks[: MOST_MARKS - 1], marks[-1]]


def _step_outcomes(spans: Sequence[Span]) -> dict[int, dict[int, Counter[CellKind]]]:
    """Row of a request -> step -> what became of its tokens: token-layers by kind."""
    found: dict[int, dict[int, Counter[CellKind]]] = defaultdict(lambda: defaultdict(Counter))
    for span in spans:
        if span.step > 0:
            kind = kinds.of_outcome(span.outcome)
            found[span.request][span.step][kind] += (span.end - span.start) * len(span.pairs)
    return found


def _marks(records: Iterable[Timed]) -> list[Mark]:
    found = []
    for one in records:
        said = _SAYS[type(one.row)](one) if type(one.row) in _SAYS else None
        if said:
            found.append(Mark(one.t, *said))
    return found


_Said = tuple[str, str] | None


_PLAIN: Mapping[type[Any], tuple[str, str, str]] = {
    rows.Arrival: ("arrival", "prompt", "arrives, {} prompt tokens"),
    rows.Growth: ("grown", "prompt", "the next part comes, {} prompt tokens now"),
    rows.Preemption: ("preempted", "computed", "preempted, {} tokens lost"),
}
"""What a mark is called that tells one number of its record, the field, and the words for it."""


def _plain(one: Timed) -> _Said:
    what, field, words = _PLAIN[type(one.row)]
    return what, words.format(count(getattr(one.row, field)))


def _allocation(one: Timed) -> _Said:
    taken = one.row.external
    return ("load", f"{count(taken)} tokens are to be loaded") if taken > 0 else None


def _lookup(one: Timed) -> _Said:
    answer = one.row.external
    if answer == NONE_ANSWER:
        return "lookup", "the connector asks for patience"
    return ("lookup", f"the connector offers {count(answer)} tokens") if answer > 0 else None


def _entry(one: Timed) -> _Said:
    if not rows.flags(one.row.head) & Flag.STORE:
        return None
    return "save", f"the metadata names {count(one.row.slots)} slots to store" if one.row.slots >= 0 else (
        "the metadata names a store"
    )


def _done(one: Timed) -> _Said:
    saved = rows.flags(one.row.head) & Flag.STORE
    what = "save" if saved else "load"
    return f"{what}-done", f"the {what} is reported " + ("failed" if one.row.failed > 0 else "finished")


def _finish(one: Timed) -> _Said:
    return "finish", f"ends, {count(one.row.output)} tokens generated" + (
        f" ({one.status})" if one.status else ""
    )


_SAYS: dict[type[Any], Callable[[Timed], _Said]] = {
    **dict.fromkeys(_PLAIN, _plain),
    rows.Lookup: _lookup,
    rows.Allocation: _allocation,
    rows.MetadataEntry: _entry,
    rows.TransferDone: _done,
    rows.Finish: _finish,
}
KINDS = frozenset(rows.KIND_OF[row] for row in (*_SAYS, rows.Chunk))
