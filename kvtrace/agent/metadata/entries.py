"""From the parts of a step's metadata to its entries: whose KV, which way, from where to where.

The request is the one that holds what the lists name (an id beside them is checked against that). The
direction is what names say, else what can only be meant: what the connector was asked for a moment ago and
is not there yet is loaded, what is computed in this step is stored. Where there is a choice left, the entry
says less, and a problem says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kvtrace.agent.metadata import identify, positions, words
from kvtrace.agent.metadata.holdings import Holdings, Interval
from kvtrace.agent.metadata.identify import BLOCK, SLOT, TOKEN, Reading
from kvtrace.agent.metadata.parts import Listed, Part, Problem, Values
from kvtrace.agent.metadata.shapes import Integers
from kvtrace.trace.format import UNKNOWN, Flag

_STORE, _LOAD = int(Flag.STORE), int(Flag.LOAD)
_MOST_BLOCKS = 4096
_TELLING = 8
"""Token ids, under whatever name, that are a request's own by no chance."""


@dataclass
class Entry:
    """One request's part in a step's metadata. Counts are -1 where the entry doesn't say.

    ``slots``: KV slots that it names; ``tokens``: tokens that it speaks of; ``start``: position of the first.
    """

    req_id: str | None = None
    direction: int = 0
    slots: int = UNKNOWN
    tokens: int = UNKNOWN
    start: int = UNKNOWN
    field: str = ""
    child: int = 0


@dataclass(frozen=True)
class _Found:
    """What the lists of a part name in one request. ``bound``: positions of the token ids beside them."""

    ranges: tuple[Interval, ...] = ()
    bound: Interval | None = None
    unit: str = ""
    unclear: Listed | None = None
    other: tuple[Listed, ...] = ()
    """Lists that are nothing of this request's."""


class Resolver:
    """Turns parts into entries and problems."""

    def __init__(self, holdings: Holdings) -> None:
        self.holdings = holdings
        self.problems: list[Problem] = []
        self._direction = 0
        self._counts: dict[tuple[str, int], list[tuple[int, Problem]]] = {}
        """Numbers of parts that name nothing else, by request and direction."""
        self._read: dict[tuple[str, int], tuple[Listed, list[Reading]]] = {}
        """What the lists of the part at hand can be, of each request that was asked for."""

    def settle(self, entries: list[Entry]) -> list[Entry]:
        """Counts beside a request's id say again how much of it other entries name, or are not understood."""
        unsure: list[Entry] = []
        for (req_id, direction), counts in self._counts.items():
            same = [
                one
                for one in entries
                if one.req_id == req_id and direction in (0, one.direction) and one.direction
            ]
            named = sum(max(one.slots, 0) for one in same)
            total = sum(value for value, _ in counts)
            if named and (total == named or any(total * size == named for size in self.holdings.sizes)):
                continue
            self.problems.extend(problem for _, problem in counts)
            if direction:
                unsure.append(Entry(req_id, direction, field=counts[0][1].field))
        return unsure

    def entries(self, part: Part) -> list[Entry]:
        """The entries of one part, in the order of their positions; of both directions the store first."""
        self._read.clear()
        found = self._entries(part)
        for entry in found:
            entry.child = part.context.child
        return found

    def _entries(self, part: Part) -> list[Entry]:
        found: list[Entry] = []
        directions = _directions(part)
        for direction in directions:
            self._direction = direction
            values = _values_for(part, direction)
            if not direction and not any(values):
                continue
            found.extend(self._one_way(part, direction, values))
        for direction, problem in [] if part.has_lists() else part.orders:
            self._direction = direction
            named = part.near.get(direction) or set(part.ids)
            found.extend(Entry(req_id, direction, field=problem.field) for req_id in sorted(named))
            self._problem(problem.field, problem.shape)
        return found

    def _one_way(self, part: Part, direction: int, values: list[Values]) -> list[Entry]:
        lists = [listed for one in values for listed in one.lists]
        if any(one.lists for one in values[1:]):
            lists = [listed for one in values[1:] for listed in one.lists]  # of this direction alone
        intervals = [listed for listed in lists if isinstance(listed.raw, range)]
        if 0 < len(intervals) < len(lists):  # which of those beside them
            lists = [listed for listed in lists if not isinstance(listed.raw, range)]
            values = [*values, *_intervals(intervals)]
        if not self.holdings:
            return self._by_names(part, direction, values, lists)
        if part.root and not part.ids and lists and self._flat(lists):
            return list(self._split(part, direction, values, lists))
        req_id, candidates = self._request(part, direction, lists)
        if req_id is None and len(candidates) > 1:
            self._doubt(part, lists, f"blocks that {len(candidates)} requests share")
            return [Entry(None, direction, field=part.context.field)] if direction else []
        if req_id is None and lists and not part.ids:
            return list(self._split(part, direction, values, lists))
        if req_id is None:
            return self._nobodys(part, direction, values)
        if not part.ids and (either := self._blocks_too(req_id, lists)) is not None:
            self._doubt(part, [either], "slots of one request, or blocks of several")
            return [Entry(None, direction, field=part.context.field)] if direction else []
        return self._of_request(part, direction, values, lists, req_id)

    # --- whose it is --------------------------------------------------------------------------------

    def _request(self, part: Part, direction: int, lists: list[Listed]) -> tuple[str | None, list[str]]:
        """The request that a part speaks of; several where that is open."""
        ids = list(dict.fromkeys(part.ids))
        if len(ids) == 1:
            return ids[0], []
        if len(ids) > 1:
            holders = [one for one in ids if self._holds_all(one, lists)]
            return (holders[0], []) if len(holders) == 1 else (None, ids)
        found, contradict = self._holders(lists)
        if contradict:
            return None, found
        near = part.near.get(direction, set()) | part.near.get(0, set())
        found = [one for one in found if one in near] or found
        if len(found) > 1:
            found = [one for one in found if self._takes_part(one)] or found
        if len(found) > 1:
            found = [one for one in found if self._made_here(one, lists)] or found
        return (found[0], []) if len(found) == 1 else (None, found)

    def _takes_part(self, req_id: str) -> bool:
        """Whether the step computes something of the request, or it waits for a load."""
        return req_id in self.holdings.scheduled or self.holdings.awaited(req_id) is not None

    def _holds_all(self, req_id: str, lists: list[Listed]) -> bool:
        """Whether some list is of this request's blocks or slots."""
        return any(reading.unit != TOKEN for listed in lists for reading in self._readings(req_id, listed))

    def _made_here(self, req_id: str, lists: list[Listed]) -> bool:
        """Whether the request computes what the lists name, and did not find it in the GPU's prefix cache."""
        computed = self.holdings.computed(req_id)
        awaited = self.holdings.awaited(req_id)
        for listed in lists:
            for reading in self._readings(req_id, listed):
                if reading.unit == TOKEN:
                    continue
                start, end = reading.hull
                if computed is not None and start < computed[1] and end > max(computed[0], 0):
                    return computed[1] > computed[0] and end > self.holdings.local(req_id)
                if awaited is not None and start < awaited[1] and end > awaited[0]:
                    return True
                if computed is not None and start >= self.holdings.local(req_id):
                    return True
        return False

    def _holders(self, lists: list[Listed]) -> tuple[list[str], bool]:
        """Requests of which the lists name blocks or slots, and nothing but their own; and whether the lists
        contradict each other."""
        found: list[tuple[Listed, set[str]]] = []
        for listed in lists:
            numbers = listed.numbers if listed.numbers is not None else listed.inner[0]
            holders = (
                []
                if numbers.hidden
                else [one for one in self._candidates(numbers) if self._holds(one, listed)]
            )
            if holders:
                found.append((listed, set(holders)))
        found = [one for one in found if words.read(one[0].name).unit] or found
        if found:
            both = set.intersection(*(holders for _, holders in found))
            if not both:  # one list is of one request, one of another
                return sorted(set.union(*(holders for _, holders in found))), True
            return sorted(both), False
        for listed in lists:
            long = listed.numbers is not None and listed.numbers.length >= _TELLING
            if long or (listed.numbers is not None and words.read(listed.name).unit == TOKEN):
                return [one for one in self.holdings.scheduled if self._readings(one, listed)], False
        return [], False

    def _holds(self, req_id: str, listed: Listed) -> bool:
        return any(reading.unit != TOKEN for reading in self._readings(req_id, listed))

    def _blocks_too(self, req_id: str, lists: list[Listed]) -> Listed | None:
        """A list that could be one request's slots as well as blocks of several."""
        for listed in lists:
            if words.read(listed.name).unit or {way.unit for way in self._readings(req_id, listed)} != {SLOT}:
                continue
            for numbers in (listed.numbers,) if listed.numbers is not None else listed.inner:
                if numbers.length <= _MOST_BLOCKS and all(map(self.holdings.holders, numbers.whole())):
                    return listed
        return None

    def _candidates(self, numbers: Integers) -> list[str]:
        """Requests that may hold a list: by its first number, as a block and as a slot."""
        first = numbers.at(0) or (numbers.at(numbers.length - 1) if numbers.length else 0)
        found = list(self.holdings.holders(first))
        for size in dict.fromkeys(self.holdings.sizes):
            found.extend(self.holdings.holders(first // size))
        return list(dict.fromkeys(found))

    # --- what its lists name ------------------------------------------------------------------------

    def _readings(self, req_id: str, listed: Listed) -> list[Reading]:
        key = (req_id, id(listed))
        known = self._read.get(key)
        if known is None:
            known = self._read[key] = (listed, self._read_as(req_id, listed))
        return known[1]

    def _read_as(self, req_id: str, listed: Listed) -> list[Reading]:
        if listed.numbers is not None:
            return identify.readings(self.holdings, req_id, listed.numbers)
        found: list[Reading] = []
        if not listed.columns:
            groups = identify.group_readings(self.holdings, req_id, listed.inner)
            if groups is not None:
                found.append(groups)
            if groups is not None and len(listed.inner) <= len(self.holdings.sizes):
                return found  # a list a KV cache group, as vLLM itself has them
        if listed.columns or _is_columns(listed.inner):
            columns = listed.inner if listed.columns else _transposed(listed.inner)
            for column in columns:
                ways = identify.readings(self.holdings, req_id, column)
                found.extend(reading for reading in ways if reading.unit != TOKEN)
        return found

    def _named(self, req_id: str, lists: list[Listed]) -> _Found:
        """Which of a request's positions the lists name together."""
        sure: list[tuple[Listed, Reading]] = []
        weak: list[tuple[Listed, Reading]] = []
        open_: list[tuple[Listed, list[Reading]]] = []
        other: list[Listed] = []
        for listed in lists:
            ways = [
                way for way in self._readings(req_id, listed) if way.strict or words.read(listed.name).unit
            ]
            unit = words.read(listed.name).unit
            ways = [way for way in ways if way.unit == unit] or ways
            if not ways:
                other.append(listed)
            elif len(ways) > 1:
                open_.append((listed, ways))
            elif _is_weak(listed, ways[0]):
                weak.append((listed, ways[0]))
            else:
                sure.append((listed, ways[0]))
        for listed, ways in open_:
            fits = [way for way in ways if any(_agree(way, known) for _, known in sure)]
            if len(fits) != 1:
                return _Found(unclear=listed)
            sure.append((listed, fits[0]))
        places = [one for one in sure if one[1].unit != TOKEN]
        if (either := _either(places, weak)) is not None:
            return _Found(unclear=either)
        places = places or [one for one in weak if one[1].unit != TOKEN]
        tokens = [one for one in (*sure, *weak) if one[1].unit == TOKEN and not words.read(one[0].name).fact]
        tokens = tokens or ([] if places else [one for one in sure if one[1].unit == TOKEN])
        return self._together(places, tokens, tuple(other))

    def _together(
        self,
        places: list[tuple[Listed, Reading]],
        tokens: list[tuple[Listed, Reading]],
        other: tuple[Listed, ...],
    ) -> _Found:
        bounds = {way.hull for _, way in tokens}
        if len(bounds) > 1:
            return _Found(unclear=tokens[0][0])
        bound = next(iter(bounds), None)
        if not places:
            return _Found(bound=bound, unit=TOKEN if bound else "", other=other)
        best = places
        if len({way.ranges for _, way in places}) > 1:
            best = [one for one in places if words.read(one[0].name).unit] or places
            slots = [one for one in best if one[1].unit == SLOT]
            blocks = {way.ranges for _, way in best if way.unit == BLOCK}
            if slots and all(_fills(way, named, self._slack()) for _, way in slots for named in blocks):
                best = slots
        if len({way.ranges for _, way in best}) > 1:
            return _Found(unclear=best[0][0])
        reading = best[0][1]
        if bound is not None and (bound[1] <= reading.hull[0] or bound[0] >= reading.hull[1]):
            return _Found(unclear=tokens[0][0])
        return _Found(reading.ranges, bound, reading.unit, None, other)

    # --- entries ------------------------------------------------------------------------------------

    def _of_request(
        self, part: Part, direction: int, values: list[Values], lists: list[Listed], req_id: str
    ) -> list[Entry]:
        found = self._named(req_id, lists)
        where = part.context.field
        if part.each is not None and found.ranges:
            self._problem(part.each.field, part.each.shape)
            return self._unsure(part, direction, req_id)
        if found.unclear is not None:
            self._doubt(part, [found.unclear], found.unclear.shape())
            return self._unsure(part, direction, req_id)
        if not found.ranges and found.bound is None:
            return self._without_places(part, direction, values, found, req_id)
        facts = self._facts(req_id, direction)
        values = [*values, *_intervals(found.other)]
        try:
            placed = positions.place(values, found.ranges, found.bound, facts)
        except positions.Unclear as unclear:
            self._problem(_at(where, str(unclear)), "a number that is not understood")
            return self._unsure(part, direction, req_id)
        if placed is None:
            return self._unsure(part, direction, req_id)
        ranges = placed.ranges
        if not direction:
            direction = self._infer(part, req_id, ranges, found.unit)
            if not direction:
                return self._undirected(part, req_id, lists, ranges)
        if direction == _STORE and self._still_awaited(req_id, ranges):
            self._doubt(part, lists, "a store of what is still to come")
            return [Entry(req_id, 0, field=where)]
        if not ranges:
            return (
                []
                if placed.counted and not part.context.hint and not part.want & direction
                else [Entry(req_id, direction, 0, UNKNOWN, UNKNOWN, where)]
            )
        return _entries(req_id, direction, placed, found.unit != TOKEN, where)

    def _without_places(
        self, part: Part, direction: int, values: list[Values], found: _Found, req_id: str
    ) -> list[Entry]:
        """No list names anything of the request's: numbers alone, an empty list, or nothing."""
        where = part.context.field
        if found.other:
            named = [listed for listed in found.other if words.read(listed.name).unit]
            if direction or named:
                self._doubt(part, named or list(found.other), "")
                return self._unsure(part, direction, req_id)
            if not direction:
                return []
        empty = any(one.empty for one in values)
        numbers = [value for one in values for _, value in one.numbers]
        try:
            placed = positions.place(values, (), None, self._facts(req_id, direction))
        except positions.Unclear as unclear:
            problem = Problem(_at(where, str(unclear)), "a number that is not understood", direction == _LOAD)
            if len(numbers) == 1 and not any(one.spans for one in values):
                self._counts.setdefault((req_id, direction), []).append((numbers[0], problem))
                return []
            self.problems.append(problem)
            return self._unsure(part, direction, req_id)
        if not direction:
            if placed is not None and placed.ranges:
                self._problem(where, "positions, and neither store nor load")
            return []
        if empty:
            return [Entry(req_id, direction, 0, field=where)]
        if placed is None:
            if _ordered(part, direction):
                self._problem(where or part.name, "a request's id, and not how much of it")
                return self._unsure(part, direction, req_id)
            return []
        if not placed.ranges:
            return [] if not _ordered(part, direction) else [Entry(req_id, direction, 0, field=where)]
        return [Entry(req_id, direction, UNKNOWN, end - start, start, where) for start, end in placed.ranges]

    def _nobodys(self, part: Part, direction: int, values: list[Values]) -> list[Entry]:
        """Neither id nor list says whose it is."""
        where = part.context.field
        if part.root or not direction:
            return []
        if any(one.empty for one in values):
            return [Entry(None, direction, 0, field=where)]
        if part.strange_ids:
            numbers = [one for one in values if one.numbers or one.spans]
            self._problem(where, "an id of no request of this step")
            return [Entry(part.strange_ids[0], direction, field=where)] if numbers or part.has_lists() else []
        if any(one.numbers or one.spans for one in values):
            self._problem(where, "numbers of no request")
            return [Entry(None, direction, field=where)]
        if part.either is not None:
            self._problem(part.either.field, part.either.shape)
            return [Entry(None, direction, field=where)]
        return []

    def _flat(self, lists: list[Listed]) -> bool:
        """Whether lists of the metadata itself hold blocks, of whichever requests, and nothing else."""
        for listed in lists:
            numbers = listed.numbers
            if numbers is None or numbers.hidden or words.read(listed.name).unit in (SLOT, TOKEN):
                return False
            if numbers.length > _MOST_BLOCKS or not all(map(self.holdings.holders, numbers.whole())):
                return False
            if words.read(listed.name).unit != BLOCK and any(
                way.unit != BLOCK for one in self._candidates(numbers) for way in self._readings(one, listed)
            ):
                return False
        return True

    def _split(
        self, part: Part, direction: int, values: list[Values], lists: list[Listed]
    ) -> Iterator[Entry]:
        """Flat lists of blocks or slots: each number belongs to whoever holds it."""
        taken = False
        for listed in lists:
            for numbers in (listed.numbers,) if listed.numbers is not None else listed.inner:
                shares = self._shares(part, listed, numbers, direction)
                if shares is None:
                    continue
                taken = True
                if any(one.numbers or one.spans for one in values):
                    try:
                        positions.place(values, (), None, positions.Facts(direction, 0, 0))
                    except positions.Unclear as unclear:
                        self._problem(_at(part.context.field, str(unclear)), "a number")
                        return
                for req_id, share in shares.items():
                    single = replace(listed, numbers=share, inner=(), columns=False)
                    alone = [Values(lists=[single])]
                    yield from self._of_request(part, direction, alone, [single], req_id)
        if not taken and direction:
            self._doubt(part, lists, "")
            yield Entry(None, direction, field=part.context.field)

    def _shares(
        self, part: Part, listed: Listed, numbers: Integers, direction: int
    ) -> dict[str, Integers] | None:
        """The numbers of a list by the request that holds them; None where it is no list of KV."""
        if numbers.hidden:
            return None
        unit = words.read(listed.name).unit
        found: dict[str, list[int]] = {}
        for value in numbers.whole():
            owner = self._owner(part, direction, value) if unit != "slot" else None
            if owner is None:
                if unit != "block" or not found:
                    return None
                self._doubt(part, [listed], "blocks that no request holds, or several")
                return None
            found.setdefault(owner, []).append(value)
        return {req_id: Integers(blocks, len(blocks)) for req_id, blocks in found.items()}

    def _owner(self, part: Part, direction: int, block: int) -> str | None:
        found = self.holdings.holders(block)
        if len(found) > 1:
            single = Listed("blocks", "", [block], Integers([block], 1))
            found = [one for one in found if self._made_here(one, [single])]
        return found[0] if len(found) == 1 else None

    def _by_names(self, part: Part, direction: int, values: list[Values], lists: list[Listed]) -> list[Entry]:
        """Where no scheduler is known (a worker): sizes as far as names say them."""
        if not direction and not lists:
            return []
        entry = Entry(part.ids[0] if part.ids else None, direction, field=part.context.field)
        if any(one.empty for one in values):
            entry.slots = 0
        for listed in lists:
            unit = words.read(listed.name).unit
            if listed.numbers is not None and unit == "slot":
                entry.slots = listed.numbers.length
            elif listed.numbers is not None and unit == "token":
                entry.tokens = listed.numbers.length
        return [entry]

    # --- which way ----------------------------------------------------------------------------------

    def _infer(self, part: Part, req_id: str, ranges: tuple[Interval, ...], unit: str) -> int:
        """The direction that alone is possible in this step, 0 where several are."""
        computed, awaited = self.holdings.computed(req_id), self.holdings.awaited(req_id)
        if not ranges or part.tables:
            return 0
        start, end = ranges[0][0], ranges[-1][1]
        slack = self._slack()
        if awaited is not None and start < awaited[1] and end > awaited[0]:
            only = req_id not in self.holdings.scheduled or end <= awaited[1] + slack
            return _LOAD if only and not part.deny & _LOAD else 0
        if part.deny & _STORE or computed is None or end > computed[1] + slack:
            return 0
        size = max(self.holdings.sizes, default=1)
        if end == computed[1] and end % size and req_id in self.holdings.scheduled:
            return 0  # all that there is, to the token: as likely what the worker shall know
        decodes = 0 <= self.holdings.prompt(req_id) <= computed[0] < computed[1]
        # All of its blocks while it decodes: as likely what the worker shall know.
        return 0 if decodes and start == 0 and end > computed[0] else _STORE

    def _still_awaited(self, req_id: str, ranges: tuple[Interval, ...]) -> bool:
        """Whether all of it is on its way to a request that does not run yet."""
        awaited = self.holdings.awaited(req_id)
        if awaited is None or req_id in self.holdings.scheduled or not ranges:
            return False
        return awaited[0] <= ranges[0][0] and ranges[-1][1] <= awaited[1] + self._slack()

    def _slack(self) -> int:
        """A block at the end need not be full."""
        return max(self.holdings.sizes, default=1) - 1

    def _undirected(
        self, part: Part, req_id: str, lists: list[Listed], ranges: tuple[Interval, ...]
    ) -> list[Entry]:
        """KV that is named, and not what for. Where names say that it is no store, that is enough."""
        if not part.deny & _STORE:
            self._doubt(part, lists, "neither store nor load")
        start = ranges[0][0] if ranges else UNKNOWN
        return [Entry(req_id, 0, start=start, field=part.context.field)]

    def _unsure(self, part: Part, direction: int, req_id: str) -> list[Entry]:
        return [Entry(req_id, direction, field=part.context.field)] if direction else []

    # --- the rest -----------------------------------------------------------------------------------

    def _facts(self, req_id: str, direction: int) -> positions.Facts:
        holdings = self.holdings
        tables = holdings.tables(req_id)
        sizes = [holdings.size(group) * len(table) for group, table in enumerate(tables) if table]
        computed, awaited = holdings.computed(req_id), holdings.awaited(req_id)
        known = {holdings.prompt(req_id), *(computed or ()), *(awaited or ()), holdings.local(req_id)}
        known.add(len(holdings.tokens(req_id)))
        size = holdings.sizes[0] if len(set(holdings.sizes)) == 1 else 0
        capacity = min(sizes, default=0) or len(holdings.tokens(req_id))
        return positions.Facts(
            direction, size, capacity, frozenset(known), awaited, computed[1] if computed else 0
        )

    def _problem(self, way: str, shape: str) -> None:
        self.problems.append(Problem(way, shape, self._direction == _LOAD))

    def _doubt(self, part: Part, lists: list[Listed], shape: str) -> None:
        listed = lists[0] if lists else None
        way = listed.field if listed is not None else part.context.field
        text = shape or "numbers that no request of this step holds"
        if listed is not None and not shape:
            text = f"{listed.shape()}: {text}"
        self._problem(way, text)


def _entries(req_id: str, direction: int, placed: positions.Placed, named: bool, where: str) -> list[Entry]:
    """``named``: slots, by blocks or one by one; else the positions stand for themselves."""
    found = [
        Entry(req_id, direction, end - start if named else UNKNOWN, UNKNOWN, start, where)
        for start, end in placed.ranges
    ]
    for entry, (start, end) in zip(found, placed.ranges, strict=True):
        if placed.counted or not named:
            entry.tokens = end - start
    if placed.said and len(found) == 1:
        found[0].tokens = placed.said
    return found


def _directions(part: Part) -> list[int]:
    """The directions that a part has; [0] where it says none."""
    want = part.want
    for direction, values in part.directed.items():
        if values.lists or values.spans or _interval(values):
            want |= direction & ~part.deny
    if not want and part.inside:
        return []  # what is in it says it all
    if not want:
        want = part.context.hint & ~part.deny or _class_direction(part)
    return [one for one in (_STORE, _LOAD) if want & one] or [0]


def _class_direction(part: Part) -> int:
    """``SaveJob``: what a record's class is called says it, where nothing else does."""
    if part.deny or not part.name:
        return 0
    return words.direction(part.name)


def _interval(values: Values) -> bool:
    """Whether numbers of this direction say how much by themselves."""
    names = [words.read(name) for name, _ in values.numbers]
    return any(word.count and word.unit for word in names) or (
        any(word.start for word in names) and any(word.end for word in names)
    )


def _values_for(part: Part, direction: int) -> list[Values]:
    values = part.directed.get(direction) if direction else None
    return [part.neutral] if values is None else [part.neutral, values]


def _ordered(part: Part, direction: int) -> bool:
    """Whether the part is ordered to store or load, and not only near such words."""
    return (
        bool(part.want & direction)
        or bool(part.directed.get(direction))
        or bool(part.context.hint & direction)
    )


def _at(way: str, name: str) -> str:
    return f"{way}.{name}" if way else name


def _intervals(lists: Iterable[Listed]) -> list[Values]:
    """Consecutive numbers that are no blocks or slots of their own: positions, which of those beside them."""
    spans: list[tuple[str, Interval]] = []
    for listed in lists:
        numbers = listed.numbers
        if numbers is not None and _is_interval(listed) and numbers.is_run():
            spans.append((listed.name, (numbers.at(0), numbers.at(numbers.length - 1) + 1)))
    return [Values(spans=spans)] if spans else []


def _is_interval(listed: Listed) -> bool:
    """Whether a list is one of positions, as far as its kind or its name says it."""
    if isinstance(listed.raw, range):
        return listed.raw.step == 1
    return words.read(listed.name).span and listed.numbers is not None and listed.numbers.ordered


def _is_weak(listed: Listed, reading: Reading) -> bool:
    """Few numbers under a name that says nothing: they may be equal by chance."""
    if words.read(listed.name).unit == reading.unit:
        return False
    lists = (listed.numbers,) if listed.numbers is not None else listed.inner
    count = sum(one.length for one in lists)
    if reading.unit == BLOCK and count <= _TELLING:
        count = sum(1 for one in lists for value in one.whole() if value)  # 0 is nobody's block
    return count < 2 or (reading.unit == TOKEN and count < _TELLING)


def _either(places: list[tuple[Listed, Reading]], weak: list[tuple[Listed, Reading]]) -> Listed | None:
    """One block of those that stand beside it, where no name says which of the two is meant: it may be the
    entry's own, and the others all that the request has."""
    if any(words.read(listed.name).unit for listed, _ in places):
        return None
    for listed, way in weak:
        for _, other in places:
            within = other.hull[0] <= way.hull[0] and way.hull[1] <= other.hull[1]
            if way.unit == other.unit == BLOCK and within and way.ranges != other.ranges:
                return listed
    return None


def _agree(one: Reading, other: Reading) -> bool:
    return one.ranges == other.ranges or (
        one.tokens == other.tokens and one.unit == TOKEN and other.unit != TOKEN
    )


def _fills(slots: Reading, blocks: tuple[Interval, ...], slack: int) -> bool:
    """Whether slots are those of the blocks, but for the end of the last one."""
    return (
        len(slots.ranges) == len(blocks) == 1
        and slots.ranges[0][0] == blocks[0][0]
        and 0 <= blocks[0][1] - slots.ranges[0][1] <= slack
    )


def _is_columns(inner: tuple[Integers, ...]) -> bool:
    """Rows of two to four numbers: pairs of a block here and one elsewhere, perhaps."""
    return len(inner) > 1 and 2 <= inner[0].length <= 4 and len({one.length for one in inner}) == 1


def _transposed(inner: tuple[Integers, ...]) -> tuple[Integers, ...]:
    rows = [one.whole() for one in inner]
    return tuple(Integers(list(column), len(column)) for column in zip(*rows, strict=True))
