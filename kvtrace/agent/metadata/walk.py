"""From a connector's metadata to its parts: what stands together, with the names on its way.

A part is a record of the metadata (an object, a tuple, a dictionary): ids, lists of integers, numbers, and
which way its names say. What its lists are is found out later (:mod:`.entries`). What may name KV and can't
be read is kept as a problem, with its class and field.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvtrace.agent.metadata import shapes, stock, words
from kvtrace.agent.metadata.numbers import Number, Span
from kvtrace.agent.metadata.shapes import SCALARS, FieldShape, Integers
from kvtrace.agent.metadata.step_requests import Interval, StepRequests

_FIELD = re.compile(r"[A-Za-z_]{1,40}\d{0,2}\Z")
_MOST_PARTS = 4096
_MOST_DEPTH = 6
_MOST_VALUES = 1 << 17
"""Values of one step's metadata that are looked at; a list of integers is one."""
_MOST_LISTS = 4096
_MOST_PROBLEMS = 64
NAMES_NOBODY = "nothing in it names a request"
_MOST_KEY = 64
"""Bytes of a hash or a key."""


@dataclass(frozen=True)
class Problem:
    """Something that may name KV and is not understood. ``field``: its path from the metadata's class.

    ``load``: it is a load whatever it is, so that what the step stores is known all the same.
    """

    field: str
    shape: str
    load: bool = False


@dataclass(frozen=True)
class Listed:
    """Lists of integers under one name: one, one a KV cache group, or one a run of blocks."""

    name: str
    field: str
    shape: str
    lists: tuple[Integers, ...]
    columns: tuple[Integers, ...] = ()
    """Of rows, any of which may be the blocks."""
    span: Interval | None = None
    """Positions, where the numbers are nobody's blocks or slots."""


@dataclass(frozen=True)
class Context:
    """What is known on the way to a value.

    Attributes:
        field: its path. label: the nearest name that is one.
        hint: the direction of the nearest name that says one.
        want, deny: directions that the record above orders, or rules out. ids: of its requests.
        entry: it is an item of a container.
    """

    field: str = ""
    label: str = ""
    hint: int = 0
    want: int = 0
    deny: int = 0
    ids: tuple[str, ...] = ()
    depth: int = 0
    child: int = 0
    """Number of the connector inside the connector, 0 for the outer one."""
    entry: bool = False

    def under(self, name: str, part: Node | None = None) -> Context:
        """One level down, in a field of that name; with the ids and the orders of the record it stands in."""
        word = words.read(name)
        way = name if all(map(_FIELD.match, name.split("."))) else ""
        inside = replace(
            self,
            field=f"{self.field}.{way}".strip(".") if way else self.field + "[]" * bool(name),
            label=name or self.label,
            hint=0 if word.done else word.direction or self.hint,
            depth=self.depth + 1,
            entry=False,
        )
        if part is not None:
            inside = replace(inside, ids=tuple(part.ids), want=part.want, deny=part.deny)
        return replace(inside, want=0, deny=0) if word.direction else inside

    def item(self) -> Context:
        """An item of the container that this is."""
        return replace(self, field=f"{self.field}[]", entry=True)


@dataclass
class Node:
    """One record. ``ordered``: direction of a name that orders something, and what stands under it."""

    context: Context
    name: str = ""
    """The class of the record."""
    ids: list[str] = field(default_factory=list)
    want: int = 0
    deny: int = 0
    lists: list[Listed] = field(default_factory=list)
    numbers: list[Number] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    empty: set[int] = field(default_factory=set)
    """Directions of the names of lists that would name blocks, slots or positions and have none in them."""
    ordered: list[tuple[int, list[str], Problem]] = field(default_factory=list)
    inside: bool = False
    """There are records in it, which say more."""
    hidden: Problem | None = None
    """A value that can't be looked into."""
    by_request: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ids = list(self.context.ids)
        self.want, self.deny = self.context.want, self.context.deny

    def says_something(self) -> bool:
        return bool(
            self.lists or self.numbers or self.spans or self.empty or self.ordered or self.hidden
            or self.ids or self.want
        )  # fmt: skip


class Walk:
    """Finds the parts of one metadata object.

    Args:
        answered: what adapters answered for metadata inside this one, by its id.
    """

    def __init__(self, requests: StepRequests, answered: Mapping[int, Any]) -> None:
        self.requests = requests
        self.answered = answered
        self.answers: list[Any] = []
        self.parts: list[Node] = []
        self.problems: list[Problem] = []
        self.unsure: Problem | None = None
        """What may name KV, as texts that are no ids may: of a step of which nothing else is known."""
        self._children = 0
        self._values_more = _MOST_VALUES
        self._spoke = False
        """Whether there was anything in which entries could stand."""

    def problem(self, way: str, shape: str) -> None:
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(Problem(way, shape))

    def metadata(self, meta: Any, context: Context) -> None:
        """The metadata of one connector; of a connector of connectors one of its children."""
        if meta is None:
            return
        inside = replace(context, child=self._children)
        self._children += 1
        if id(meta) in self.answered:
            self._spoke = True
            entries, problems = self.answered[id(meta)][1]
            self.answers.extend(replace(entry, child=inside.child) for entry in entries)
            self.problems.extend(problems)
            return
        self._spoke = False
        try:
            meta = stock.view(meta)
        except (AttributeError, TypeError, ValueError):
            pass  # another class of that name
        kind = shapes.kind_of(meta)
        if kind is FieldShape.RECORD:
            self._record(shapes.fields(meta), inside)
        elif kind is FieldShape.MAP:
            self._spoke = True
            part = Node(inside)
            self._mapping(part, "", meta, inside)
            self._close(part)
        elif kind in (FieldShape.LIST, FieldShape.ARRAY):
            self._record([("", meta)], inside)
        if not self._spoke:
            # Nothing in it that could name a request: the worker decides by itself what to store.
            self.problem(context.field, NAMES_NOBODY)
        self._spoke = True

    # --- records ----------------------------------------------------------------------------------

    def _record(self, fields: Iterable[tuple[str, Any]], context: Context, name: str = "") -> None:
        """One record: its plain values first, then what is inside it, which knows them."""
        if self._too_deep(context):
            return
        part = Node(context, name)
        deeper = self._plain(part, fields, context)
        for under, value, kind in deeper:
            self._inside(part, under, value, kind)
        self._close(part)

    def _too_deep(self, context: Context) -> bool:
        if context.depth <= _MOST_DEPTH and len(self.parts) < _MOST_PARTS:
            return False
        self.problem(context.field, "too deep" if context.depth > _MOST_DEPTH else "too many entries")
        return True

    def _close(self, part: Node) -> None:
        """What several dictionaries say of a request is one record."""
        for request, values in part.by_request.items():
            names = {name for name, _ in values}
            inside = part.context.under(names.pop() if len(names) == 1 else "", part).item()
            inside = replace(inside, ids=(request,))
            if not names:  # one dictionary: its name is said
                values = [("", value) for _, value in values]
            self._record(values, inside)
        if part.says_something():
            self.parts.append(part)

    def _plain(
        self, part: Node, fields: Iterable[tuple[str, Any]], context: Context
    ) -> list[tuple[str, Any, FieldShape]]:
        """Takes a record's plain values; returns what is inside it, records of plain values first."""
        deeper: list[tuple[str, Any, FieldShape]] = []
        for name, value in _with_pairs(fields):
            self._values_more -= 1
            if self._values_more < 0:
                self.problem(context.field, "too much to read")
                break
            kind = shapes.kind_of(value)
            if kind is FieldShape.FLAG:
                _flag(part, name, bool(value))
            elif kind is FieldShape.NUMBER:
                self._number(part, name, int(value))
            elif kind is FieldShape.TEXT:
                self._text(part, name, value)
            elif kind is FieldShape.ENUM:
                part.want |= words.operation(name, value.name)
            elif kind is FieldShape.SLICE:
                if type(value.start) is type(value.stop) is int and value.step in (None, 1):
                    part.spans.append((name, (value.start, value.stop)))
            elif kind is FieldShape.BYTES:
                self._bytes(value, context.under(name))
            elif kind is FieldShape.OPAQUE:
                part.hidden = Problem(context.field, f"{name}: {type(value).__name__}")
            elif kind in (FieldShape.LIST, FieldShape.ARRAY) and self._list(part, name, value, kind):
                self._spoke = True
            elif kind is not FieldShape.NOTHING:
                deeper.append((name, value, kind))
        return sorted(deeper, key=lambda one: one[2] is not FieldShape.RECORD)

    def _bytes(self, value: bytes, context: Context) -> None:
        """Bytes in the metadata itself may be all that it says; none are an empty message."""
        if context.depth == 1:
            self._spoke = True
            if value:
                self.problem(context.field, f"{len(value)} bytes")

    def _number(self, part: Node, name: str, value: int) -> None:
        word = words.read(name)
        if word.unit in ("block", "slot") and not word.role and not word.foreign:
            self._listed(part, name, value, (Integers([value], 1),))
        else:
            part.numbers.append((name, value))

    def _text(self, part: Node, name: str, value: str) -> None:
        if not self.requests.knows(value):
            part.want |= words.operation(name, value)
        elif value not in part.ids and not words.read(name).foreign:
            part.ids.append(value)

    def _list(self, part: Node, name: str, value: Any, kind: FieldShape) -> bool:
        """Takes a list of integers, or of such lists; False where it is none."""
        word = words.read(name)
        numbers = shapes.integers(value, kind)
        if (kind is FieldShape.LIST and not len(value)) or (numbers is not None and not numbers.length):
            blocks = word.unit and not (word.role or word.fact or word.foreign)
            if isinstance(value, range) or blocks or word.role == "span":
                part.empty.add(word.direction)
            return True
        if numbers is not None:
            self._listed(part, name, value, (numbers,))
            return True
        inner = _lists(value)
        if inner is not None:
            columns = _columns([one.whole() for one in inner]) if _same_length(inner) else ()
            self._listed(part, name, value, inner, columns)
        return inner is not None

    def _listed(
        self, part: Node, name: str, raw: Any, lists: tuple[Integers, ...] = (),
        columns: tuple[Integers, ...] = (),
    ) -> None:  # fmt: skip
        context = part.context.under(name)
        word, own = words.read(context.label), words.read(name)
        # numbers of "jobs", not what stands in each of them
        other = own.other and not own.direction and shapes.integers(raw, shapes.kind_of(raw)) is not None
        if not (word.foreign or other or (word.done and not word.unit)):
            shape, span = shapes.describe(raw), _span(raw, word, lists)
            part.lists.append(Listed(context.label, context.field, shape, lists, columns, span))

    # --- what is inside ---------------------------------------------------------------------------

    def _inside(self, part: Node, name: str, value: Any, kind: FieldShape) -> None:
        context = part.context.under(name, part)
        word = words.read(name)
        if shapes.is_child(value):
            part.inside = True
            self.metadata(value, part.context.under(name))
        elif word.foreign or words.read(type(value).__name__).foreign:
            return
        elif kind is FieldShape.RECORD:
            self._beside(part, name, shapes.fields(value))
        elif kind is FieldShape.MAP:
            self._spoke = True
            self._mapping(part, name, value, context)
        elif kind is FieldShape.ARRAY:
            self._spoke = True
            if shapes.may_name_kv(value):
                self.problem(context.field, shapes.describe(value))
        elif kind is FieldShape.LIST:
            self._spoke = part.inside = True
            self._sequence(part, name, shapes.items(value), context)

    def _beside(self, part: Node, name: str, fields: list[tuple[str, Any]]) -> None:
        """A record in a record says more of the same (``save_spec``)."""
        if name.count(".") >= _MOST_DEPTH:
            self.problem(part.context.field, "too deep")
            return
        denied = part.deny
        deeper = self._plain(part, [(f"{name}.{key}", item) for key, item in fields], part.context)
        direction = words.read(name).direction
        part.want |= direction & ~(part.deny & ~denied)
        for under, value, kind in deeper:
            self._inside(part, under, value, kind)

    def _mapping(self, part: Node, name: str, value: dict[Any, Any], context: Context) -> None:
        """A dictionary: of requests, of names, or of whatever keys."""
        if self._too_deep(context):
            return
        pairs = shapes.pairs(value)
        if {type(item) for _, item in pairs} == {int} and value == self.requests.scheduled:
            return  # what the step computes, as the scheduler has it
        rest = []
        for key, item in pairs:
            request = self._request(key)
            if request is None:
                rest.append((key, item))
            elif not (words.read(name).done or words.read(name).foreign or _says_nothing(item)):
                part.inside = True
                part.by_request.setdefault(request, []).append((name or context.label, item))
        if not rest:
            return
        kinds = {shapes.kind_of(item) for _, item in rest}
        named = [key for key, _ in rest if type(key) is str and _FIELD.match(key)]
        if len(named) == len(rest) and (
            len(rest) == 1 or kinds - {FieldShape.NUMBER} or _names_a_number(named)
        ):
            if kinds <= SCALARS:
                self._beside(part, name, rest)
            else:
                part.inside = True
                self._record(rest, context)
        elif kinds <= SCALARS - {FieldShape.ENUM}:
            columns = _columns([[key, item] for key, item in rest])
            if columns:
                self._listed(part, name, value, columns=columns)
        else:
            part.inside = True
            for _, item in rest:
                self._item(item, context.item(), name)

    def _request(self, key: Any) -> str | None:
        """The request that a dictionary's key names."""
        texts = [one for one in (key if type(key) is tuple else (key,)) if type(one) is str]
        known = [one for one in texts if self.requests.knows(one)]
        return known[0] if len(known) == 1 else None

    def _sequence(self, part: Node, name: str, listed: list[Any], context: Context) -> None:
        """A list that is no list of integers."""
        if self._too_deep(context):
            return
        kinds = {shapes.kind_of(item) for item in listed}
        texts = [item for item in listed if type(item) is str]
        if texts and kinds <= {FieldShape.TEXT, FieldShape.NOTHING}:
            known = [one for one in texts if self.requests.knows(one)]
            word = words.read(name)
            if word.direction and not word.done:
                shape = "ids of requests, and not how much of them" if known else "list of str"
                part.ordered.append((word.direction, known, Problem(context.field, shape)))
            elif not (known or word.done or word.other or word.foreign):
                self.unsure = self.unsure or Problem(context.field, "list of str")
            return
        keys = [item for item in listed if shapes.kind_of(item) is FieldShape.BYTES]
        if keys and kinds <= {FieldShape.BYTES, FieldShape.NOTHING}:  # longer than a key it may say anything
            if any(len(key) > _MOST_KEY for key in keys):
                self.unsure = self.unsure or Problem(context.field, "list of bytes")
            return
        rows = [shapes.items(item) for item in listed if shapes.kind_of(item) is FieldShape.LIST]
        flat = len(rows) == len(listed) and all(shapes.kind_of(one) in SCALARS for row in rows for one in row)
        if flat and len({len(row) for row in rows}) == 1 and not any(map(self._request, rows[0])):
            columns = _columns(rows)
            if columns:
                self._listed(part, name, listed, columns=columns)
                return
        if kinds & SCALARS:  # a plain tuple whose places have no names
            self._record([("", item) for item in listed], context)
            return
        for item in listed:
            self._item(item, context.item(), name)

    def _item(self, item: Any, context: Context, name: str) -> None:
        """One item of a container: an entry, or another container."""
        kind, before, values = shapes.kind_of(item), len(self.parts), list[Any]()
        if shapes.is_child(item):
            self.metadata(item, context)
        elif kind is FieldShape.RECORD:
            cls, fields = type(item).__name__, shapes.fields(item)
            if words.read(cls).foreign:
                return
            if {shapes.kind_of(value) for _, value in fields} <= {
                FieldShape.BYTES,
                FieldShape.OPAQUE,
                FieldShape.NOTHING,
            }:
                self.problem(context.field, cls)
            values = [value for _, value in fields]
            self._record(fields, replace(context, depth=context.depth + 1), cls)
        elif kind is FieldShape.MAP:
            part = Node(replace(context, depth=context.depth + 1))
            values = [value for _, value in shapes.pairs(item)]
            self._mapping(part, "", item, part.context)
            self._close(part)
        elif kind in (FieldShape.LIST, FieldShape.ARRAY):
            inside = replace(context, depth=context.depth + 1)
            if shapes.integers(item, kind) is not None or _lists(item) is not None:
                self._record([(name, item)], inside)
            else:
                part = Node(inside, inside=True)
                self._sequence(part, "", shapes.items(item), inside)
                self._close(part)
        elif kind is FieldShape.OPAQUE:
            self.problem(context.field, type(item).__name__)
        word = words.read(name)
        texts = len(self.parts) == before and any(type(one) is str and one for one in values)
        if texts and not (word.done or word.other or word.foreign):  # it says nothing else: they may be keys
            self.unsure = self.unsure or Problem(context.field, "an entry of str")


def _with_pairs(fields: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
    """Two numbers side by side in places without names: one pair, from and to."""
    waiting: list[int] = []
    for name, value in fields:
        if not name and type(value) is int:
            waiting.append(value)
            continue
        yield from _pair(waiting)
        waiting = []
        yield name, value
    yield from _pair(waiting)


def _pair(numbers: list[int]) -> Iterable[tuple[str, Any]]:
    if len(numbers) == 2 and 0 <= numbers[0] <= numbers[1]:
        yield "", slice(*numbers)
    else:
        yield from (("", number) for number in numbers)


def _says_nothing(value: Any) -> bool:
    """Texts and times say nothing of KV, whatever stands beside them."""
    return shapes.kind_of(value) in (FieldShape.TEXT, FieldShape.BYTES, FieldShape.NOTHING)


def _span(raw: Any, word: words.Meaning, lists: tuple[Integers, ...]) -> Interval | None:
    """What a list says if it is one of positions: a range, two ends, or all that lie between."""
    if isinstance(raw, range):
        return (raw.start, raw.stop) if raw.step == 1 else (0, 0)
    pair = type(raw) is tuple and not word.unit
    if len(lists) != 1 or lists[0].hidden or not (word.role == "span" or pair):
        return None
    first, last = lists[0].at(0), lists[0].at(lists[0].length - 1)
    if lists[0].length == 2 and first <= last:
        return first, last
    return (first, last + 1) if word.role == "span" and lists[0].is_run() else None


def _flag(part: Node, name: str, value: bool) -> None:
    word = words.read(name)
    if not word.direction or word.done:
        return
    if value is word.negated:
        part.deny |= word.direction
    elif value:
        part.want |= word.direction
        part.deny &= ~word.direction


def _names_a_number(names: list[str]) -> bool:
    return any(words.read(name).role or words.read(name).unit for name in names)


def _lists(value: Any) -> tuple[Integers, ...] | None:
    """The lists of a list of lists of integers, empty ones left out; None where it is none."""
    listed = shapes.items(value)
    if not listed or len(listed) > _MOST_LISTS:
        return None
    found = []
    for item in listed:
        of_item = shapes.kind_of(item)
        if of_item is FieldShape.LIST and not len(item):
            continue
        numbers = shapes.integers(item, of_item)
        if numbers is None:
            return None
        found.append(numbers)
    return tuple(found) or None


def _same_length(lists: tuple[Integers, ...]) -> bool:
    return len(lists) > 1 and 2 <= lists[0].length <= 4 and len({one.length for one in lists}) == 1


def _columns(rows: list[list[Any]]) -> tuple[Integers, ...]:
    """The columns of rows of plain values that hold integers."""
    columns = (shapes.integers(list(column), FieldShape.LIST) for column in zip(*rows, strict=True))
    return tuple(column for column in columns if column is not None)
