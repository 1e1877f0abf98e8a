"""Metadata of any shape, under names that say nothing: read as it was meant, or said not to be understood.

A plan says what a step stores and loads. It is written down in a shape drawn at random, with things beside
it that mean nothing. Whatever is read must be in the plan; where the step is said to be understood, it is all
of it.
"""

from __future__ import annotations

from collections import defaultdict, namedtuple
from dataclasses import dataclass, make_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtrace.agent.metadata import Declared, read
from kvtrace.trace.format import Flag

from .holding import Meta, Req, freeze, slots, step

STORE, LOAD = int(Flag.STORE), int(Flag.LOAD)
Draw = Any


@dataclass
class Planned:
    """Tokens [start, end) of a request; ``blocks``: written down in whole blocks."""

    req_id: str
    direction: int
    start: int
    end: int


quiet = st.text("bcdfghjklmpqrstvwxz", min_size=3, max_size=7)
"""Names that hold no word."""
records = st.sampled_from(["jobs", "tasks", "state", "events", "steps", "layers", "groups"])
"""Names of which no number is KV; what stands in a list of them may be."""


# --- the world --------------------------------------------------------------


@st.composite
def worlds(draw: Draw) -> tuple[dict[str, Req], int]:
    size = draw(st.sampled_from([4, 16]))
    first = draw(st.sampled_from([1, 17, 5000]))
    ids = draw(
        st.permutations(range(first, first + 40))
        if draw(st.booleans())
        else st.just(range(first, first + 40))
    )
    pool = list(ids)
    requests: dict[str, Req] = {}
    for name in draw(st.lists(quiet.map("req-{}".format), min_size=1, max_size=3, unique=True)):
        blocks = draw(st.integers(2, 8))
        table, pool = pool[:blocks], pool[blocks:]
        capacity = blocks * size
        prompt = draw(st.integers(capacity - size + 1, capacity))
        kind = draw(st.sampled_from(["whole", "chunk", "awaits", "decodes"]))
        at = size * draw(st.integers(1, blocks - 1))
        if kind == "whole":
            requests[name] = Req((table,), prompt, now=prompt)
        elif kind == "chunk":
            requests[name] = Req((table,), prompt, before=at, now=min(size, prompt - at))
        elif kind == "awaits":
            requests[name] = Req((table,), prompt, before=at, awaited=at)
        else:
            requests[name] = Req((table,), max(1, at), before=at + 1, now=1, output=capacity - at)
    if len(requests) > 1 and draw(st.booleans()):
        share(*list(requests.values())[:2], size)
    return requests, size


def share(first: Req, other: Req, size: int) -> None:
    """The other finds the first block of one in the prefix cache."""
    if not first.awaited and not other.awaited and other.before + other.now > size:
        other.tables[0][0] = first.tables[0][0]
        other.tokens[:size] = first.tokens[:size]
        other.local = size
        if other.before == 0:
            other.before, other.now = size, other.now - size


@st.composite
def plans(draw: Draw, requests: dict[str, Req], size: int) -> list[Planned]:
    planned = []
    for name, req in requests.items():
        if not draw(st.booleans()) and len(requests) > 1:
            continue
        direction = LOAD if req.awaited else STORE
        most = req.awaited or req.before + req.now
        blocks = max(1, most // size)
        first = draw(st.integers(0, blocks - 1))
        last = draw(st.integers(first + 1, blocks))
        start, end = first * size, last * size
        if most < size:
            start, end = 0, most
        planned.append(Planned(name, direction, start, min(end, max(most, size))))
    return planned


# --- writing it down --------------------------------------------------------------


def listed(draw: Draw, values: list[int], flat: bool = False) -> Any:
    """A list of integers in some container."""
    makers = [list, tuple, np.array, lambda v: np.array(v, dtype=np.int32)]
    if not flat:
        makers += [lambda v: [list(v)], lambda v: (tuple(v),)]
    return draw(st.sampled_from(makers))(values)


def place(draw: Draw, one: Planned, req: Req, size: int) -> dict[str, Any]:
    """Where it lies, and how much: fields with names that say nothing, or what they have to."""
    table = req.tables[0]
    first, last = one.start // size, -(-one.end // size)
    how = draw(st.sampled_from(["blocks", "slots", "all and positions", "blocks and end", "tokens too"]))
    names = [name + "k" for name in draw(st.lists(quiet, min_size=4, max_size=4, unique=True))]
    if how == "slots":
        return {names[0]: listed(draw, slots(table, one.start, one.end, size), flat=True)}
    if how == "all and positions":
        unit = draw(st.sampled_from(["_tokens", "_blocks"])) if one.end % size == 0 else "_tokens"
        by = size if unit == "_blocks" else 1
        fields = {names[0]: listed(draw, table), f"start{unit}": one.start // by}
        if draw(st.booleans()):
            return {**fields, f"end{unit}": one.end // by}
        return {**fields, f"num{unit}": (one.end - one.start) // by}
    fields = {names[0]: listed(draw, table[first:last])}
    if how == "blocks and end" or one.end % size:
        fields["upto_tokens"] = one.end
    elif how == "tokens too":
        fields[names[1]] = listed(draw, req.tokens[: one.end], flat=True)
    return fields


def noise(draw: Draw, requests: dict[str, Req]) -> dict[str, Any]:
    """Fields that mean nothing; one of them may look as if it did."""
    own = [block for req in requests.values() for block in req.tables[0]]
    values = st.one_of(
        st.none(), st.floats(0, 9), st.text("abc", max_size=3), st.binary(max_size=3),
        st.lists(st.text("xyz", min_size=1, max_size=3), max_size=2), st.just([]), st.just({}),
        st.integers(-3, 200), st.lists(st.integers(90_000, 99_000), min_size=1, max_size=3),
        st.lists(st.sampled_from(own), min_size=1, max_size=3), st.just(SimpleNamespace(zzz=1.5)),
        st.just(object()),
    )  # fmt: skip
    reserved = st.sampled_from(
        [
            "priority",
            "tp_rank",
            "job_id",
            "deadline",
            "layer_ids",
            "job_ids",
            "remote_block_ids",
            "cpu_blocks",
            "version",
        ]
    )
    return dict(draw(st.lists(st.tuples(st.one_of(quiet.map("z{}q".format), reserved), values), max_size=2)))


def entry(draw: Draw, one: Planned, requests: dict[str, Req], size: int, named: bool, said: bool) -> Any:
    """One entry as an object, a named tuple, a dictionary."""
    fields = place(draw, one, requests[one.req_id], size)
    if named:
        fields[draw(st.sampled_from(["rid", "request_id", draw(quiet) + "h"]))] = one.req_id
    if said:
        store = one.direction == STORE
        word = draw(
            st.sampled_from(
                [
                    ("is_store", store),
                    ("op", "put" if store else "get"),
                    ("kind", "save" if store else "load"),
                ]
            )
        )
        fields[word[0]] = word[1]
        if word == ("is_store", False):
            fields["is_load"] = True
    if draw(st.booleans()):
        fields = {**noise(draw, requests), **fields}
    if draw(st.integers(0, 4)) == 0:
        inner = {name: fields.pop(name) for name in list(fields)[:1]}
        fields[draw(quiet) + "w"] = SimpleNamespace(**inner)
    keys = draw(st.permutations(list(fields)))
    fields = {key: fields[key] for key in keys}
    made = draw(st.sampled_from(["object", "tuple", "dict", "dataclass", "slots"]))
    if made == "object":
        return SimpleNamespace(**fields)
    if made == "tuple":
        return namedtuple("Row", fields)(**fields)  # type: ignore[misc]
    if made == "dict":
        return fields
    return make_dataclass("Thing", list(fields), slots=made == "slots")(**fields)


@st.composite
def written(draw: Draw, planned: list[Planned], requests: dict[str, Req], size: int) -> Any:
    meta = Meta()
    by_word = draw(st.booleans())
    mute = not by_word and draw(st.booleans())
    named = draw(st.booleans())
    shapes = ["list", "by request", "flat", "pairs", "ops", "keys", "side by side", "rows", "numbered"]
    shape = draw(st.sampled_from(shapes))
    if shape in ("flat", "pairs", "ops", "keys", "rows", "numbered"):
        whole = all(one.end % size == 0 for one in planned)
        shape = shape if whole else "list"
    groups: dict[str, list[Planned]] = defaultdict(list)
    for one in planned:
        groups[
            ("saves" if one.direction == STORE else "loads")
            if by_word or shape in ("flat", "keys")
            else "entries"
        ].append(one)
    for name, ones in groups.items():
        label = name if name != "entries" else draw(st.one_of(quiet, records))
        blocks = {
            one.req_id: requests[one.req_id].tables[0][one.start // size : one.end // size] for one in ones
        }
        if shape == "flat":
            value: Any = listed(draw, [block for own in blocks.values() for block in own], flat=True)
        elif shape == "pairs" and by_word:
            value = {rid: [(f"key-{block}", block) for block in own] for rid, own in blocks.items()}
        elif shape == "keys":
            value = {f"key-{block}": block for own in blocks.values() for block in own}
            value = value if draw(st.booleans()) else {block: key for key, block in value.items()}
        elif shape == "rows":
            value = [[[f"key-{rid}"], listed(draw, own)] for rid, own in blocks.items()]
        elif shape == "numbered":
            value = [np.array([at, *own]) for at, own in enumerate(blocks.values())]
        elif shape == "ops" and by_word:
            value = [
                SimpleNamespace(block_id=block, key=f"key-{block}")
                for own in blocks.values()
                for block in own
            ]
        elif shape == "side by side" and by_word:
            fields = {"ids": list(blocks), "lks": [listed(draw, own, flat=True) for own in blocks.values()]}
            fields["upto_tokens"] = [one.end for one in ones]
            value = SimpleNamespace(**fields)
        elif shape == "by request":
            value = {
                one.req_id: entry(draw, one, requests, size, False, not by_word and not mute) for one in ones
            }
        else:
            value = [entry(draw, one, requests, size, named, not by_word and not mute) for one in ones]
            value = draw(st.sampled_from([list, tuple]))(value)
        if draw(st.integers(0, 3)) == 0:
            value = SimpleNamespace(**{label: value})
        setattr(meta, label, value)
    if draw(st.booleans()):
        for name, value in noise(draw, {"none": Req(([90_001],), 1)}).items():
            vars(meta).setdefault(name, value)
    return meta


# --- the property --------------------------------------------------------------


Covered = dict[int, set[tuple[int, int]]]
"""Direction -> KV slots: (block, offset). Requests that share a block share its KV."""


def tokens_of(planned: list[Planned], requests: dict[str, Req], size: int) -> Covered:
    found: Covered = defaultdict(set)
    for one in planned:
        found[int(one.direction)] |= kv_of(requests[one.req_id], one.start, one.end, size)
    return found


def kv_of(req: Req, start: int, end: int, size: int) -> set[tuple[int, int]]:
    return {(req.tables[0][at // size], at % size) for at in range(start, end)}


def read_tokens(found: Declared, requests: dict[str, Req], size: int) -> Covered:
    covered: Covered = defaultdict(set)
    for one in found.entries:
        count = one.slots if one.slots >= 0 else one.tokens
        if one.direction and count > 0:
            assert one.start >= 0 and one.req_id is not None, one
            covered[int(one.direction)] |= kv_of(requests[one.req_id], one.start, one.start + count, size)
    return covered


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_what_is_read_is_what_was_planned(data: Any):
    requests, size = data.draw(worlds())
    planned = data.draw(plans(requests, size))
    meta = data.draw(written(planned, requests, size))
    before = freeze(meta)
    found = read(meta, step(requests, (size,)))
    assert freeze(meta) == before
    expected, got = tokens_of(planned, requests, size), read_tokens(found, requests, size)
    for direction, covered in got.items():
        assert covered <= expected[direction], (direction, covered - expected[direction], found, meta)
    if found.readable:
        for direction, covered in expected.items():
            if direction == STORE or not found.problems:
                assert got[direction] == covered, (direction, found, meta)


names = st.from_regex("[a-z_]{1,8}", fullmatch=True)
anything = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-5, 5000), st.floats(), st.text(max_size=3),
        st.binary(max_size=2), st.sampled_from(["req-a", "put", "store"]),
        st.lists(st.integers(0, 60), max_size=4), st.just(np.arange(3)),
        st.just(np.zeros((2, 3), dtype=np.int64)), st.builds(object), st.just(slice(0, 4)), st.just(range(3)),
        st.sets(st.integers(1, 9), max_size=3),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(
            st.one_of(st.text(max_size=3), st.integers(0, 3), st.just("req-a")), inner, max_size=3
        ),
        st.dictionaries(names, inner, max_size=3).map(lambda fields: SimpleNamespace(**fields)),
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(anything, st.booleans())
def test_reading_raises_nothing_and_changes_nothing(meta: Any, known: bool):
    requests = {"req-a": Req(([11, 12, 13],), 48, now=48)}
    before = freeze(meta)
    holdings = step(requests)
    found = read(meta, holdings if known else type(holdings)(None, None))
    assert freeze(meta) == before
    assert not any("raised" in problem.shape for problem in found.problems), found.problems
