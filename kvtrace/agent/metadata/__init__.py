"""What a connector's metadata declares: read by identity, for any connector.

``build_connector_meta`` returns an object that only its connector understands. What it names is found by its
values: integers that are a request's blocks, slots or token ids are these, whatever they are called; names
say the direction and tell readings of the same numbers apart. What may name KV and is not understood
makes the step unreadable (``readable`` false), with its class and field: it must never look like "nothing
to store".

The way: :mod:`.walk` goes through the object (:mod:`.shapes` reads its fields without calling anything of its
own; :mod:`.stock` has the words of well-known ones), :mod:`.entries` finds request, direction and positions
(:mod:`.identify`, :mod:`.numbers`) from what the scheduler knows (:mod:`.step_requests`).

Sources: ``distributed/kv_transfer/kv_connector/v1/*`` of vLLM from 0.8.5 on, LMCache's adapters.

Comes in: a connector's metadata, the step's requests.
Goes out: META records: request, direction, positions; or that the step could not be read.
May not: call anything of the object's own, or change it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import pairwise
from operator import attrgetter
from typing import Any

from kvtrace.agent.metadata.entries import DeclaredEntry, Resolver
from kvtrace.agent.metadata.step_requests import Admissions, StepRequests, read_tables
from kvtrace.agent.metadata.walk import Context, Problem, Walk
from kvtrace.trace.format import UNKNOWN, Flag

__all__ = [
    "Admissions", "Declared", "DeclaredEntry", "Problem", "StepRequests", "Totals", "is_empty", "read",
    "read_tables", "totals",
]  # fmt: skip

_SAY_NOTHING = (bool, float, type(None))
"""Kinds of values that name no KV, whatever their field is called."""
_CONTAINERS = (list, tuple, set, frozenset, dict)
_MAX_CLASSES = 64
_MAX_ENTRIES = 4096


@dataclass
class Totals:
    """A step's metadata in numbers."""

    readable: bool = True
    store_slots: int = 0
    store_entries: int = 0
    load_slots: int = 0
    load_entries: int = 0
    undirected: int = 0
    """Entries that say neither store nor load."""

    def totals(self) -> tuple[bool | int, ...]:
        """The fields, in order: what workers are sent."""
        return _IN_ORDER(self)


_IN_ORDER: Callable[[Totals], tuple[bool | int, ...]] = attrgetter(*(one.name for one in fields(Totals)))


@dataclass
class Declared(Totals):
    """``problems``: what may name KV and is not understood."""

    entries: list[DeclaredEntry] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def is_empty(meta: Any) -> bool:
    """Whether a step's metadata holds containers, all empty, and nothing beside them that may name KV.

    What :func:`read` would find out as well, by a longer way: most steps are decode steps.
    """
    cls = meta.__class__
    plain = _plain.get(cls)
    if plain is None:
        if len(_plain) > _MAX_CLASSES:
            _plain.clear()
        slots = any(base.__dict__.get("__slots__") for base in cls.__mro__)
        plain = _plain[cls] = hasattr(meta, "__dict__") and not slots and not isinstance(meta, (dict, tuple))
    if not plain:
        return False
    found = False
    for value in meta.__dict__.values():
        kind = value.__class__
        if kind in _CONTAINERS:
            if value:
                return False
            found = True
        elif kind not in _SAY_NOTHING and not (kind in (bytes, str) and not value):
            return False
    return found


_plain: dict[type, bool] = {}
"""Classes of metadata: whether all that an instance holds stands in its ``__dict__``."""


def totals(meta: Any) -> Declared:
    """What is known without knowing the requests of the step (worker side)."""
    return read(meta, StepRequests(None, None))


Answer = tuple[list[DeclaredEntry], list[Problem]]
"""What an adapter made of a metadata object (:mod:`.adapters`)."""


def read(
    meta: Any,
    requests: StepRequests,
    answer: Answer | None = None,
    answered: dict[int, tuple[Any, Answer]] | None = None,
) -> Declared:
    """Entries with request and positions, and what is not understood. Never raises, changes nothing.

    Args:
        answer: of the connector's adapter, in place of reading.
        answered: of the adapters of connectors inside this one, with their metadata, by its ``id``.
    """
    declared = Declared()
    if meta is None:
        return declared
    if answer is not None:
        declared.entries, declared.problems = answer
        _sum(declared, bool(requests))
        return declared
    walk = Walk(requests, {} if answered is None else answered)
    resolver = Resolver(requests)
    try:
        walk.metadata(meta, Context())
        declared.entries.extend(walk.answers)
        for part in walk.parts:
            declared.entries.extend(resolver.entries(part))
        declared.entries = _once(declared.entries)
        walk.problems.extend(_contradictions(declared.entries))
        _match_by_order(declared.entries, requests.new_reqs)
    except Exception as error:  # whatever a foreign object does: this step is not understood
        walk.problem("", f"reading it raised {type(error).__name__}")
    declared.problems = [*walk.problems, *resolver.problems]
    if walk.unsure and not declared.entries and not declared.problems:
        declared.problems.append(walk.unsure)
    _sum(declared, bool(requests))
    return declared


def _once(entries: list[DeclaredEntry]) -> list[DeclaredEntry]:
    """The same entry twice is one, and what follows on in the same list is one entry."""
    found: list[DeclaredEntry] = []
    seen: set[tuple[object, ...]] = set()
    for one in entries:
        if one.req_id is not None and one.slots > 0 and one.start >= 0:
            key = (one.req_id, one.direction, one.slots, one.start, one.child)
            if key in seen:
                continue
            seen.add(key)
            last = found[-1] if found else one
            follows = last is not one and last.field == one.field and last.start >= 0 and last.slots > 0
            same = (last.req_id, last.direction, last.child) == (one.req_id, one.direction, one.child)
            if (
                follows
                and same
                and last.start + last.slots == one.start
                and last.tokens == one.tokens == UNKNOWN
            ):
                last.slots += one.slots
                continue
        found.append(one)
    return found


def _contradictions(entries: list[DeclaredEntry]) -> list[Problem]:
    """Entries of a request and a direction that overlap, and are not the same: which is meant is open."""
    found: list[Problem] = []
    by_request: dict[tuple[object, ...], list[DeclaredEntry]] = {}
    for one in entries:
        if one.req_id is not None and one.direction and one.slots > 0 and one.start >= 0:
            by_request.setdefault((one.req_id, one.direction, one.child), []).append(one)
    for same in by_request.values():
        same.sort(key=lambda one: one.start)
        for one, other in pairwise(same):
            if other.start < one.start + one.slots:
                found.append(Problem(other.field, "KV that another entry names in part"))
                one.slots = one.tokens = other.slots = other.tokens = one.start = other.start = UNKNOWN
    return found


def _sum(declared: Declared, placed: bool) -> None:
    if len(declared.entries) > _MAX_ENTRIES:
        declared.problems.append(Problem("", "too many entries"))
        del declared.entries[_MAX_ENTRIES:]
    for entry in declared.entries:
        size = max(0, entry.slots, entry.tokens if entry.slots < 0 else 0)
        if entry.direction & Flag.STORE:
            declared.store_entries += 1
            declared.store_slots += size
        if entry.direction & Flag.LOAD:
            declared.load_entries += 1
            declared.load_slots += size
        declared.undirected += not entry.direction
        if placed and entry.direction and not declared.problems:
            sized = entry.slots >= 0 or entry.tokens >= 0
            if not sized or (entry.req_id is None and size):
                what = "an entry of no request" if sized else "an entry without a size"
                declared.problems.append(Problem(entry.field, what, not entry.direction & Flag.STORE))
    declared.readable = all(problem.load for problem in declared.problems)


def _match_by_order(entries: list[DeclaredEntry], new_reqs: list[str]) -> None:
    """Entries without id or slots follow the order of the new requests (as vLLM's own
    connectors build them). Only where the gap between two known neighbours leaves exactly
    as many requests as entries is there no doubt."""
    if not any(entry.req_id is None for entry in entries):
        return
    position = {req: at for at, req in enumerate(new_reqs)}
    run: list[DeclaredEntry] = []
    last = -1
    for entry in [*entries, DeclaredEntry(req_id="")]:
        if entry.req_id is None:
            run.append(entry)
            continue
        at = len(new_reqs) if entry.req_id == "" else position.get(entry.req_id, -1)
        if at < 0:
            continue
        gap = new_reqs[last + 1 : at]
        if run and len(gap) == len(run):
            for lost, req in zip(run, gap, strict=True):
                lost.req_id = req
        run, last = [], at
