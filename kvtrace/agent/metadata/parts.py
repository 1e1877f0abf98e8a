"""From a connector's metadata to its parts: what stands together, with the names on its way.

A part is a record of the metadata (an object, a tuple, a dictionary with names), or what several
dictionaries say of one request: ids, orders, lists of integers, numbers. What they mean is found out later
(:mod:`.entries`). Whatever may name KV and can't be read is kept as a problem, with its class and field.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import Any

from kvtrace.agent.metadata import shapes, words
from kvtrace.agent.metadata.holdings import Holdings, Interval
from kvtrace.agent.metadata.identify import BLOCK, SLOT, readings
from kvtrace.agent.metadata.shapes import Integers, Kind
from kvtrace.trace.format import Flag

_FIELD = re.compile(r"[A-Za-z_]{1,40}\d{0,2}\Z")
MAX_PARTS = 4096
MAX_DEPTH = 6
MAX_VALUES = 1 << 17
"""Values of one step's metadata that are looked at; a list of integers is one."""

# In these, an entry whose store flag is false is a load (exclusive by design).
_STORE_OR_LOAD = {"ExampleConnectorMetadata", "SharedStorageConnectorMetadata"}


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
    """A list of integers under a name; or several, one inside the other (``inner``)."""

    name: str
    field: str
    raw: Any
    numbers: Integers | None = None
    inner: tuple[Integers, ...] = ()
    columns: bool = False
    """The inner lists are the columns of rows."""

    def shape(self) -> str:
        return shapes.describe(self.raw)


@dataclass
class Values:
    """What is declared of where: for one direction, or for whichever the part has."""

    lists: list[Listed] = field(default_factory=list)
    numbers: list[tuple[str, int]] = field(default_factory=list)
    spans: list[tuple[str, Interval]] = field(default_factory=list)
    empty: bool = False
    """A list that would name blocks, slots or tokens has none in it."""

    def __bool__(self) -> bool:
        return bool(self.lists or self.numbers or self.spans or self.empty)


@dataclass(slots=True)
class Context:
    """What is known on the way to a value; never changed once it is made."""

    field: str = ""
    label: str = ""
    """The nearest name above that says something."""
    hint: int = 0
    ids: tuple[str, ...] = ()
    want: int = 0
    deny: int = 0
    depth: int = 0
    foreign: bool = False
    exclusive: bool = False
    child: int = 0
    """Number of the connector inside the connector, 0 for the outer one."""

    def way(self, name: str) -> str:
        """The path of a field; the keys of a dictionary that are no names stay out of it."""
        if not name:
            return self.field
        if not _FIELD.match(name):
            return f"{self.field}[]"
        return f"{self.field}.{name}" if self.field else name

    def under(self, name: str, part: Part | None = None) -> Context:
        """One level down, in a field of that name; with the id and the orders of the record it stands in."""
        word = words.read(name)
        if part is None:
            ids, want, deny = self.ids, self.want, self.deny
        else:
            ids, want, deny = _only(part.ids) or self.ids, part.want, part.deny
        if word.direction:
            want = deny = 0  # another order than what stands around it
        return Context(
            self.way(name), name or self.label, word.direction or self.hint, ids, want, deny, self.depth + 1,
            self.foreign or word.foreign or word.over, self.exclusive, self.child,
        )  # fmt: skip

    def item(self) -> Context:
        """An item of the container that this is."""
        return Context(
            f"{self.field}[]", self.label, self.hint, self.ids, self.want, self.deny, self.depth,
            self.foreign, self.exclusive, self.child,
        )  # fmt: skip


def _only(ids: list[str]) -> tuple[str, ...]:
    return tuple(ids) if len(ids) == 1 or len(set(ids)) == 1 else ()


@dataclass
class Part:
    context: Context
    name: str = ""
    """The class of the record."""
    root: bool = False
    keyed: bool = False
    """It stands under a request's id."""
    ids: list[str] = field(default_factory=list)
    strange_ids: list[str] = field(default_factory=list)
    """Texts in fields for a request's id that no request of this step has."""
    near: dict[int, set[str]] = field(default_factory=dict)
    """Request ids in lists near by, with the direction that their name says."""
    want: int = 0
    deny: int = 0
    neutral: Values = field(default_factory=Values)
    directed: dict[int, Values] = field(default_factory=dict)
    each: Problem | None = None
    """A list that says how much of something, beside lists that name something."""
    either: Problem | None = None
    """A list under a name that says nothing, which may be a request's own blocks or slots, or places."""
    inside: int = 0
    """Directions of records in it that name KV of their own."""
    tables: bool = False
    """Its lists are what a worker may want to know; nothing orders anything."""
    orders: list[tuple[int, Problem]] = field(default_factory=list)
    """What stands under a name that orders something, and what for is known to the worker alone."""

    def values(self, direction: int) -> Values:
        if not direction:
            return self.neutral
        return self.directed.setdefault(direction, Values())

    def has_lists(self) -> bool:
        return bool(self.neutral.lists) or any(values.lists for values in self.directed.values())


class Walk:
    """Finds the parts of one metadata object."""

    def __init__(self, holdings: Holdings, answered: Any = ()) -> None:
        self.holdings = holdings
        self.answered = answered
        """What adapters answered for metadata inside this one, by its id."""
        self.answers: list[Any] = []
        self.parts: list[Part] = []
        self.problems: list[Problem] = []
        self.children = 0
        self.left = MAX_VALUES
        self.spoke = False
        """Whether there was anything in which entries could stand."""

    # --- records ----------------------------------------------------------------------------------

    def metadata(self, meta: Any, context: Context) -> None:
        """The metadata of one connector; of a connector of connectors one of its children."""
        if meta is None:
            return
        if id(meta) in self.answered:
            self.spoke = True
            entries, problems = self.answered[id(meta)][1]
            self.answers.extend(replace(entry, child=self.children) for entry in entries)
            self.problems.extend(problems)
            self.children += 1
            return
        name = type(meta).__name__
        inside = replace(context, exclusive=name in _STORE_OR_LOAD, child=self.children, want=0, deny=0)
        self.children += 1
        kind = shapes.kind_of(meta)
        self.spoke = False
        if kind is Kind.RECORD:
            self.record(shapes.fields(meta), inside, Part(inside, "", root=True))
        elif kind is Kind.MAP:
            self.spoke = True
            self.record(shapes.pairs(meta), inside, Part(inside, "", root=True), keyed=True)
        elif kind in (Kind.LIST, Kind.ARRAY):
            self.record([("", meta)], inside, Part(inside, "", root=True))
        if not self.spoke:
            # Nothing in it that could name a request: the worker decides by itself what to store.
            self.problem(context.field, f"{name} without entries")
        self.spoke = True

    def record(
        self, fields: Iterable[tuple[Any, Any]], context: Context, part: Part, keyed: bool = False
    ) -> None:
        """One record: its plain values first, then what is inside it, which knows them.

        ``keyed``: of a dictionary, whose keys may be requests.
        """
        fields = self.across(list(fields), context)
        if context.depth > MAX_DEPTH or len(self.parts) >= MAX_PARTS:
            self.problem(context.field, "too deep" if context.depth > MAX_DEPTH else "too many entries")
            return
        part.ids.extend(context.ids)
        part.want |= context.want
        part.deny |= context.deny
        deeper: list[tuple[str, Any, Kind]] = []
        by_request: dict[str, list[tuple[str, Any]]] = {}
        for key, value in _with_pairs(fields, self.holdings.sizes):
            self.left -= 1
            if self.left < 0:
                self.problem(context.field, "too much to read")
                return
            request = self._key_request(key) if keyed else None
            if request is not None and not _says_nothing(value):
                by_request.setdefault(request, []).append(("", value))
                continue
            name = key if type(key) is str else ""
            self.plain(part, name, value, context, deeper)
        for name, value, kind in sorted(deeper, key=_orders_last):
            self.inside(part, name, value, kind, by_request)
        for request, values in by_request.items():
            under = context.under("", part)
            under.ids = (request,)
            self.record(values, under, Part(under, keyed=True))
        more = len(part.ids) > len(context.ids) or part.strange_ids or part.orders
        if more or part.keyed or part.either or part.neutral or any(part.directed.values()):
            self.parts.append(part)

    def across(self, fields: list[tuple[Any, Any]], context: Context) -> list[tuple[Any, Any]]:
        """Lists side by side, one of them request ids: an entry for each place. Returns the other fields."""
        listed = [(name, value) for name, value in fields if self._all_known(value) and _is_order(str(name))]
        ids = self._entries_ids(listed, fields)
        if not ids:
            return fields
        id_name, requests = ids[0]
        fields = self._indexed(id_name, requests, fields, context)
        fields, ragged = self._cut(fields, requests)
        beside = [
            (name, value)
            for name, value in fields
            if type(value) in (list, tuple) and len(value) == len(requests) and not self._all_known(value)
        ]
        beside = [(name, value) for name, value in beside if _goes_along(name, value, len(requests), ragged)]
        if not beside:
            return fields
        for at, request in enumerate(requests):
            place = context.under(id_name)
            place.ids, place.field = (request,), f"{context.field}[]"
            self.record([(name, value[at]) for name, value in beside], place, Part(place))
        taken = {name for name, _ in (*beside, *ids)}
        return [(name, value) for name, value in fields if name not in taken]

    def _entries_ids(
        self, listed: list[tuple[Any, Any]], fields: list[tuple[Any, Any]]
    ) -> list[tuple[Any, Any]]:
        """Of several lists of request ids those that say whose the entries are: all of them where they are
        the same; else those whose places a list of blocks is cut for (others may tell who runs)."""
        if all(value == listed[0][1] for _, value in listed):
            return listed
        cut = [one for one in listed if self._cut(fields, one[1])[1]]
        return cut if all(value == cut[0][1] for _, value in cut) else []

    def _indexed(
        self, id_name: str, requests: Any, fields: list[tuple[Any, Any]], context: Context
    ) -> list[tuple[Any, Any]]:
        """Rows of blocks that begin with a number: the place of their request in the list of ids. Returns the
        other fields."""
        rest: list[tuple[Any, Any]] = []
        for name, value in fields:
            rows = _lists(value, Kind.LIST) if type(value) in (list, tuple) and value else None
            if rows is None or not all(self._begins_with_place(row, requests) for row in rows):
                rest.append((name, value))
                continue
            for row in rows:
                place = context.under(str(name))
                place.ids = (requests[row.at(0)],)
                self.record([("", row.whole()[1:])], place, Part(place))
        return rest

    def _cut(self, fields: list[tuple[Any, Any]], requests: Any) -> tuple[list[tuple[Any, Any]], bool]:
        """One list of blocks for all places, beside another that says how many each has: cut in pieces. And
        whether there was one."""
        numeric = [(name, value) for name, value in fields if type(value) in (list, tuple) and value]
        numeric = [(name, value) for name, value in numeric if shapes.integers(value, Kind.LIST) is not None]
        sizes_of = [one for one in numeric if len(one[1]) == len(requests) and min(one[1]) >= 0]
        # the longest list that can be cut: a count may be the number of a block as well
        for name, whole in sorted(numeric, key=lambda one: -len(one[1])):
            for count_name, sizes in sizes_of:
                ends = list(accumulate(sizes))
                if whole is sizes or len(whole) != ends[-1] or words.read(str(name)).no_kv:
                    continue
                pieces = [list(whole[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
                if all(self._holds(one, piece) for one, piece in zip(requests, pieces, strict=True)):
                    rest = [one for one in fields if one[0] not in (count_name, name)]
                    return [*rest, (name, pieces)], True
        return fields, False

    def _of_request(self, part: Part, word: words.Name, numbers: Integers | None) -> bool:
        """Whether a dictionary that orders something gives a request its own blocks: ``store_jobs[id]``."""
        if not (part.keyed and word.direction and part.ids) or numbers is None or numbers.hidden:
            return False
        return numbers.length > 0 and self._holds(part.ids[0], numbers.whole())

    def _own(self, numbers: Integers | None, unmistakable: bool) -> bool:
        """Whether numbers under a name that says nothing are a request's own blocks or slots, in its order.

        Args:
            unmistakable: and too great to be positions in it or in its table.
        """
        if numbers is None or numbers.hidden or numbers.length < 2 or not self.holdings:
            return False
        first = numbers.at(0)
        for size in (1, *dict.fromkeys(self.holdings.sizes)):
            for request in self.holdings.holders(first // size):
                room = sum(map(len, self.holdings.tables(request))) * size
                unit = BLOCK if size == 1 else SLOT
                ways = readings(self.holdings, request, numbers)
                far = first > room or not unmistakable
                if far and any(way.unit == unit and way.strict for way in ways):
                    return True
        return False

    def _holds(self, request: str, blocks: list[int]) -> bool:
        held = {block for table in self.holdings.tables(request) for block in table}
        return held.issuperset(blocks)

    def _begins_with_place(self, row: Integers, requests: Any) -> bool:
        if row.hidden or row.length < 2 or not 0 <= row.at(0) < len(requests):
            return False
        return self._holds(requests[row.at(0)], row.whole()[1:])

    def _all_known(self, value: Any) -> bool:
        if type(value) not in (list, tuple) or not value or type(value[0]) is not str:
            return False
        return all(type(one) is str and self.holdings.knows(one) for one in value)

    def plain(
        self, part: Part, name: str, value: Any, context: Context, deeper: list[tuple[str, Any, Kind]]
    ) -> None:
        """A field's value where it is one: an order, an id, a number, a list of integers."""
        kind = shapes.kind_of(value)
        if kind is Kind.NOTHING:
            word = words.read(name)
            if value is None and word.direction and not word.negated:
                part.deny |= word.direction & ~part.want
        elif kind is Kind.FLAG:
            _flag(part, name, bool(value), context.exclusive)
        elif kind is Kind.TEXT:
            self.text(part, name, str(value))
        elif kind is Kind.ENUM:
            if not words.read(name).state:
                part.want |= words.direction(str(value.name)) & ~part.deny
        elif kind is Kind.NUMBER:
            self.number(part, name, int(value), context)
        elif kind is Kind.SLICE:
            if isinstance(value.stop, int) and value.step in (None, 1):
                _put(part, name).spans.append((name, (int(value.start or 0), value.stop)))
        elif kind in (Kind.ARRAY, Kind.LIST):
            if not self.numbers(part, name, value, kind, context):
                deeper.append((name, value, kind))
        elif kind is Kind.OPAQUE:
            self.closed(part, name, value, context)
        elif kind is Kind.BYTES and part.root and not words.read(name).no_size:
            self.spoke = True
            if len(value):
                self.problem(context.way(name), f"{len(value)} bytes")
        elif kind in (Kind.MAP, Kind.RECORD):
            deeper.append((name, value, kind))

    def closed(self, part: Part, name: str, value: Any, context: Context) -> None:
        """What can't be looked into, under a name that orders something of a request."""
        way = words.direction(name)
        if way and not part.root and not context.foreign:
            part.orders.append((way, Problem(context.way(name), shapes.describe(value))))

    def text(self, part: Part, name: str, value: str) -> None:
        lowered = name.lower().lstrip("_")
        word = words.read(name)
        if word.foreign:
            return
        if self.holdings.knows(value):
            part.ids.append(value)
        elif lowered in words.ID_FIELDS:
            known = self.holdings.client(value)
            (part.strange_ids if known is None else part.ids).append(known or value)
        elif not word.state:
            part.want |= words.operation(name, value) & ~part.deny

    def number(self, part: Part, name: str, value: int, context: Context) -> None:
        label = name or context.label
        word = words.read(label)
        if value < 0 or word.foreign or context.foreign:
            return
        if word.one:
            _put(part, name).lists.append(Listed(label, context.way(name), value, Integers([value], 1)))
        elif not word.no_size:
            _put(part, name).numbers.append((label, value))

    def numbers(self, part: Part, name: str, value: Any, kind: Kind, context: Context) -> bool:
        """Take a list of integers; false where it is none."""
        label = name or context.label
        word = words.read(label)
        if kind is Kind.LIST and not len(value):
            self.spoke = True
            if isinstance(value, range) and not (word.foreign or context.foreign):
                self._nothing(part, name, label, value, context)
                return True
            names_kv = word.unit in ("slot", "block", "token") and not word.no_kv
            if names_kv or (not name and part.context.ids):
                _put(part, name).empty = not (word.foreign or context.foreign)
            return True
        numbers = shapes.integers(value, kind)
        inner: tuple[Integers, ...] = ()
        if numbers is None and (listed := _lists(value, kind)) is not None:
            inner = listed
        if numbers is None and not inner:
            if kind is Kind.ARRAY:
                self.closed(part, name, value, context)
            return kind is Kind.ARRAY
        self.spoke = True
        self.left -= len(inner)
        if word.foreign or context.foreign or (word.over and word.direction):
            return True
        rightly = self._of_request(part, word, numbers) or (word.vague and self._own(numbers, True))
        if word.no_kv and not word.span and not rightly:
            part.each = part.each or (
                Problem(context.way(name), shapes.describe(value)) if _is_each(word) else None
            )
            if word.vague and self._own(numbers, False):
                part.either = part.either or Problem(context.way(name), shapes.describe(value))
            return True
        if numbers is not None and not numbers.length:
            _put(part, name).empty = True
            return True
        if numbers is not None and (pair := self._pair(value, numbers, word)) is not None:
            _put(part, name).spans.append((label, pair))
            return True
        _put(part, name).lists.append(Listed(label, context.way(name), value, numbers, inner))
        part.tables = part.tables or word.table
        return True

    def _nothing(self, part: Part, name: str, label: str, value: range, context: Context) -> None:
        """An empty range: of what stands beside it none is meant, if its name says that it is that."""
        if words.read(label).span:
            _put(part, name).spans.append((label, (value.start, value.start)))
        else:
            part.each = part.each or Problem(context.way(name), "an empty range")

    def _pair(self, value: Any, numbers: Integers, word: words.Name) -> Interval | None:
        """Positions as a pair (from, to): by its name, or as a tuple of two ends of blocks, in tokens."""
        if numbers.length != 2 or not numbers.ordered or numbers.hidden or isinstance(value, range):
            return None
        start, end = numbers.at(0), numbers.at(1)
        if word.span:
            return start, end
        size = self.holdings.sizes[0] if len(set(self.holdings.sizes)) == 1 else 0
        if type(value) is not tuple or word.unit or not size or not 0 <= start < end:
            return None
        if start % size or end % size or set(self.holdings.holders(start)) & set(self.holdings.holders(end)):
            return None
        return start, end

    # --- what is inside a record ------------------------------------------------------------------

    def inside(
        self, part: Part, name: str, value: Any, kind: Kind, by_request: dict[str, list[tuple[str, Any]]]
    ) -> None:
        """A field that holds more than one value."""
        context = part.context.under(name, part)
        if shapes.is_child(value):
            self.metadata(value, context)
        elif kind is Kind.RECORD:
            self.nested(part, name, shapes.fields(value), context, type(value).__name__)
        elif kind is Kind.MAP:
            self.spoke = True
            self.mapping(part, name, value, context, by_request)
        else:
            self.spoke = True
            self.sequence(part, name, shapes.items(value), context)

    def nested(
        self, part: Part, name: str, fields: list[tuple[Any, Any]], context: Context, cls: str = ""
    ) -> None:
        """A record in a record: a part of its own where it holds more, else more of this one."""
        word = words.read(name)
        if context.foreign or (words.read(cls).foreign and not word.here) or _is_address(fields):
            return
        if (word.source or word.target) and self._other_side(part, word):
            return
        inner = [(item, kind) for _, item in fields if (kind := shapes.kind_of(item)) not in shapes.SCALARS]
        plain = not any(kind in _HOLDING for _, kind in inner)
        if plain and part.root:
            return  # settings, counters
        if plain and word.direction:
            self._order(part, word.direction, fields, context)
            return
        deeper = any(
            kind in (Kind.MAP, Kind.RECORD) or (kind is Kind.LIST and len(item) and not _is_numeric(item))
            for item, kind in inner
        )
        if deeper or (not plain and (part.root or word.direction)):
            part.inside |= word.direction
            self.record(fields, context, Part(context, cls), keyed=not cls)
        else:
            for inside, item in fields:
                label = str(inside) if words.words(str(inside)) else name
                self.plain(part, label, item, context, [])

    def _other_side(self, part: Part, word: words.Name) -> bool:
        """Whether ``src`` or ``dst`` is the far end of this part's direction: a store's source is here."""
        want = part.want or part.context.hint
        if want == Flag.STORE:
            return word.target
        return word.source if want == Flag.LOAD else False

    def _order(self, part: Part, direction: int, fields: list[tuple[str, Any]], context: Context) -> None:
        """LMCache's style: a ``save_spec`` or ``load_spec`` that is there, and may still be switched off."""
        before = part.deny
        deeper: list[tuple[str, Any, Kind]] = []
        inner = Part(context)
        for name, value in fields:
            self.plain(inner, name, value, inner.context, deeper)
        part.deny |= inner.deny
        part.ids.extend(inner.ids)
        if part.deny & direction & ~before:
            return
        part.want |= direction
        ordered = part.values(direction)
        for values in (inner.neutral, *inner.directed.values()):
            ordered.numbers.extend(values.numbers)
            ordered.spans.extend(values.spans)

    def mapping(
        self,
        part: Part,
        name: str,
        value: dict[Any, Any],
        context: Context,
        by_request: dict[str, list[tuple[str, Any]]],
    ) -> None:
        """A dictionary: of requests, of names, or of whatever keys."""
        rest: list[tuple[Any, Any]] = []
        if value and set(map(type, dict.values(value))) == {int} and value == self.holdings.scheduled:
            return  # what the step computes, as the scheduler has it
        for key, item in shapes.pairs(value):
            request = self._key_request(key)
            if request is None:
                rest.append((key, item))
            elif not (context.foreign or _says_nothing(item)):
                by_request.setdefault(request, []).append((name, item))
        if not rest:
            return
        kinds = {shapes.kind_of(item) for _, item in rest}
        texts = all(type(key) is str for key, _ in rest)
        if kinds == {Kind.NUMBER} and not (texts and _is_named(rest)):
            self.columns(part, name, [[key, item] for key, item in rest], value, context)
        elif context.ids and texts and not kinds <= {Kind.TEXT, Kind.BYTES, Kind.NOTHING, Kind.FLAG}:
            self.nested(part, name, rest, context)  # whose it is is known: these are its fields
        elif kinds <= {Kind.LIST, Kind.ARRAY} and not texts:
            self.lists_by_key(part, name, rest, value, context)
        elif kinds <= {Kind.RECORD, Kind.MAP, Kind.LIST, Kind.ARRAY} and not (texts and _is_named(rest)):
            for key, item in rest:
                self.item(part, item, context.item(), key)
        elif kinds <= {Kind.TEXT, Kind.BYTES, Kind.NOTHING, Kind.FLAG}:
            keys = [key for key, _ in rest]
            if all(shapes.kind_of(key) is Kind.NUMBER for key in keys):
                self.columns(part, name, [[key] for key in keys], value, context)
        elif texts:
            self.nested(part, name, rest, context)
        else:
            self.problem(context.field, shapes.describe(value))

    def _key_request(self, key: Any) -> str | None:
        """The request that a dictionary's key names."""
        if type(key) is str:
            return key if self.holdings.knows(key) else None
        if type(key) is tuple:
            known = [one for one in key if type(one) is str and self.holdings.knows(one)]
            return known[0] if len(known) == 1 else None
        return None

    def lists_by_key(
        self, part: Part, name: str, rest: list[tuple[Any, Any]], value: Any, context: Context
    ) -> None:
        """Keys that are no names: KV cache groups, job or event numbers, hashes."""
        listed = [item for _, item in rest]
        texts = [
            [one for one in item if type(one) is str]
            for item in listed
            if isinstance(item, (list, tuple, set))
        ]
        if sum(map(len, texts)) and all(
            len(found) == len(item) for found, item in zip(texts, listed, strict=False)
        ):
            known = {one for found in texts for one in found if self.holdings.knows(one)}
            part.near.setdefault(words.direction(name), set()).update(known)
            return
        inner = [shapes.integers(item, shapes.kind_of(item)) for item in listed if len(item)]
        groups = [key for key, _ in rest]
        if not inner:
            return
        if all(one is not None for one in inner) and groups == list(range(len(groups))):
            if not (context.foreign or words.read(name).no_kv):
                found = tuple(one for one in inner if one is not None)
                _put(part, name).lists.append(Listed(name, context.field, value, None, found))
            return
        for key, item in rest:
            self.item(part, item, context.item(), key)

    def sequence(self, part: Part, name: str, listed: list[Any], context: Context) -> None:
        """A list that is no list of integers."""
        kinds = {shapes.kind_of(item) for item in listed}
        inner = context.item()
        if not listed or kinds <= {Kind.BYTES, Kind.NOTHING, Kind.FLAG, Kind.ENUM}:
            return
        if kinds <= {Kind.TEXT, Kind.NOTHING}:
            self.texts(part, name, [str(item) for item in listed if item is not None], context)
        elif kinds == {Kind.LIST} and all(_is_row(item) for item in listed):
            self.columns(part, name, [list(item) for item in listed], listed, context)
        elif kinds <= {Kind.RECORD, Kind.MAP, Kind.LIST, Kind.ARRAY}:
            for item in listed:
                self.item(part, item, inner)
        elif (context.label and not name) or kinds & {Kind.RECORD, Kind.MAP, Kind.LIST, Kind.ARRAY}:
            # a plain tuple whose places have no names
            self.record([("", item) for item in listed], context, Part(context))
        elif kinds <= shapes.SCALARS:
            self.record([("", item) for item in listed], context, Part(context))
        else:
            strange = [item for item in listed if shapes.kind_of(item) not in shapes.SCALARS]
            self.problem(inner.field, shapes.describe(strange[0]))

    def item(self, part: Part, item: Any, context: Context, key: Any = None) -> None:
        """One item of a container: an entry, or another container."""
        kind = shapes.kind_of(item)
        if shapes.is_child(item):
            self.metadata(item, context)
        elif kind is Kind.RECORD:
            cls = type(item).__name__
            fields = shapes.fields(item)
            if words.read(cls).foreign or context.foreign:
                return
            self._opaque(fields, context, item)
            self.record(fields, context, Part(context, cls))
        elif kind is Kind.MAP:
            fields = shapes.pairs(item)
            if not _is_address(fields):
                self.record(fields, context, Part(context), keyed=True)
        elif kind in (Kind.LIST, Kind.ARRAY):
            listed = (
                [("", item)] if shapes.integers(item, kind) else [("", one) for one in shapes.items(item)]
            )
            self.record(listed, context, Part(context))

    def _opaque(self, fields: list[tuple[str, Any]], context: Context, item: Any) -> None:
        """An item that holds nothing but what can't be looked into."""
        kinds = {shapes.kind_of(value) for _, value in fields}
        if not fields or kinds <= {Kind.BYTES, Kind.OPAQUE, Kind.NOTHING}:
            shape = ", ".join(f"{name}: {type(value).__name__}" for name, value in fields[:4])
            self.problem(context.field, f"{type(item).__name__}({shape})")

    def texts(self, part: Part, name: str, listed: list[str], context: Context) -> None:
        """Texts: ids of requests, or keys and the like."""
        word = words.read(name)
        known = [text for text in listed if self.holdings.knows(text)]
        if not word.direction or context.foreign:
            part.near.setdefault(0, set()).update(known)
        elif known:
            part.near.setdefault(word.direction, set()).update(known)
            problem = Problem(context.field, "ids of requests, and not how much of them")
            part.orders.append((word.direction, problem))
        else:
            part.orders.append((word.direction, Problem(context.field, "list of strs")))

    def columns(self, part: Part, name: str, rows: list[list[Any]], raw: Any, context: Context) -> None:
        """Rows of plain values, all of a length: an entry each where they name requests, else columns."""
        if context.foreign or words.read(name).no_kv:
            return
        if any(type(value) is str and self.holdings.knows(value) for value in rows[0]):
            for row in rows:
                item = context.item()
                self.record([("", value) for value in row], item, Part(item))
            return
        if len({len(row) for row in rows}) != 1:
            self.problem(context.field, shapes.describe(raw))
            return
        found = []
        for column in zip(*rows, strict=True):
            numbers = shapes.integers(list(column), Kind.LIST)
            if numbers is not None:
                found.append(numbers)
        if found:
            where = _put(part, name)
            where.lists.append(
                Listed(name or context.label, context.field, raw, None, tuple(found), columns=True)
            )

    def problem(self, way: str, shape: str) -> None:
        if len(self.problems) < 64:
            self.problems.append(Problem(way, shape))


def _with_pairs(fields: list[tuple[Any, Any]], sizes: Sequence[int]) -> list[tuple[Any, Any]]:
    """Two numbers side by side, and no third but 0, in places without names: one pair, from and to. Beside
    the token ids of whole blocks, and these, two zeros are none: these say how much it is."""
    if any(key for key, _ in fields):
        return fields
    said = _says_how_much([value for _, value in fields], sizes)
    found: list[tuple[Any, Any]] = []
    for number, run in groupby(fields, key=lambda one: type(one[1]) is int):
        values = list(run)
        if number and _begins_with_pair([value for _, value in values], said):
            found.append(("", slice(values[0][1], values[1][1])))
        else:
            found.extend(values)
    return found


def _says_how_much(values: list[Any], sizes: Sequence[int]) -> bool:
    """Whether one list is as long as another one's blocks have slots."""
    lists = [value for value in values if type(value) in (list, tuple) and value and type(value[0]) is int]
    lengths = {len(value) for value in lists}
    return any(length * size in lengths for length in lengths for size in sizes if size > 1)


def _begins_with_pair(numbers: list[int], said: bool) -> bool:
    pair = len(numbers) > 1 and 0 <= numbers[0] <= numbers[1] and not any(numbers[2:])
    return pair and not (said and not numbers[1])


def _is_each(word: words.Name) -> bool:
    return word.each and not word.fact


def _is_order(name: str) -> bool:
    """Whether a list of ids may be that of entries, and not tell which requests run or are over."""
    word = words.read(name)
    return not (word.table or word.state)


def _goes_along(name: Any, value: Any, count: int, ragged: bool) -> bool:
    """Whether a list beside one of ids has an item for each, and is no list of KV itself.

    ``ragged``: a list of blocks was cut for these ids: what else there is has a number for each.
    """
    kinds = {shapes.kind_of(item) for item in value}
    word = words.read(str(name))
    if any(shapes.kind_of(item) is Kind.LIST and len(item) and not _is_numeric(item) for item in value):
        return False  # records of their own
    if kinds <= {Kind.NUMBER}:
        return ragged or word.each or (count > 1 and not word.no_kv)
    return not kinds & {Kind.NOTHING, Kind.OPAQUE} and (count > 1 or Kind.TEXT not in kinds)


_HOLDING = (Kind.LIST, Kind.MAP, Kind.ARRAY, Kind.RECORD, Kind.SLICE)


def _orders_last(deeper: tuple[str, Any, Kind]) -> bool:
    """Sorts records of plain values first: they may say the direction of all the others."""
    _, value, kind = deeper
    return kind is not Kind.RECORD or any(
        shapes.kind_of(item) in _HOLDING for _, item in shapes.fields(value)
    )


def _says_nothing(value: Any) -> bool:
    """Texts and times say nothing of KV, whatever stands beside them."""
    return shapes.kind_of(value) in (Kind.TEXT, Kind.BYTES, Kind.NOTHING)


def _put(part: Part, name: str) -> Values:
    """Where a value of that name belongs: to the direction that its own name says, or to the part."""
    word = words.read(name)
    return part.values(0 if word.over else word.direction)


def _flag(part: Part, name: str, value: bool, exclusive: bool) -> None:
    word = words.read(name)
    if not word.direction or word.state:
        return
    if word.negated:
        part.deny |= word.direction if value else 0
    elif value:
        part.want |= word.direction
        part.deny &= ~word.direction
    else:
        part.deny |= word.direction
        if exclusive and word.direction == Flag.STORE:
            part.want |= Flag.LOAD


def _lists(value: Any, kind: Kind) -> tuple[Integers, ...] | None:
    """The lists of a list of lists of integers, empty ones left out; None where it is none."""
    listed = shapes.rows(value) if kind is Kind.ARRAY else shapes.items(value)
    if not listed or len(listed) > 4096:
        return None
    found = []
    for item in listed:
        kind = shapes.kind_of(item)
        if kind is Kind.LIST and not len(item):
            continue
        numbers = shapes.integers(item, kind)
        if numbers is None:
            return None
        found.append(numbers)
    return tuple(found) or None


def _is_row(item: Any) -> bool:
    """A plain tuple or list of plain values, not all of them integers."""
    return 0 < len(item) <= 8 and all(
        shapes.kind_of(value) in (Kind.TEXT, Kind.BYTES, Kind.NUMBER, Kind.NOTHING) for value in item
    )


def _is_numeric(item: Any) -> bool:
    kind = shapes.kind_of(item)
    return shapes.integers(item, kind) is not None or _lists(item, kind) is not None


def _is_named(rest: list[tuple[Any, Any]]) -> bool:
    """Whether a dictionary's keys are names of fields: some of them say what a number is."""
    for key, _ in rest:
        word = words.read(str(key))
        if word.start or word.end or word.count or word.unit or word.span or word.direction:
            return True
        if str(key).lower() in words.ID_FIELDS:
            return True
    return False


_ADDRESS = {"host", "addr", "address", "endpoint", "url", "port", "ip", "hostname", "socket"}


def _is_address(fields: list[tuple[Any, Any]]) -> bool:
    """Whether a record tells where another agent is to be reached, and names no KV of this one."""
    found = False
    for key, value in fields:
        kind = shapes.kind_of(value)
        if kind is Kind.TEXT:
            found = found or bool(_ADDRESS & set(words.words(str(key))))
        elif kind in (Kind.LIST, Kind.ARRAY) and not words.read(str(key)).foreign and _is_numeric(value):
            return False
    return found
