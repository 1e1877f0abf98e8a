"""Whether kvtrace reads a connector's metadata right: what it wrote down, against what was put there.

One answer for each build_connector_meta, request and direction that either side speaks of: ``exact``,
``unreadable`` (kvtrace says that it does not understand this step, or this entry), ``wrong`` (it says
something else), ``missed`` (it says that there is nothing).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtrace.trace import hooks, rows
from kvtrace.trace.facts import UnreadableMetadataFact
from kvtrace.trace.format import Flag, Kind
from kvtrace.trace.reader import Spool, of_type, spool_paths

ANSWERS = ("exact", "unreadable", "wrong", "missed")
WAYS = {"put": int(Flag.STORE), "get": int(Flag.LOAD)}
Interval = tuple[int, int]


@dataclass
class Build:
    """One call of build_connector_meta: when, and what kvtrace read. Intervals of tokens, None: open."""

    t0: int
    t1: int
    step: int
    unreadable: bool
    said: dict[tuple[str, str], list[Interval | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    answer: str
    way: str
    request: str
    declared: tuple[Interval, ...]
    said: tuple[Interval | None, ...]


def builds(trace: Path) -> tuple[list[Build], list[UnreadableMetadataFact]]:
    """The calls of a run, in order, and what was not understood in it."""
    found: list[Build] = []
    entries: list[tuple[rows.MetadataEntry, str]] = []
    problems: list[UnreadableMetadataFact] = []
    for path in spool_paths(trace):
        spool = Spool(path)
        for chunk in spool.chunks():
            kinds, codes = rows.kind(chunk[:, 0]), rows.code(chunk[:, 0])
            for row in chunk[kinds == Kind.META].tolist():
                entry = rows.MetadataEntry(*row)
                entries.append((entry, spool.names.get(entry.request, "")))
            for row in chunk[(kinds == Kind.HOOK) & (codes == hooks.BUILD_METADATA.code)].tolist():
                call = rows.HookCall(*row)
                unreadable = bool(rows.flags(call.head) & Flag.UNREADABLE)
                found.append(Build(call.t0, call.t1, call.step, unreadable))
        problems.extend(fact for _, fact in of_type(UnreadableMetadataFact, spool.documents()))
    # of connectors inside a connector the outer one's call is the longest
    by_step = {build.step: build for build in sorted(found, key=lambda build: build.t1 - build.t0)}
    for entry, request in entries:
        size = entry.slots if entry.slots >= 0 else entry.tokens
        part = (entry.start, entry.start + size) if size >= 0 and (entry.start >= 0 or not size) else None
        for way, flag in WAYS.items():
            if rows.flags(entry.head) & flag and entry.step in by_step:
                by_step[entry.step].said.setdefault((way, request), []).append(part)
    return sorted(by_step.values(), key=lambda build: build.t0), problems


def answers(
    declared: dict[str, Any], trace: Path, computed: dict[str, int] | None = None
) -> Iterator[Answer]:
    """``declared``: of the run's outcome.json."""
    found, problems = builds(trace)
    loads = any(problem.load for problem in problems)
    of: list[dict[tuple[str, str], list[Interval]]] = [{} for _ in found]
    for t, way, request, lo, hi in declared["rows"]:
        # the nearest call: the clocks of a virtual machine's two processors were seen 4 ms apart
        near = [(max(build.t0 - t, t - build.t1, 0), at) for at, build in enumerate(found)]
        if near:
            of[min(near)[1]].setdefault((way, request), []).append((lo, hi))
    for build, truth in zip(found, of, strict=True):
        for way, request in dict.fromkeys([*truth, *build.said]):
            meant, said = truth.get((way, request), []), build.said.get((way, request), [])
            open_ = build.unreadable or None in said or (way == "get" and loads and not said)
            answer = "unreadable"
            if not open_:
                # Metadata may name the slots of whole blocks: those beyond the request's tokens are none.
                there = range(computed[request]) if computed and request in computed else None
                named = tokens(part for part in said if part is not None)
                same = tokens(meant) == (named if there is None else named.intersection(there))
                answer = "exact" if same else "wrong" if said else "missed"
            yield Answer(answer, way, request, tuple(meant), tuple(said))


def tokens(parts: Iterable[Interval]) -> set[int]:
    return {at for lo, hi in parts for at in range(lo, hi)}


def count(folder: Path) -> tuple[str, Counter[str], list[Answer]]:
    """Of one kept run: its shape, how many of which answer, and those that are no right reading.

    What a connector's worker works out for itself (``deltas``) is in no metadata: all that is said of such
    stores is wrong.
    """
    outcome = json.loads((folder / "outcome.json").read_text(encoding="utf-8"))
    computed = {one["id"]: one["computed"] for one in outcome["truth"]["requests"]}
    found = list(answers(outcome["declared"], folder / "trace", computed))
    shape = outcome["declared"]["shape"]
    return shape, Counter(one.answer for one in found), [one for one in found if one.answer != "exact"]
