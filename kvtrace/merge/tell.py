"""A merged run's requests: all of them, and the story of one across its engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtrace.errors import KvtraceError
from kvtrace.merge.merged import Alone, End, Joined, Merged
from kvtrace.merge.place import load, requests
from kvtrace.story.find import shown
from kvtrace.story.locate import traced_directory
from kvtrace.story.story import Story
from kvtrace.story.tell import tell as tell_one
from kvtrace.words import listed

MOST_TOLD = 4
"""Engines of one request that are told: one that computes, and those that load from it."""


@dataclass
class List:
    """The requests of a merge; ``rows`` sorted and cut, ``fit`` before the cut."""

    merged: Merged
    rows: list[Joined | Alone] = field(default_factory=list)
    fit: int = 0
    ids: dict[int, list[str]] = field(default_factory=dict)  # of all, listed or not, by engine

    def document(self) -> dict[str, Any]:
        """As JSON: ``kvtrace.merged-requests/1``."""
        rows = [row.to_json() for row in self.rows]
        return {"schema": "kvtrace.merged-requests/1", "fit": self.fit, "rows": rows}


@dataclass
class Tale:
    """One request across engines. ``joins``: all of them that it takes part in; ``stories``: one for each of
    ``ends``, None where it cannot be told, with the reason in ``notes``."""

    merged: Merged
    joins: list[Joined]
    alone: Alone | None
    ends: list[End]
    stories: list[Story | None]
    notes: list[str] = field(default_factory=list)
    left_out: int = 0

    def document(self) -> dict[str, Any]:
        """As JSON: ``kvtrace.merged-story/1``."""
        return {
            "schema": "kvtrace.merged-story/1",
            "joins": [one.to_json() for one in self.joins],
            "alone": self.alone.to_json() if self.alone else None,
            "ends": [one.to_json() for one in self.ends],
            "stories": [one.document() if one else None for one in self.stories],
            "notes": self.notes,
        }


def _worst(row: Joined | Alone) -> tuple[int, int]:
    """Computed again most, first; then what is not joined."""
    return (-(row.again - row.last), -row.lost) if isinstance(row, Joined) else (1, 0)


SORTS: dict[str, Callable[[Joined | Alone], Any]] = {
    "worst": _worst,
    "best": lambda row: tuple(-part for part in _worst(row)),
    "prompt": lambda row: -max(end.prompt for end in row.ends),
    "arrival": lambda row: min(end.at_ns for end in row.ends),
    "id": lambda row: row.ends[0].id,
}


def listing(folder: Path, verdict: str | None, sort: str, limit: int | None) -> List:
    """The requests of a merged directory.

    Args:
        verdict: must be None: a request has one in each run.
        sort: one of SORTS.

    Raises:
        KvtraceError: it cannot be read.
    """
    merged = load(folder)
    if verdict is not None:
        raise KvtraceError("--verdict is of one run", "merged requests have one in each", "list a run's own")
    rows = sorted(requests(folder, len(merged.engines)), key=SORTS[sort])
    ids: dict[int, list[str]] = {}
    for row in rows:
        for end in row.ends:
            ids.setdefault(end.engine, []).append(end.id)
    return List(merged, rows if limit is None else rows[:limit], len(rows), ids)


def tell(folder: Path, wanted: str, layer: str | None = None, token: int | None = None) -> Tale:
    """One request of a merged directory, in each engine that knew it.

    Args:
        wanted: an id of client or engine, or its unique beginning; ``N:ID`` is one of run N (from 1),
            ``ID#2`` the second one of an id that was used again.

    Raises:
        KvtraceError: no such request, or several that are not joined with each other.
    """
    merged = load(folder)
    rows = list(requests(folder, len(merged.engines)))
    by_end: dict[End, list[Joined]] = {}
    for row in rows:
        for end in row.ends:
            by_end.setdefault(end, []).extend([row] if isinstance(row, Joined) else [])
    fits = _fitting(merged, list(by_end), wanted)
    ends, joins = _together(fits[0], by_end)
    if not ends.issuperset(fits):
        numbers = listed((merged.named(end) for end in fits), MOST_TOLD)
        several = f"{shown(wanted)} fits {len(fits)} requests that are not joined with each other"
        raise KvtraceError(several, f"give one of {numbers}")
    alone = next((row for row in rows if isinstance(row, Alone) and row.alone in ends), None)
    there = {one.there for one in joins}
    ordered = sorted(ends, key=lambda end: (end not in there, end.at_ns))
    told = Tale(merged, joins, alone, ordered[:MOST_TOLD], [], left_out=max(0, len(ordered) - MOST_TOLD))
    for end in told.ends:
        told.stories.append(_story(merged, end, layer, token, told.notes))
    return told


def _fitting(merged: Merged, ends: Sequence[End], wanted: str) -> list[End]:
    """The requests that an id means: exactly, else by its beginning.

    Raises:
        KvtraceError: it means none.
    """
    for fits in (
        [end for end in ends if wanted in (end.id, end.client, f"{end.id}#{end.number + 1}")],
        [end for end in ends if wanted == merged.named(end)],
        [end for end in ends if end.id.startswith(wanted) or end.client.startswith(wanted)],
        [end for end in ends if merged.named(end).startswith(wanted)],
    ):
        if wanted and fits:
            return fits
    hint = "kvtrace requests lists them" if ends else "no request reached a scheduler in these runs"
    raise KvtraceError("no such request", shown(wanted), hint)


def _together(first: End, by_end: Mapping[End, Sequence[Joined]]) -> tuple[set[End], list[Joined]]:
    """All requests that are joined with one, over others too, and their joins in order."""
    found, waiting = {first}, list(by_end[first])
    joins = list(waiting)
    while waiting:
        for end in waiting.pop().ends:
            if end not in found:
                found.add(end)
                waiting += by_end[end]
                joins += [one for one in by_end[end] if one not in joins]
    return found, sorted(joins, key=lambda one: (one.there.at_ns, one.here.at_ns))


def _story(merged: Merged, end: End, layer: str | None, token: int | None, notes: list[str]) -> Story | None:
    run = merged.runs[merged.engines[end.engine].run] if end.engine >= 0 else None
    if run is None:
        notes.append(f"{end.id}: no scheduler is known that had it")
        return None
    folder = traced_directory(run.path)
    if folder is None:
        notes.append(f"{run.name}: the run is not at {run.path} any more, its part is not told")
        return None
    try:
        return tell_one(folder, f"{end.id}#{end.number + 1}", layer, token)
    except KvtraceError as error:
        notes.append(f"{run.name}: {error}")
        return None
