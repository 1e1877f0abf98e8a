"""From the parts of a step's metadata to its entries: whose KV, which way, from where to where.

The request is the one that holds what the lists name. The direction is what names say, else what can only be
meant: what the connector was asked for a moment ago and is not there yet is loaded, what is computed in this
step is stored. Where there is a choice left, the entry says less, and a problem says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from kvtrace.agent.metadata import identify, words
from kvtrace.agent.metadata.identify import BLOCK, SLOT, TOKEN, Reading
from kvtrace.agent.metadata.numbers import Known, Number, Span, Unclear, cut
from kvtrace.agent.metadata.shapes import Integers
from kvtrace.agent.metadata.step_requests import Interval, StepRequests
from kvtrace.agent.metadata.walk import Listed, Node, Problem
from kvtrace.trace.facts import NO_DIRECTION, NOBODYS
from kvtrace.trace.format import UNKNOWN, Flag

_STORE, _LOAD = int(Flag.STORE), int(Flag.LOAD)
_MOST_BLOCKS = 1 << 16
_TELLING = 8
"""So many token ids, under whatever name, are a request's own by no chance."""
_Named = TypeVar("_Named", Listed, Number, Span)


@dataclass
class DeclaredEntry:
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


class Resolver:
    """Turns parts into entries and problems."""

    def __init__(self, requests: StepRequests) -> None:
        self.requests = requests
        self.problems: list[Problem] = []
        self._known_ways: dict[tuple[str, int], tuple[Listed, list[Reading]]] = {}
        """What the lists of the part at hand are, of each request that was asked for."""

    def entries(self, part: Node) -> list[DeclaredEntry]:
        """The entries of one part; of both directions the store first."""
        self._known_ways.clear()
        found: list[DeclaredEntry] = []
        for direction in _directions(part):
            found.extend(self._one_way(part, direction))
        for direction, ids, problem in part.ordered:
            self._problem(problem.field, problem.shape, direction)
            found.extend(DeclaredEntry(req_id, direction, field=problem.field) for req_id in (ids or (None,)))
        return [replace(one, child=part.context.child) for one in found]

    def _one_way(self, part: Node, direction: int) -> list[DeclaredEntry]:
        where = part.context.field
        lists = _of_way([one for one in part.lists if one.span is None], direction)
        lists += _of_way([one for one in part.lists if one.span is not None], direction)
        if not self.requests:
            return self._by_names(part, direction, lists)
        if lists:
            shares, several = self._shares(part, lists)
            if not shares:
                if direction or part.ids or several or any(map(self._may_be_blocks, lists)):
                    self._problem(lists[0].field, f"{lists[0].shape}: {NOBODYS}", direction)
                    return [DeclaredEntry(_only(part.ids), direction, field=where)] if direction else []
                return []
            return [
                entry
                for req_id, named in shares
                for entry in self._of_request(part, direction, req_id, named)
            ]
        if not direction:
            return []
        if part.empty & {0, direction}:
            return [DeclaredEntry(_only(part.ids), direction, 0, field=where)]
        if (part.ids or part.want & direction or part.context.entry) and not part.inside:
            shape = "a request's id, and not how much of it" if part.ids else "an entry of no request"
            self._problem(where or part.name, shape, direction)
            return [DeclaredEntry(_only(part.ids), direction, field=where)]
        if part.hidden is not None and part.want & direction:
            self._problem(part.hidden.field, part.hidden.shape, direction)
            return [DeclaredEntry(None, direction, field=where)]
        return []

    # --- whose it is ------------------------------------------------------------------------------

    def _shares(self, part: Node, lists: Sequence[Listed]) -> tuple[list[tuple[str, list[Listed]]], bool]:
        """The lists by the request that they are of; and, where of none, whether several are open."""
        ids = list(dict.fromkeys(part.ids))
        if ids:
            own = [one for one in ids if any(self._readings(one, listed) for listed in lists)]
            return ([(own[0], list(lists))] if len(own) == 1 else []), len(own) > 1
        holding = [self._holding(listed) for listed in lists]
        holders = [self._meant(listed, some) for listed, some in zip(lists, holding, strict=True)]
        if not any(len(one) == 1 for one in holders):
            for listed, some in zip(lists, holding, strict=True):
                if not some and any(one.length >= _TELLING for one in listed.lists):
                    holders.append(self._meant(listed, self.requests.scheduled))
        sure = {one[0] for one in holders if len(one) == 1}
        if len(sure) == 1:
            return [(sure.pop(), list(lists))], False
        several = any(len(one) > 1 for one in holders) or bool(sure)
        return ([] if several else self._split(part, lists)), several

    def _holding(self, listed: Listed) -> list[str]:
        """The requests that hold the first block, or the block of the first slot, of a list."""
        found: list[str] = []
        for numbers in (*listed.lists, *listed.columns):
            if numbers.hidden or not numbers.length:
                continue
            first = numbers.at(0) or numbers.at(numbers.length - 1)
            sizes = dict.fromkeys((1, *self.requests.sizes))
            found.extend(one for size in sizes for one in self.requests.holders(first // size))
        return found

    def _meant(self, listed: Listed, requests: Iterable[str]) -> list[str]:
        """The requests of which a list names blocks, slots or many tokens: those that alone can be meant."""
        ways = {one: way for one in requests if (way := self._readings(one, listed))}
        units = {way[0].unit for way in ways.values()}
        if len(units) > 1 or (
            units == {SLOT} and not words.read(listed.name).unit and self._may_be_blocks(listed)
        ):
            return [*ways, ""]  # blocks of one, or slots of another
        found = list(ways)
        if len(found) > 1:
            found = [one for one in found if self._takes_part(one, listed)] or found
        return found

    def _takes_part(self, req_id: str, listed: Listed) -> bool:
        """Whether the request computes or awaits what the list names, and did not find it in a cache."""
        computed, awaited = self.requests.computed(req_id), self.requests.awaited(req_id)
        for way in self._readings(req_id, listed):
            start, end = way.hull
            if awaited is not None and start < awaited[1] and end > awaited[0]:
                return True
            if computed is not None and computed[1] > computed[0] and start < computed[1]:
                return end > max(computed[0], self.requests.local(req_id))
        return False

    def _split(self, part: Node, lists: Sequence[Listed]) -> list[tuple[str, list[Listed]]]:
        """Flat lists of blocks: each number belongs to whoever alone holds it."""
        if any(words.read(one.name).role for one in part.lists):
            return []  # which of them, is said by the other
        for listed in lists:
            if words.read(listed.name).unit not in ("", BLOCK):
                continue
            flat = [value for one in listed.lists if not one.hidden for value in one.whole()]
            found = [split] if (split := self._by_holder(flat)) else []
            found = found or [split for one in listed.columns if (split := self._by_holder(one.whole()))]
            if len(found) == 1:  # of several columns that may be the blocks none is known to be
                return [
                    (req_id, [replace(listed, lists=(Integers(own, len(own)),), columns=())])
                    for req_id, own in found[0].items()
                ]
        return []

    def _may_be_blocks(self, listed: Listed) -> bool:
        """Whether a list is called one of KV, or holds a block that a request holds."""
        if words.read(listed.name).unit in (BLOCK, SLOT, TOKEN):
            return True
        every = [one for one in (*listed.lists, *listed.columns) if not one.hidden and one.length]
        return any(any(map(self.requests.holders, one.whole()[:_MOST_BLOCKS])) for one in every)

    def _by_holder(self, blocks: list[int]) -> dict[str, list[int]]:
        """Blocks by the request that alone can be meant; none where one is of nobody, or of several."""
        found: dict[str, list[int]] = {}
        for block in blocks[:_MOST_BLOCKS]:
            holders = self.requests.holders(block)
            if len(holders) > 1:
                single = Listed("blocks", "", "", (Integers([block], 1),))
                holders = [one for one in holders if self._takes_part(one, single)]
            if len(holders) != 1:
                return {}
            found.setdefault(holders[0], []).append(block)
        return found if len(blocks) <= _MOST_BLOCKS else {}

    def _readings(self, req_id: str, listed: Listed) -> list[Reading]:
        """All ways to read a list as something of this request; one that its name says is the only one."""
        key = (req_id, id(listed))
        known = self._known_ways.get(key)
        if known is None:
            known = self._known_ways[key] = (listed, self._read_as(req_id, listed))
        return known[1]

    def _read_as(self, req_id: str, listed: Listed) -> list[Reading]:
        if len(listed.lists) > 1:
            groups = identify.group_readings(self.requests, req_id, listed.lists)
            ways = [] if groups is None or _by_chance(listed, listed.lists[0], groups) else [groups]
        else:
            ways = self._ways(req_id, listed, listed.lists)
        ways = ways or [way for way in self._ways(req_id, listed, listed.columns) if way.unit != TOKEN]
        unit = words.read(listed.name).unit
        return [way for way in ways if way.unit == unit or unit in ("", "chunk")]

    def _ways(self, req_id: str, listed: Listed, lists: Sequence[Integers]) -> list[Reading]:
        return [
            way
            for numbers in lists
            for way in identify.readings(self.requests, req_id, numbers)
            if not _by_chance(listed, numbers, way)
        ]

    # --- how much of it ---------------------------------------------------------------------------

    def _of_request(
        self, part: Node, direction: int, req_id: str, lists: list[Listed]
    ) -> list[DeclaredEntry]:
        where = part.context.field
        try:
            unit, ranges, said = self._named(part, direction, req_id, lists)
        except Unclear as unclear:
            self._problem(f"{where}.{unclear}".strip("."), "how much of it is not understood", direction)
            return [DeclaredEntry(req_id, direction, field=where)] if direction else []
        if not direction:
            direction = self._infer(part, req_id, ranges)
            if not direction:
                if not part.deny & _STORE:
                    self._problem(lists[0].field, NO_DIRECTION, 0)
                return [DeclaredEntry(req_id, 0, start=ranges[0][0] if ranges else UNKNOWN, field=where)]
        elif direction == _STORE and ranges and self._still_awaited(req_id, ranges):
            self._problem(lists[0].field, "a store of what is still to come", 0)
            return [DeclaredEntry(req_id, 0, field=where)]
        if not ranges:
            ordered = (part.want | part.context.hint) & direction
            return [DeclaredEntry(req_id, direction, 0, field=where)] if ordered else []
        found = []
        for start, end in ranges:
            slots = UNKNOWN if unit == TOKEN else end - start
            tokens = end - start if said or unit == TOKEN else UNKNOWN
            found.append(
                DeclaredEntry(req_id, direction, slots, max(tokens, said) if said else tokens, start, where)
            )
        return found

    def _named(
        self, part: Node, direction: int, req_id: str, lists: list[Listed]
    ) -> tuple[str, tuple[Interval, ...], int]:
        """Unit and positions of what the lists and the numbers beside them name; and how many tokens numbers
        say, which may be more than there are slots; 0 where they say nothing.

        Raises:
            Unclear: that is open.
        """
        read = [(listed, ways) for listed in lists if (ways := self._readings(req_id, listed))]
        for listed, ways in read:
            if len(read) > 1 and listed.span and not words.read(listed.name).role and ways[0].unit == BLOCK:
                raise Unclear(listed.name)  # two blocks, or from one position to the other
        if any(listed.span is None for listed, _ in read):  # beside others, positions say which of those
            read = [(listed, ways) for listed, ways in read if listed.span is None]
        if any(len({way.ranges for way in ways}) > 1 for _, ways in read):
            raise Unclear(next(listed.name for listed, ways in read if len(ways) > 1))
        found = [(listed, ways[0]) for listed, ways in read]
        named = [one for one in found if words.read(one[0].name).unit]  # any number may be a slot's by chance
        if not named and self._disagree([way for _, way in found]):
            raise Unclear(lists[0].name)
        for unit in (SLOT, BLOCK, TOKEN):
            of_unit = [one for one in named or found if one[1].unit == unit]
            if of_unit:
                break
        if len({way.ranges for _, way in of_unit}) != 1:
            raise Unclear(lists[0].name)
        ranges = of_unit[0][1].ranges
        bounds = [way.hull for listed, way in found if way.unit == TOKEN and not words.read(listed.name).fact]
        if unit == BLOCK and bounds:
            if len({*bounds}) > 1 or bounds[0][0] >= ranges[-1][1] or bounds[0][1] <= ranges[0][0]:
                raise Unclear("token ids")
            ranges = _clip(ranges, bounds[0])
        self._no_cuts(lists, found)
        if part.context.depth and part.empty & {0, direction}:
            raise Unclear("an empty list")
        numbers, spans = _of_way(part.numbers, direction), _of_way(part.spans, direction)
        ours = [listed for listed, _ in found]
        spans = [*spans, *((one.name, one.span) for one in lists if one.span and one not in ours)]
        hull = (ranges[0][0], ranges[-1][1])
        more = [one for one in numbers if _counts_tokens(one[0]) and one[1] > hull[1]]
        numbers = [one for one in numbers if one not in more]
        left = cut(numbers, spans, hull, self._known(req_id))
        if left is not None:
            if bounds and any(words.read(name).unit == "block" for name, _ in numbers):
                size = self._slack() + 1
                left = left[0], left[1] - left[1] % size  # what does not fill a block is none
            ranges = _clip(ranges, left)
        said = max((value for _, value in more), default=0)
        return unit, ranges, said if len(ranges) == 1 and said else int(left is not None or bool(bounds))

    def _disagree(self, ways: Iterable[Reading]) -> bool:
        """Whether one list may be slots, and another blocks that do not hold them to within one: the first
        may be places in the store."""
        of = {way.unit: way.hull for way in ways}
        slots, blocks = of.get(SLOT), of.get(BLOCK)
        if slots is None or blocks is None:
            return False
        return not all(0 <= off <= self._slack() for off in (slots[0] - blocks[0], blocks[1] - slots[1]))

    def _no_cuts(self, lists: list[Listed], found: list[tuple[Listed, Reading]]) -> None:
        """A list of positions or counts beside the others: which of them it means is not known.

        Raises:
            Unclear: there is one.
        """
        for listed in lists:
            word = words.read(listed.name)
            if (
                word.role
                and not word.fact
                and listed.span is None
                and not any(listed is one for one, _ in found)
            ):
                raise Unclear(listed.name)

    def _known(self, req_id: str) -> Known:
        requests = self.requests
        facts = {requests.prompt(req_id), requests.local(req_id), len(requests.tokens(req_id))}
        facts |= {*(requests.computed(req_id) or ()), *(requests.awaited(req_id) or ())}
        return Known(requests.sizes[0] if len({*requests.sizes}) == 1 else 0, frozenset(facts))

    # --- which way --------------------------------------------------------------------------------

    def _infer(self, part: Node, req_id: str, ranges: tuple[Interval, ...]) -> int:
        """The direction that alone is possible in this step, 0 where several are."""
        computed, awaited = self.requests.computed(req_id), self.requests.awaited(req_id)
        if not ranges:
            return 0
        start, end = ranges[0][0], ranges[-1][1]
        if awaited is not None and start < awaited[1] and end > awaited[0]:
            only = req_id not in self.requests.scheduled or end <= awaited[1] + self._slack()
            return _LOAD if only and not part.deny & _LOAD else 0
        if part.deny & _STORE or computed is None or end > computed[1] + self._slack():
            return 0
        # All of its blocks while it decodes, or to the token: as likely what the worker shall know.
        whole = end == computed[1] and end % (self._slack() + 1)
        decodes = 0 <= self.requests.prompt(req_id) <= computed[0] < computed[1]
        return 0 if whole or (decodes and start == 0 and end > computed[0]) else _STORE

    def _still_awaited(self, req_id: str, ranges: tuple[Interval, ...]) -> bool:
        """Whether all of it is on its way to a request that does not run yet."""
        awaited = self.requests.awaited(req_id)
        if awaited is None or req_id in self.requests.scheduled:
            return False
        return awaited[0] <= ranges[0][0] and ranges[-1][1] <= awaited[1] + self._slack()

    def _slack(self) -> int:
        """A block at the end need not be full."""
        return max(self.requests.sizes, default=1) - 1

    # --- the rest ---------------------------------------------------------------------------------

    def _by_names(self, part: Node, direction: int, lists: Sequence[Listed]) -> list[DeclaredEntry]:
        """Where no scheduler is known (a worker): how many entries, and slots where a name says so."""
        if not direction or not (lists or part.empty & {0, direction} or part.ids or part.numbers):
            return []
        slots = sum(one.lists[0].length for one in lists if words.read(one.name).unit == SLOT)
        known = part.empty & {0, direction} or any(words.read(one.name).unit == SLOT for one in lists)
        return [
            DeclaredEntry(_only(part.ids), direction, slots if known else UNKNOWN, field=part.context.field)
        ]

    def _problem(self, way: str, shape: str, direction: int) -> None:
        self.problems.append(Problem(way, shape, direction == _LOAD))


def _directions(part: Node) -> list[int]:
    """The directions that a part has; [0] where it says none."""
    want = part.want
    for listed in part.lists:
        want |= words.read(listed.name).direction & ~part.deny
    for name, value in part.numbers:
        word = words.read(name)
        if value and word.role in ("end", "count") and word.unit:
            want |= word.direction & ~part.deny
    if not want and any(words.read(name).direction and words.read(name).unit for name, _ in part.numbers):
        return []  # numbers of both directions, and none of them orders anything
    want = want or part.context.hint & ~part.deny or words.read(part.name).direction & ~part.deny
    return [one for one in (_STORE, _LOAD) if want & one] or [0]


def _of_way(values: Iterable[_Named], direction: int) -> list[_Named]:
    """Values whose names say this direction; where none does, those whose names say neither."""
    by_way: dict[int, list[_Named]] = {}
    for one in values:
        name = one.name if isinstance(one, Listed) else one[0]
        by_way.setdefault(words.read(name).direction, []).append(one)
    return by_way.get(direction) or by_way.get(0, [])


def _by_chance(listed: Listed, numbers: Integers, way: Reading) -> bool:
    """Few numbers under a name that says nothing: they may be equal by chance."""
    if words.read(listed.name).unit == way.unit:
        return False
    return not way.strict or numbers.length < {BLOCK: 1, SLOT: 2, TOKEN: _TELLING}[way.unit]


def _counts_tokens(name: str) -> bool:
    word = words.read(name)
    return word.role == "count" and word.unit == TOKEN and not word.fact


def _only(ids: Sequence[str]) -> str | None:
    return ids[0] if len({*ids}) == 1 else None


def _clip(ranges: Iterable[Interval], to: Interval) -> tuple[Interval, ...]:
    found = ((max(start, to[0]), min(end, to[1])) for start, end in ranges)
    return tuple((start, end) for start, end in found if start < end)
