"""What became of the KV that a worker read: from what was seen leaving the process and coming to rest.

The input are the SLOTS, LEFT, FOUND and PIECE records of one spool, and what lay at the files when the run
was over. The output says, for each watched call and layer, which slots of those that the call read fared how.
It knows of no request: whose tokens the slots were is the ledger's business.

Nothing is concluded from silence. A store in plain memory, a native library or another process gives nothing
to see: what was read stays READ. A connector that compresses in an unknown way gives nothing to find byte for
byte: the same.
Only where this connector's KV is found elsewhere in this run is KV that is not found missing; and only where
nothing that left could hold what was read are empty files its store.

What is not judged here: KV that was read and never left because the same prefix was at rest already
(NEVER_LEFT of a token whose prefix another request has at rest is no loss), and exceptions.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from kvtrace.ledger.intervals import Interval, length, subtract, union
from kvtrace.ledger.rest_file import GONE, LEFT_BEHIND, STILL, RestFile, RestingFile
from kvtrace.ledger.saves.held import Read, dropped, in_memory
from kvtrace.ledger.slots.sets import parse
from kvtrace.trace import rows
from kvtrace.trace.format import PEER, Flag, Form, Way
from kvtrace.trace.reader import Records


class Fate(IntEnum):
    """How KV that was read fared."""

    READ = 0
    """Nothing was seen of its further way."""
    WRITTEN = 1
    """Seen leaving the process, byte for byte or as numbers of a narrower type, without an error."""
    PROVED = 2
    """The same, and it stands in its file at the end of the run."""
    PUT_FAILED = 3
    """It was sent, and the answer was an error or none; or the store could not be reached."""
    NEVER_LEFT = 4
    """It was read and is in nothing that left, while other KV of this connector is."""
    NOT_AT_REST = 5
    """What came to rest of it is empty, cut, or was never committed or given its name."""
    LOST_LATER = 6
    """At rest once, and removed or overwritten by the end of the run."""
    ALTERED = 7
    """It left as other numbers than those that were read."""
    REPLACED = 8
    """As LOST_LATER: other bytes stand there now."""
    LEFT_BEHIND = 9
    """It stands where it stood; what is found by its name may be other KV, which came later."""
    DOUBTED = 10
    """It may have been read for an earlier holder of its blocks, and be kept under that one's name."""


class Why(IntEnum):
    NONE = 0
    REFUSED = 1
    UNREACHABLE = 2
    EMPTY = 3
    CUT = 4
    TEMPORARY = 5
    UNCOMMITTED = 6
    REMOVED = 7
    OVERWRITTEN = 8
    ZEROED = 9
    ROUNDED = 10
    """It went through a narrower type, and its numbers are not the same."""
    NARROWER = 11
    """As numbers of a narrower type: WRITTEN."""
    NOT_WHOLE = 12
    """It is at rest in a record of several layers, of which others never left."""
    NOT_HELD = 13
    """It is not held in memory, where other KV of its step and of earlier ones is."""
    TURNED = 14
    """Its heads stand in another order."""


class Part(NamedTuple):
    """Slots of one call and layer that fared alike. ``target``: the file or peer, "" where there is none."""

    slots: tuple[Interval, ...]
    fate: Fate
    why: Why = Why.NONE
    target: str = ""

    @property
    def sent_to(self) -> str:
        """The peer, where all that was seen is that it left for one: what a peer keeps is out of sight. ""
        of what came to rest where it was looked at."""
        return self.target if self.fate == Fate.WRITTEN and self.target.startswith(PEER) else ""


class Traced(NamedTuple):
    """One spool. The tables are its records of these kinds, shape (n, 8), in file order."""

    spool: str
    names: Mapping[int, str]
    slots: Records
    left: Records
    found: Records
    pieces: Records
    last_t: int
    """Host time (ns) until which all that leaves is seen: the spool ends then, or not every step with work is
    watched from then on."""
    removed: frozenset[str] = frozenset()
    """Files that connectors removed in other processes: targets of their LEFT records with REPLACED."""
    sharing: frozenset[int] = frozenset()
    """Indexes of connectors that read KV in steps in which another one did: what is found of the same KV is
    one's or the other's, and what is not found of one may be found as the other's."""
    limited: frozenset[int] = frozenset()
    """Indexes of connectors part of whose work can't be followed: KV may be copied unseen."""
    unseen: frozenset[int] = frozenset()
    """Of these the ones of which nothing is recorded of that work: KV may leave unseen."""
    lent: bool = False
    """Whether blocks were kept for asynchronous saves: others may fetch KV, which is freed then."""
    writers: Mapping[str, Set[int]] = {}
    """File -> indexes of the connectors of this process that were seen to write to it, 0 for no known one."""


@dataclass(frozen=True)
class AtRest:
    """Of one spool.

    Attributes:
        parts: (call, layer's name id) -> slots and how they fared; no slot in two. What is in none: READ.
        amounts: (fate, why) -> slots over all layers.
        examples: (fate, why) -> the first few targets.
    """

    parts: Mapping[tuple[int, int], tuple[Part, ...]] = field(default_factory=dict)
    amounts: Mapping[tuple[Fate, Why], int] = field(default_factory=dict)
    examples: Mapping[tuple[Fate, Why], tuple[str, ...]] = field(default_factory=dict)

    def split(self, call: int, layer: int, slots: Sequence[Interval]) -> list[Part]:
        """Slots of one SLOTS record, by how they fared; all of them, each once."""
        left, found = union(slots), []
        for part in self.parts.get((call, layer), ()):
            rest = subtract(left, list(part.slots))
            here = subtract(left, rest)
            if here:
                found.append(part._replace(slots=tuple(here)))
            left = rest
        if left:
            found.append(Part(tuple(left), Fate.READ))
        return found


_LEAST_BYTES = 16
"""Bytes of a slot in one layer: no KV is smaller."""
_MOST_EXAMPLES = 5
_LEAST_CUT = 2
_SHARE_CUT = 0.2
"""Of all KV that was found: fewer may be pieces of prompts that begin alike, taken for each other's."""
_STACKED = 2
"""Layers in one file, from which on a record holds several."""
_OPENED_AGAIN = 2
"""Times that a segment of shared memory is opened, from which on it is known by its name."""
_MARGIN_NS = 500_000_000
_PATIENCE = 10
"""How many times as long as the slowest save something may be on its way."""
_TEMPORARY = re.compile(r"\.(?:part|partial|tmp|temp|incomplete)(?:[.\-_][\w\-]*)?$|^\.?tmp[\w\-]*$")
_NO_STORE = re.compile(r"lock|\.pid$|\.log$|marker|ready|keep|touch|-journal$|-wal$|-shm$", re.IGNORECASE)
_ORDER = (
    Form.DELETED, Form.REPLACED, Form.COVERED, Form.VERBATIM, Form.TURNED, Form.CAST, Form.ALTERED,
    Form.ZEROED, Form.REFUSED, Form.CUT,
    Form.PARTLY, Form.GIVEN_UP,
)  # fmt: skip
"""Of several records about the same KV the first of these counts."""
_WHOLE = (Form.VERBATIM, Form.TURNED)
"""Byte for byte, all of it."""
_SPOILED = (Form.ALTERED, Form.ZEROED)
_IN_PIECES = (Form.PARTLY, Form.ZEROED, Form.CUT)
_LEAST_TURNED = 2
_SHARE_TURNED = 4
"""So many times as often as in order: each is in order, or none, but for KV that stands there twice. And no
less often than in an order that was not seen."""


def at_rest(trace: Traced, rest: RestFile) -> AtRest:
    """How the KV that one spool's worker read fared; each connector of the process on its own."""
    indexes = sorted({rows.detail(head) for head in trace.slots[:, 0].tolist()} - {0})
    if len(indexes) < 2:
        return _Judge(trace, rest).result() if len(trace.slots) else AtRest()
    parts: dict[tuple[int, int], tuple[Part, ...]] = {}
    amounts: Counter[tuple[Fate, Why]] = Counter()
    examples: dict[tuple[Fate, Why], tuple[str, ...]] = {}
    for index in indexes:
        one = _Judge(_of_connector(trace, index), rest).result()
        parts.update(one.parts)
        amounts.update(one.amounts)
        examples = {**one.examples, **examples}
    return AtRest(parts, dict(amounts), examples)


def removals(left: Records, names: Mapping[int, str]) -> set[str]:
    """Files that connectors removed, by the LEFT records of one spool."""
    gone = left[(rows.flags(left[:, 0]) & Flag.REPLACED) != 0]
    return {names.get(ident, "") for ident in rows.columns(rows.LeftProcess, gone).target.tolist()} - {""}


def writers(left: Records, names: Mapping[int, str]) -> dict[str, Set[int]]:
    """Target -> indexes of the connectors that wrote to it, by the LEFT records of one spool."""
    found: dict[str, set[int]] = defaultdict(set)
    indexes = rows.detail(left[:, 0]).tolist()
    for index, ident in zip(indexes, rows.columns(rows.LeftProcess, left).target.tolist(), strict=True):
        found[names.get(ident, "")].add(index)
    return {**found}


def found_of(table: Records, indexes: Set[int], slots: Records) -> Records:
    """The FOUND records of some connectors. Where all of what another one read is found in a write, pieces of
    what these read say nothing: both read the same KV. A record of no known connector is of the one that read
    in its call.

    Args:
        slots: the SLOTS records of all connectors.
    """
    found = [rows.KvFound._make(words) for words in table.tolist()]
    reader = {words[7]: rows.detail(words[0]) for words in slots.tolist() if rows.detail(words[0])}
    owner = [rows.detail(one.head) or reader.get(one.call, 0) for one in found]
    whole = {
        (one.by, one.target)
        for one, index in zip(found, owner, strict=True)
        if index not in indexes and rows.code(one.head) in _WHOLE
    }
    kept = [
        at
        for at, (one, index) in enumerate(zip(found, owner, strict=True))
        if index in indexes and not (rows.code(one.head) in _IN_PIECES and (one.by, one.target) in whole)
    ]
    return table[kept]


def _of_connector(trace: Traced, index: int) -> Traced:
    """The records of one connector; of what left, also what is of no known one."""
    left = rows.detail(trace.left[:, 0])
    return trace._replace(
        slots=trace.slots[rows.detail(trace.slots[:, 0]) == index],
        left=trace.left[(left == index) | (left == 0)],
        found=found_of(trace.found, {index}, trace.slots),
    )


_Verdict = tuple[Fate, Why, str]
_Judged = Callable[[rows.SlotsTouched], _Verdict]


class _Found(NamedTuple):
    form: Form
    slots: tuple[Interval, ...]
    target: str
    t: int
    pieces: str
    """STILL, GONE, LEFT_BEHIND or unknown, one for each of its pieces."""
    ordered: bool = False
    """Its heads were seen to stand in order."""


class _Judge:
    def __init__(self, trace: Traced, rest: RestFile) -> None:
        self._trace = trace
        self._left = [rows.LeftProcess._make(words) for words in trace.left.tolist()]
        own = {0, *(rows.detail(head) for head in trace.slots[:, 0].tolist())}
        others = {path for path, indexes in trace.writers.items() if own.isdisjoint(indexes)}
        self._files: dict[str, RestingFile] = {one.path: one for one in rest.files if one.path not in others}
        self._read_t = {(words[7], words[2]): words[1] for words in trace.slots.tolist()}
        self._named_once = self._segments_of_one_name()
        self._pieces = self._of_pieces(rest)
        self._found = self._of_found()
        ways = ((rows.code(one.head), self._name(one.target)) for one in self._left)
        self._databases = {name for way, name in ways if way == Way.SQLITE}
        self._reach = self._of_reach()
        self._closed = self._last_closed()
        self._committed = self._commits()
        self._removed = removals(trace.left, trace.names) | trace.removed
        self._left = [one for one in self._left if not rows.flags(one.head) & Flag.REPLACED]
        heads = [
            head
            for head, target in zip(trace.found[:, 0].tolist(), trace.found[:, 7].tolist(), strict=True)
            if in_memory(self._name(target))
        ]
        self._all_memory = all(rows.flags(head) & Flag.KEPT for head in heads)
        self._in_memory = self._of_memory()
        self._parts: dict[tuple[int, int], list[Part]] = defaultdict(list)

    def _name(self, ident: int) -> str:
        return self._trace.names.get(ident, "")

    def _commits(self) -> dict[str, int]:
        """Databases whose last transaction was open when the run was over, or was seen to be open last and
        then rolled back -> until when all was committed."""
        until: dict[str, int] = {}
        is_open = {self._name(one.target): one.errors > 0 for one in self._left}
        for one in self._left:
            name = self._name(one.target)
            journal = self._files.get(f"{name}-journal")
            if name not in self._databases:
                continue
            if (journal is not None and journal.exists) or (is_open[name] and self._ends_before(name)):
                until[name] = max(until.get(name, 0), 0 if one.errors else one.t)
        return until

    def _of_reach(self) -> dict[str, int]:
        """Target -> how far into it pieces of KV were found."""
        reach: dict[str, int] = {}
        for words in self._trace.pieces.tolist():
            row = rows.Piece._make(words)
            name = self._name(row.target)
            reach[name] = max(reach.get(name, 0), row.offset + row.length)
        return reach

    def _ends_before(self, name: str) -> bool:
        """Whether a database ends before the place at which KV was found in it. Beside a write-ahead log that
        may stand there still."""
        file, log = self._files.get(name), self._files.get(f"{name}-wal")
        known = file is not None and file.size is not None and (log is None or log.exists is False)
        return known and file is not None and (file.size or 0) < self._reach.get(name, 0)

    def _last_closed(self) -> dict[str, int]:
        """Databases in which a transaction was seen to be open -> when none was for the last time."""
        opened = {self._name(one.target) for one in self._left if one.errors} & self._databases
        return {
            name: max(
                (one.t for one in self._left if self._name(one.target) == name and not one.errors), default=0
            )
            for name in opened
        }

    def _of_pieces(self, rest: RestFile) -> dict[tuple[int, int, int], str]:
        """(call, layer, target) -> what was found where each of its pieces stood."""
        said = rest.pieces.get(self._trace.spool, "")
        if len(said) > len(self._trace.pieces):
            return {}  # records of the spool were left out: which ones is not known
        found: dict[tuple[int, int, int], str] = defaultdict(str)
        for words, one in zip(self._trace.pieces.tolist(), said, strict=False):
            if self._name(words[4]) not in self._named_once:
                found[words[2], words[3], words[4]] += one
        return found

    def _segments_of_one_name(self) -> set[str]:
        """Segments of shared memory that were opened once, or are gone: what takes the place of KV there may
        do so when it was fetched. One that is opened by its name again and again is a record of a store."""
        opened: Counter[str] = Counter()
        for one in self._left:
            if rows.code(one.head) == Way.SHARED_MEMORY:
                opened[self._name(one.target)] += one.calls
        there = {path for path, file in self._files.items() if file.exists}
        return {name for name, times in opened.items() if times < _OPENED_AGAIN or name not in there}

    def _of_found(self) -> dict[tuple[int, int], list[_Found]]:
        found: dict[tuple[int, int], list[_Found]] = defaultdict(list)
        for words in self._trace.found.tolist():
            row = rows.KvFound._make(words)
            slots = parse(self._name(row.slot_set))
            found[row.call, row.layer].append(
                _Found(
                    Form(rows.code(row.head)),
                    tuple(union([*slots.full, *slots.partly])),
                    self._name(row.target),
                    row.t,
                    self._pieces.get((row.call, row.layer, row.target), ""),
                    bool(rows.flags(row.head) & Flag.FIRST),
                )
            )
        return found

    def _of_memory(self) -> bool:
        """Whether KV is held in memory, as in a store. Where it is found elsewhere, or what left was empty or
        refused, it lies in memory on its way there: then that is not looked at."""
        said = [one for every in self._found.values() for one in every]
        if not any(in_memory(one.target) for one in said):
            return False
        elsewhere = any(one.target and not in_memory(one.target) for one in said)
        most = 2 * len(self._found) >= sum(map(_is_read, self._trace.slots.tolist()))
        if not elsewhere and (most or self._by_files() is None):
            return True
        for key, every in list(self._found.items()):
            self._found[key] = [one for one in every if not in_memory(one.target)]
        self._found = {key: every for key, every in self._found.items() if every}
        return False

    @cached_property
    def _only_memory(self) -> bool:
        """Whether KV is held in memory, all of which was looked through, and no other way is open to it."""
        read = sum(max(0, words[5]) for words in self._trace.slots.tolist() if _is_read(words))
        left = sum(abs(one.bytes) for one in self._left)
        limited = self._is_any(self._trace.limited)
        return self._in_memory and self._all_memory and left < read * _LEAST_BYTES and not limited

    def _is_any(self, indexes: Set[int]) -> bool:
        """Whether any of these connectors touched KV."""
        return any(rows.detail(head) in indexes for head in self._trace.slots[:, 0].tolist())

    # --- judging --------------------------------------------------------------------------

    def result(self) -> AtRest:
        for key, said in self._found.items():
            # What is seen at rest says more than that the same was sent.
            for one in sorted(said, key=lambda one: (_ORDER.index(one.form), one.target.startswith(PEER))):
                self._add(key, one.slots, *self._fate(one), one.target)
        self._rest_of_reads()
        self._records_of_several_layers()
        self._in_other_records()
        self._without_a_layer()
        self._held_in_part()
        amounts: Counter[tuple[Fate, Why]] = Counter()
        examples: dict[tuple[Fate, Why], dict[str, None]] = defaultdict(dict)
        for parts in self._parts.values():
            for part in parts:
                amounts[part.fate, part.why] += length(part.slots)
                if part.target and len(examples[part.fate, part.why]) < _MOST_EXAMPLES:
                    examples[part.fate, part.why][part.target] = None
        return AtRest(
            {key: tuple(parts) for key, parts in self._parts.items()},
            dict(amounts),
            {key: tuple(targets) for key, targets in examples.items()},
        )

    def _add(
        self, key: tuple[int, int], slots: Iterable[Interval], fate: Fate, why: Why, target: str
    ) -> None:
        """What another part has already keeps its fate."""
        taken = [one for part in self._parts[key] for one in part.slots]
        own = subtract(union(slots), union(taken))
        if own:
            self._parts[key].append(Part(tuple(own), fate, why, target))

    @cached_property
    def _cuts(self) -> bool:
        """Whether KV of which only the begin was found was cut: compression leaves pieces out anywhere. In
        most layers, that is: in a first one pieces stand in other prompts' records, too."""
        layers: dict[int, Counter[Form]] = defaultdict(Counter)
        for (_, layer), said in self._found.items():
            best: dict[tuple[Interval, ...], Form] = {}  # the next records hold pieces of it, too
            for one in sorted(said, key=lambda one: _ORDER.index(one.form)):
                best.setdefault(one.slots, one.form)
            layers[layer].update(best.values())
        forms = sum(layers.values(), Counter[Form]())
        if forms[Form.CUT] < max(_LEAST_CUT, forms[Form.ZEROED], _SHARE_CUT * sum(forms.values())):
            return False
        partial = [one for one in layers.values() if one[Form.CUT] or one[Form.PARTLY]]
        clear = sum(one[Form.CUT] >= 4 * one[Form.PARTLY] for one in partial)
        return 2 * clear > len(partial)

    def _fate(self, one: _Found) -> tuple[Fate, Why]:
        if one.form in (*_WHOLE, Form.PARTLY) and one.t > self._committed.get(one.target, one.t):
            return Fate.NOT_AT_REST, Why.UNCOMMITTED
        if one.form in _WHOLE:
            fate, why = self._at_the_end(one)
            if self._mostly_spoiled and fate in (Fate.WRITTEN, Fate.PROVED):
                return Fate.READ, Why.NONE  # as it stood before it was altered
            if not self._turned or fate not in (Fate.WRITTEN, Fate.PROVED):
                return fate, why
            # Of the others it was not seen in which order they stand.
            return (Fate.ALTERED, Why.TURNED) if one.form == Form.TURNED else (Fate.READ, Why.NONE)
        if one.form == Form.REFUSED:
            return Fate.PUT_FAILED, Why.REFUSED
        if one.form in (Form.DELETED, Form.REPLACED):
            return Fate.LOST_LATER, Why.REMOVED if one.form == Form.DELETED else Why.OVERWRITTEN
        if one.form == Form.CAST:
            return Fate.WRITTEN, Why.NARROWER
        if in_memory(one.target) and not self._only_memory:
            return Fate.READ, Why.NONE  # a copy on its way to where nobody sees it
        if self._cuts and one.form == Form.ZEROED:
            return Fate.NOT_AT_REST, Why.CUT  # zeros stand where a record ends too early
        if one.form in _SPOILED and not self._spoils:
            return Fate.READ, Why.NONE  # looked at while it was copied
        if one.form in _SPOILED:
            return Fate.ALTERED, Why.ZEROED if one.form == Form.ZEROED else Why.ROUNDED
        if one.form == Form.CUT and self._cuts:
            return Fate.NOT_AT_REST, Why.CUT
        return Fate.READ, Why.NONE

    @cached_property
    def _spoils(self) -> bool:
        """Whether some layer's KV is altered as a rule: what alters KV does so with all that it stores, and a
        few pieces beside many whole ones were seen on their way."""
        altered, found = Counter[int](), Counter[int]()
        for (_, layer), said in self._found.items():
            found[layer] += len(said)
            altered[layer] += sum(one.form in _SPOILED for one in said)
        return any(n >= _SHARE_CUT * found[layer] for layer, n in altered.items() if n)

    @cached_property
    def _mostly_spoiled(self) -> bool:
        """Whether more of the KV that was found is altered than is whole."""
        forms = Counter(one.form for said in self._found.values() for one in said)
        return self._spoils and sum(forms[form] for form in _SPOILED) > sum(forms[form] for form in _WHOLE)

    @cached_property
    def _turned(self) -> bool:
        """Whether this connector stores heads in another order than the KV cache has."""
        every = [one for said in self._found.values() for one in said]
        forms = Counter(one.form for one in every)
        ordered = sum(one.ordered for one in every if one.form == Form.VERBATIM)
        return forms[Form.TURNED] >= max(_LEAST_TURNED, _SHARE_TURNED * ordered, forms[Form.VERBATIM])

    def _at_the_end(self, one: _Found) -> tuple[Fate, Why]:
        file = self._files.get(one.target)
        if file is None or file.exists is None:
            # It has another name by now, and other KV may have taken its place there.
            moved = _is_temporary(one.target) and self._replaces
            return (Fate.READ if moved else Fate.WRITTEN), Why.NONE
        if not file.exists:
            # Without a removal by the connector somebody else may have cleaned up.
            if one.target in self._removed:
                return Fate.LOST_LATER, Why.REMOVED
            # Where a file with such a name went is not known: other KV may have its place by now.
            moved = _is_temporary(one.target) and (GONE in one.pieces or not one.pieces)
            return (Fate.READ if moved else Fate.WRITTEN), Why.NONE
        if GONE in one.pieces and STILL in one.pieces and one.target in self._databases:
            return Fate.READ, Why.NONE  # one of them stood in another row
        rolled_back = one.t > self._closed.get(one.target, one.t)
        if rolled_back and self._too_small(file):
            return Fate.NOT_AT_REST, Why.UNCOMMITTED
        if GONE in one.pieces:
            return (Fate.NOT_AT_REST, Why.UNCOMMITTED) if rolled_back else (Fate.LOST_LATER, Why.OVERWRITTEN)
        if _is_temporary(one.target):
            return Fate.NOT_AT_REST, Why.TEMPORARY
        if LEFT_BEHIND in one.pieces:
            return Fate.LEFT_BEHIND, Why.NONE
        if STILL in one.pieces:
            return Fate.PROVED, Why.NONE
        # Of what a database holds nobody sees that it is deleted; and other KV may have taken its place.
        unknown = one.target in self._databases or self._replaces
        return (Fate.READ if unknown else Fate.WRITTEN), Why.NONE

    @cached_property
    def _replaces(self) -> bool:
        """Whether other bytes were put in the place of KV in files."""
        every = (one for said in self._found.values() for one in said)
        return any(GONE in one.pieces and one.target not in self._databases for one in every)

    def _too_small(self, file: RestingFile) -> bool:
        """Whether a database holds less in all than what was found in it while a transaction was open."""
        return file.size is not None and file.size < self._found_in.get(file.path, 0) * _LEAST_BYTES

    @cached_property
    def _found_in(self) -> Counter[str]:
        """Target -> slots that were found in it byte for byte, each once a layer."""
        found: dict[tuple[str, int], list[Interval]] = defaultdict(list)
        for (_, layer), said in self._found.items():
            for one in said:
                if one.form == Form.VERBATIM:
                    found[one.target, layer] += one.slots
        amounts: Counter[str] = Counter()
        for (target, _), slots in found.items():
            amounts[target] += length(union(slots))
        return amounts

    # --- what was read and not found ------------------------------------------------------

    def _rest_of_reads(self) -> None:
        if self._in_memory:
            judged = self._not_held()
        else:
            judged = self._never_left if self._visible() else self._by_files()
        if judged is None:
            return
        for words in self._trace.slots.tolist():
            row = rows.SlotsTouched._make(words)
            if not rows.flags(row.head) & Flag.STORE or rows.flags(row.head) & Flag.LOAD or not row.slot_set:
                continue
            fate, why, target = judged(row)
            if fate != Fate.READ:
                slots = parse(self._name(row.slot_set))
                self._add((row.call, row.layer), [*slots.full, *slots.partly], fate, why, target)

    def _records_of_several_layers(self) -> None:
        """Where one record holds several layers, it is not whole without a layer of which nothing left: the
        store gives none of it back. Of a layer of which some was found the rest may just not have been."""
        layers: dict[str, set[int]] = defaultdict(set)
        missing: dict[int, list[Interval]] = defaultdict(list)
        steps = {(words[7], words[2]): words[3] for words in self._trace.slots.tolist()}
        for key, parts in self._parts.items():
            nothing = all(part.fate == Fate.NEVER_LEFT for part in parts)
            for part in parts:
                if nothing:
                    missing[steps.get(key, 0)] += part.slots
                elif part.target:
                    layers[part.target].add(key[1])
        if not missing or max((len(one) for one in layers.values()), default=0) < _STACKED:
            return
        for key, parts in self._parts.items():
            gone = union(missing.get(steps.get(key, 0), ()))
            for at, part in enumerate(parts):
                whole = not gone or subtract(list(part.slots), gone)
                if part.fate in (Fate.WRITTEN, Fate.PROVED) and not whole:
                    parts[at] = part._replace(fate=Fate.NEVER_LEFT, why=Why.NOT_WHOLE)

    def _in_other_records(self) -> None:
        """Where several layers of what one call read stand in one record, and a layer of the same slots alone
        in another one, that is another prompt's: a first layer computes the same for the same tokens."""
        where: dict[tuple[int, tuple[Interval, ...]], Counter[str]] = defaultdict(Counter)
        for (call, _), parts in self._parts.items():
            for part in parts:
                where[call, part.slots][part.target] += bool(part.target)
        for (call, _), parts in self._parts.items():
            for place, part in enumerate(parts):
                targets = where[call, part.slots]
                alone = targets[part.target] == 1 and max(targets.values()) >= _STACKED
                if alone and part.fate in (Fate.WRITTEN, Fate.PROVED):
                    parts[place] = part._replace(fate=Fate.READ, why=Why.NONE)

    def _without_a_layer(self) -> None:
        """Where all that was read of some layers was never found, and a record holds several layers or no
        more than one was ever found, no record may be whole: what else was found of them is READ."""
        layers: dict[str, set[int]] = defaultdict(set)
        left: dict[int, bool] = {}
        for (_, layer), parts in self._parts.items():
            left[layer] = left.get(layer, False) or any(part.fate != Fate.NEVER_LEFT for part in parts)
            for part in parts:
                if part.target:
                    layers[part.target].add(layer)
        most = max((len(one) for one in layers.values()), default=0)
        if all(left.values()) or (most < _STACKED and len(set().union(*layers.values())) > 1):
            return
        for parts in self._parts.values():
            for at, part in enumerate(parts):
                if part.fate in (Fate.WRITTEN, Fate.PROVED):
                    parts[at] = part._replace(fate=Fate.READ, why=Why.NONE)

    def _held_in_part(self) -> None:
        """What is held in memory of one layer, and not of another that was read in the same step, may be in
        an entry that is not whole: nothing is said of it."""
        if not self._in_memory:
            return
        read = list(filter(_is_read, self._trace.slots.tolist()))
        missing: dict[int, dict[int, list[Interval]]] = defaultdict(dict)  # step -> layer -> slots
        for words in read:
            parts = self._parts.get((words[7], words[2]), ())
            there = union(one for part in parts if part.target for one in part.slots)
            slots = parse(self._name(words[4]))
            gone = subtract(union([*slots.full, *slots.partly]), there)
            missing[words[3]].setdefault(words[2], []).extend(gone)
        for words in read:
            layers = missing[words[3]]
            gone = union(one for layer, some in layers.items() if layer != words[2] for one in some)
            parts = self._parts.get((words[7], words[2]), [])
            for at, part in enumerate(parts):
                whole = subtract(list(part.slots), gone) == list(part.slots)
                if part.fate == Fate.WRITTEN and in_memory(part.target) and not whole:
                    parts[at] = part._replace(fate=Fate.READ, why=Why.NONE)

    def _visible(self) -> bool:
        """Whether this connector's KV is found byte for byte in what leaves."""
        return any(one.form in _WHOLE for said in self._found.values() for one in said)

    @property
    def _looked_through(self) -> bool:
        """Whether all that was seen to leave was looked through."""
        return all(rows.flags(one.head) & Flag.KEPT or not one.bytes for one in self._left)

    def _never_left(self, row: rows.SlotsTouched) -> _Verdict:
        hidden = rows.detail(row.head) in self._trace.sharing | self._trace.unseen
        if hidden or not rows.flags(row.head) & Flag.KEPT or not self._looked_through:
            return Fate.READ, Why.NONE, ""
        later, slowest = self._pace()
        if self._is_cut_off(row, later):
            return Fate.NOT_AT_REST, Why.CUT, ""
        if self._wraps:
            return Fate.READ, Why.NONE, ""  # it may have stood where the next record stands now
        if row.t > max(self._committed.values(), default=row.t):
            return Fate.NOT_AT_REST, Why.UNCOMMITTED, next(iter(self._committed))
        if row.call in self._in_part:
            return Fate.READ, Why.NONE, ""  # what it wrote was not seen in full
        waited = self._trace.last_t - row.t
        if row.t < min(later, self._trace.last_t) or waited > _PATIENCE * slowest + _MARGIN_NS:
            return Fate.NEVER_LEFT, Why.NONE, ""
        return Fate.READ, Why.NONE, ""

    @cached_property
    def _in_part(self) -> frozenset[int]:
        """Calls of which some layer's KV was found in part only, and where that is no cut: it was looked at
        before it was whole, or packed in a way that hides some. Nobody knows what else they wrote."""
        in_part = (Form.PARTLY,) if self._cuts else (Form.PARTLY, Form.CUT)
        first = next((words[2] for words in self._trace.slots.tolist()), 0)
        calls = set()
        for (call, layer), said in self._found.items():
            better = [part for one in said if one.form not in in_part for part in one.slots]
            parts = [part for one in said if one.form in in_part for part in one.slots]
            # behind other KV of the first layer it may be another prompt's, which has the same tokens there
            if subtract(union(parts), union(better)) and not (better and layer == first):
                calls.add(call)
        return frozenset(calls)

    @cached_property
    def _wraps(self) -> bool:
        """Whether KV took the place of other KV in a file that is written in place: one call may write
        several records there, one over the other, and is looked at when it is over."""
        ways = {self._name(one.target): rows.code(one.head) for one in self._left if one.bytes < 0}
        in_place = {target for target, way in ways.items() if way != Way.SQLITE}
        every = [one for said in self._found.values() for one in said if one.target in in_place]
        return any(one.form in _WHOLE and GONE in one.pieces for one in every)

    def _not_held(self) -> _Judged | None:
        """What was dropped of the KV of a store in memory; None where that can't be said: what was loaded may
        have kept its place for that."""
        loads = any(rows.flags(head) & Flag.LOAD for head in self._trace.slots[:, 0].tolist())
        if not self._only_memory or loads or self._trace.lent:
            return None
        held = {key for key, said in self._found.items() if any(one.form in _WHOLE for one in said)}
        is_dropped = dropped(
            Read(words[1], words[3], (words[7], words[2]) in held) for words in self._trace.slots.tolist()
        )

        later, _ = self._pace()

        def judged(row: rows.SlotsTouched) -> _Verdict:
            if self._is_cut_off(row, later):
                return Fate.NOT_AT_REST, Why.CUT, ""
            known = rows.flags(row.head) & Flag.KEPT and rows.detail(row.head) not in self._trace.sharing
            gone = known and is_dropped(row.t, row.step)
            return (Fate.NEVER_LEFT, Why.NOT_HELD, "") if gone else (Fate.READ, Why.NONE, "")

        return judged

    def _is_cut_off(self, row: rows.SlotsTouched, later: int) -> bool:
        """Whether it is missing behind the place where its record ends too early."""
        return (row.layer in self._cut_off and row.t <= later) or row.layer in self._behind.get(row.step, ())

    @cached_property
    def _behind(self) -> dict[int, set[int]]:
        """Step -> the layers that were not found in it, and were read after one of which only the begin was
        found; where all before them were found. They are cut off with it, where records are cut."""
        read: dict[int, dict[int, bool]] = defaultdict(dict)  # step -> layer, as first read -> is found
        begun: set[int] = set()
        for words in filter(_is_read, self._trace.slots.tolist()):
            said = self._found.get((words[7], words[2]), ())
            read[words[3]][words[2]] = read[words[3]].get(words[2], False) or bool(said)
            if any(one.form == Form.CUT for one in said):
                begun.add(words[3])
        behind = {}
        for step in begun if self._cuts else ():
            missing = [layer for layer, found in read[step].items() if not found]
            if missing == list(read[step])[-len(missing) :]:
                behind[step] = set(missing)
        return behind

    @cached_property
    def _cut_off(self) -> frozenset[int]:
        """The last layers of the records, where none of them was ever found and all of the first ones always
        were: one layer's piece may be missed, not every one of every call."""
        later, _ = self._pace()
        read: dict[int, set[int]] = defaultdict(set)
        for words in self._trace.slots.tolist():
            kept = rows.flags(words[0]) & Flag.KEPT and words[1] <= later
            if kept and _is_read(words):
                read[words[2]].add(words[7])
        seen = {
            layer: {call for call in calls if (call, layer) in self._found} for layer, calls in read.items()
        }
        gone = [layer for layer, calls in read.items() if len(calls) >= _LEAST_CUT and not seen[layer]]
        rest = [layer for layer in read if layer not in gone]
        whole = rest and all(seen[layer] == read[layer] for layer in rest)
        first = list(read)[: len(rest)] == rest  # in the order in which they are read
        return frozenset(gone if whole and first else ())

    def _pace(self) -> tuple[int, int]:
        """When the latest KV that was found had been read; how long the slowest was on its way."""
        later = slowest = 0
        for key, said in self._found.items():
            read = self._read_t.get(key, 0)
            for one in said:
                if one.form in _WHOLE and read:
                    later, slowest = max(later, read), max(slowest, one.t - read)
        return later, slowest

    def _by_files(self) -> _Judged | None:
        """Nothing was found anywhere: whether what left could not have held it, and why not."""
        if self._is_any(self._trace.unseen):
            return None
        read = sum(max(0, words[5]) for words in self._trace.slots.tolist() if _is_read(words))
        left = sum(max(0, one.bytes) for one in self._left)
        refused = self._refused()
        if refused is not None:
            return lambda row: refused
        in_place = any(
            one.bytes < 0 and rows.code(one.head) != Way.SQLITE and not self._is_tiny(one.target)
            for one in self._left
        )
        if in_place or not read or not self._left or left >= read * _LEAST_BYTES:
            return None
        if any(one.size is not None and one.size >= read * _LEAST_BYTES for one in self._files.values()):
            return None
        found = self._unreachable() or self._empty() or self._uncommitted()
        return None if found is None else lambda row: found

    def _is_tiny(self, target: int) -> bool:
        """Whether a file is too small for what any call read."""
        file = self._files.get(self._name(target))
        least = min(
            (words[5] for words in self._trace.slots.tolist() if _is_read(words) and words[5] > 0), default=0
        )
        return file is not None and file.size is not None and file.size < least * _LEAST_BYTES

    def _unreachable(self) -> _Verdict | None:
        peers = [one for one in self._left if rows.code(one.head) == Way.SOCKET]
        if peers and all(one.errors and not one.bytes for one in peers):
            return Fate.PUT_FAILED, Why.UNREACHABLE, self._name(peers[0].target)
        return None

    def _refused(self) -> _Verdict | None:
        """All that was sent and may have been a save was refused, whatever form it had."""
        peers = [one for one in self._left if rows.code(one.head) == Way.SOCKET]
        saves, errors = sum(one.calls for one in peers), sum(one.errors for one in peers)
        if len(peers) < len(self._left) or not saves or errors < saves:
            return None
        return Fate.PUT_FAILED, Why.REFUSED, self._name(peers[0].target)

    def _empty(self) -> _Verdict | None:
        for path, file in self._files.items():
            if file.exists and file.size == 0 and not _NO_STORE.search(path.rsplit("/", 1)[-1]):
                return Fate.NOT_AT_REST, Why.EMPTY, path
        return None

    def _uncommitted(self) -> _Verdict | None:
        """A database in which a transaction was open when it was last seen, and that holds nothing now."""
        last = {self._name(one.target): one.errors for one in self._left if rows.code(one.head) == Way.SQLITE}
        for name, is_open in last.items():
            if is_open or name in self._committed:
                return Fate.NOT_AT_REST, Why.UNCOMMITTED, name
        return None


def _is_temporary(path: str) -> bool:
    return bool(_TEMPORARY.search(path.rsplit("/", 1)[-1]))


def _is_read(words: Sequence[int]) -> bool:
    return bool(rows.flags(words[0]) & Flag.STORE) and not rows.flags(words[0]) & Flag.LOAD
