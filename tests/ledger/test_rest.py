"""What became of KV that was read, from what left the process and what lies there at the end."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtrace.ledger.intervals import Interval, length, subtract, union
from kvtrace.ledger.rest_file import LEFT_BEHIND, STILL, RestFile, RestingFile
from kvtrace.ledger.saves.dropped import cut_records, left_in_part, often_lost, split
from kvtrace.ledger.saves.files import overwritten_files
from kvtrace.ledger.saves.measured import Cell
from kvtrace.ledger.saves.positioned import PositionCalls
from kvtrace.ledger.saves.rest import AtRest, Fate, Part, Traced, Why, at_rest, writers
from kvtrace.ledger.slots.reads import Slots, Touch
from kvtrace.trace import rows
from kvtrace.trace.format import MEMORY, Flag, Form, Kind, Role, Way, pack_head

SLOTS = 64
ALL = ((0, SLOTS),)


class Books:
    """The records of one spool, made call by call; times in ms."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.tables: dict[Kind, list[rows.Row]] = {
            kind: [] for kind in (Kind.SLOTS, Kind.LEFT, Kind.FOUND, Kind.PIECE)
        }
        self._ids = itertools.count(1)
        self.files: dict[str, RestingFile] = {}
        self.pieces = ""
        self.sharing: frozenset[int] = frozenset()
        self.limited: frozenset[int] = frozenset()
        self.unseen: frozenset[int] = frozenset()
        self.lent = False
        self.ended = 10_000

    def name(self, text: str) -> int:
        known = {name: ident for ident, name in self.names.items()}
        ident = known.get(text) or next(self._ids)
        self.names[ident] = text
        return ident

    def read(
        self, call: int, t: int, kept: bool = True, connector: int = 1, layer: str = "layer", step: int = 0
    ) -> None:
        head = pack_head(Kind.SLOTS, Role.WORKER, 0, connector, Flag.STORE | (Flag.KEPT if kept else 0))
        slots = self.name(f"0+{SLOTS}")
        self._add(rows.SlotsTouched(head, t * 10**6, self.name(layer), step or call, slots, SLOTS, 0, call))

    def left(
        self, way: Way, target: str, size: int = 0, calls: int = 1, errors: int = 0, marks: int = Flag.KEPT,
        t: int = 0, connector: int = 1,
    ) -> None:  # fmt: skip
        head = pack_head(Kind.LEFT, Role.WORKER, way, connector, marks)
        self._add(rows.LeftProcess(head, t * 10**6, 0, 0, self.name(target), size, calls, errors))

    def found(
        self, call: int, t: int, form: Form, target: str, slots: str = f"0+{SLOTS}", connector: int = 1,
        layer: str = "layer", marks: int = Flag.KEPT, by: int = 0,
    ) -> None:  # fmt: skip
        head = pack_head(Kind.FOUND, Role.WORKER, form, connector, marks)
        pieces, by = 4 << 32 | 4, by or call + 1
        ids = self.name(layer), self.name(slots), pieces, by, self.name(target)
        self._add(rows.KvFound(head, t * 10**6, call, *ids))

    def piece(self, call: int, target: str, still: str, offset: int = 0) -> None:
        head = pack_head(Kind.PIECE, Role.WORKER)
        self._add(rows.Piece(head, 0, call, self.name("layer"), self.name(target), offset, 32, 7))
        self.pieces += still

    def file(self, path: str, exists: bool = True, size: int | None = 1 << 20) -> None:
        self.files[path] = RestingFile(path, exists, size if exists else None, None, None)

    def _add(self, row: rows.Row) -> None:
        self.tables[rows.KIND_OF[type(row)]].append(row)

    def result(self) -> AtRest:
        tables = {kind: np.array(table, dtype=np.int64).reshape(-1, 8) for kind, table in self.tables.items()}
        ordered = tables[Kind.SLOTS], tables[Kind.LEFT], tables[Kind.FOUND], tables[Kind.PIECE]
        wrote = writers(tables[Kind.LEFT], self.names)
        whose = {"sharing": self.sharing, "limited": self.limited, "lent": self.lent, "writers": wrote}
        whose["unseen"] = self.unseen
        trace = Traced("a.kvt", self.names, *ordered, self.ended * 10**6, **whose)
        return at_rest(
            trace, RestFile(looked_wall_ns=1, files=tuple(self.files.values()), pieces={"a.kvt": self.pieces})
        )

    def fates(self) -> list[tuple[Fate, Why]]:
        """Of the calls that read, in their order; each call's slots fare alike here."""
        rest = self.result()
        found = []
        for row in self.tables[Kind.SLOTS]:
            assert isinstance(row, rows.SlotsTouched)
            (part,) = rest.split(row.call, row.layer, ALL)
            assert part.slots == ALL
            found.append((part.fate, part.why))
        return found


@pytest.mark.parametrize(("still", "fate"), [("?", Fate.READ), ("1", Fate.PROVED)])
def test_what_cannot_be_read_back_where_other_kv_took_the_place_of_some_is_not_known_to_rest(
    still: str, fate: Fate
) -> None:
    books = Books()
    for call, stands in ((1, "0"), (2, still)):
        books.read(call, call)
        books.found(call, call, Form.VERBATIM, f"/store/{call}")
        books.piece(call, f"/store/{call}", stands)
        books.file(f"/store/{call}")
    assert books.fates()[1][0] == fate


@pytest.mark.parametrize(
    ("opened", "exists", "fate"),
    [
        (2, True, (Fate.LOST_LATER, Why.OVERWRITTEN)),
        (1, True, (Fate.WRITTEN, Why.NONE)),
        (2, False, (Fate.WRITTEN, Why.NONE)),
    ],
    ids=["by its name again", "held open, as a way to another process", "gone"],
)
def test_a_segment_in_which_other_bytes_stand(opened: int, exists: bool, fate: tuple[Fate, Why]) -> None:
    books = Books()
    books.read(1, 1)
    books.left(Way.SHARED_MEMORY, "/dev/shm/a", calls=opened)
    books.found(1, 1, Form.VERBATIM, "/dev/shm/a")
    books.piece(1, "/dev/shm/a", "0")
    books.file("/dev/shm/a", exists=exists)
    assert books.fates() == [fate]


@pytest.mark.parametrize(("still", "fate"), [("0", Fate.READ), ("1", Fate.WRITTEN)])
def test_a_temporary_file_that_was_renamed_since_may_have_been_replaced(still: str, fate: Fate) -> None:
    books = Books()
    books.read(1, 1)
    books.found(1, 1, Form.VERBATIM, "/store/a.bin.77.part")
    books.piece(1, "/store/a.bin.77.part", still)
    books.file("/store/a.bin.77.part", exists=False)
    assert books.fates() == [(fate, Why.NONE)]


@pytest.mark.parametrize(("replaced", "fate"), [("0", Fate.READ), ("1", Fate.WRITTEN)])
def test_where_kv_is_replaced_a_temporary_file_of_which_no_more_is_known_may_be(
    replaced: str, fate: Fate
) -> None:
    books = Books()
    for call, target in ((1, "/store/a.bin"), (2, "/store/b.bin.77.part")):
        books.read(call, call)
        books.found(call, call, Form.VERBATIM, target)
    books.piece(1, "/store/a.bin", replaced)
    books.file("/store/a.bin")
    assert books.fates()[1][0] == fate


@pytest.mark.parametrize(("layers", "fate"), [(1, Fate.READ), (2, Fate.WRITTEN)])
def test_the_only_layer_that_ever_left_may_lie_in_records_that_are_not_whole(layers: int, fate: Fate) -> None:
    """Records of several layers have one file, those of one layer a file each."""
    books = Books()
    for call in (1, 2, 3):
        for number in range(3):
            books.read(call, 10 * call, layer=f"layer.{number}")
        for number in range(3 - layers, 3):
            books.found(call, 10 * call + 2, Form.VERBATIM, f"/{call}.{number}", layer=f"layer.{number}")
    rest = books.result()
    fates = [rest.split(1, books.name(f"layer.{number}"), ALL)[0].fate for number in range(3)]
    assert fates[0] == Fate.NEVER_LEFT and fates[2] == fate


def test_nothing_is_said_of_a_store_that_cannot_be_seen() -> None:
    books = Books()
    books.read(1, 10)
    assert books.fates() == [(Fate.READ, Why.NONE)]
    books.left(Way.FILE, "/store/index.json", 40)
    books.file("/store/index.json", size=40)
    assert books.fates() == [(Fate.READ, Why.NONE)], "nothing was found: no file of KV is known to miss"


@pytest.mark.parametrize(
    ("still", "exists", "removed", "target", "fate"),
    [
        ("1", True, False, "/store/a", (Fate.PROVED, Why.NONE)),
        ("?", True, False, "/store/a", (Fate.WRITTEN, Why.NONE)),
        ("0", True, False, "/store/a", (Fate.LOST_LATER, Why.OVERWRITTEN)),
        ("?", False, True, "/store/a", (Fate.LOST_LATER, Why.REMOVED)),
        ("?", False, False, "/store/a", (Fate.WRITTEN, Why.NONE)),
        ("1", True, False, "/store/a.part", (Fate.NOT_AT_REST, Why.TEMPORARY)),
        ("1", True, False, "/store/a.kv.140313.tmp", (Fate.NOT_AT_REST, Why.TEMPORARY)),
        ("1", True, False, "/store/party", (Fate.PROVED, Why.NONE)),
    ],
)
def test_a_file_at_the_end(
    still: str, exists: bool, removed: bool, target: str, fate: tuple[Fate, Why]
) -> None:
    books = Books()
    books.read(1, 10)
    books.left(Way.FILE, target, 1 << 20)
    books.found(1, 11, Form.VERBATIM, target)
    books.piece(1, target, still)
    books.file(target, exists)
    if removed:
        books.left(Way.FILE, target, marks=Flag.REPLACED)
    assert books.fates() == [fate]


def test_what_was_never_looked_at_is_written() -> None:
    books = Books()
    books.read(1, 10)
    books.found(1, 11, Form.VERBATIM, "/store/a")
    assert books.fates() == [(Fate.WRITTEN, Why.NONE)]


@pytest.mark.parametrize(
    ("form", "fate"),
    [
        (Form.REFUSED, (Fate.PUT_FAILED, Why.REFUSED)),
        (Form.ZEROED, (Fate.ALTERED, Why.ZEROED)),
        (Form.ALTERED, (Fate.ALTERED, Why.ROUNDED)),
        (Form.CAST, (Fate.WRITTEN, Why.NARROWER)),
        (Form.GIVEN_UP, (Fate.READ, Why.NONE)),
        (Form.PARTLY, (Fate.READ, Why.NONE)),
        (Form.REPLACED, (Fate.LOST_LATER, Why.OVERWRITTEN)),
        (Form.DELETED, (Fate.LOST_LATER, Why.REMOVED)),
    ],
)
def test_forms(form: Form, fate: tuple[Fate, Why]) -> None:
    books = Books()
    books.read(1, 10)
    books.found(1, 11, form, "tcp host:1")
    assert books.fates() == [fate]


def test_an_answer_that_came_better_later_counts() -> None:
    books = Books()
    books.read(1, 10)
    books.found(1, 11, Form.REFUSED, "tcp host:1")
    books.found(1, 12, Form.VERBATIM, "tcp host:1")
    assert books.fates() == [(Fate.WRITTEN, Why.NONE)]


def test_kv_that_may_have_been_replaced_is_not_known_to_be_written() -> None:
    books = Books()
    for call in (1, 2):
        books.read(call, 10 * call)
        books.found(call, 10 * call + 1, Form.VERBATIM, "tcp host:1")
    books.found(1, 30, Form.COVERED, "tcp host:1")
    assert books.fates() == [(Fate.READ, Why.NONE), (Fate.WRITTEN, Why.NONE)]


@pytest.mark.parametrize(("partly", "fate"), [(0, Fate.NOT_AT_REST), (1, Fate.READ)])
def test_cut_is_said_where_pieces_are_missing_at_the_end_only(partly: int, fate: Fate) -> None:
    books = Books()
    for call in (1, 2, 3):
        books.read(call, call)
        books.found(call, call + 1, Form.CUT, f"/store/{call}")
    for call in range(4, 4 + partly):
        books.read(call, call)
        books.found(call, call + 1, Form.PARTLY, "/store/compressed")
    assert [one for one, _ in books.fates()] == [fate] * 3 + [Fate.READ] * partly


def test_a_first_layer_s_pieces_in_other_prompts_records_do_not_hide_a_cut() -> None:
    books = Books()
    for call in (1, 2, 3, 4):
        for layer, form in (("first", Form.PARTLY), ("second", Form.CUT), ("third", Form.CUT)):
            books.read(call, call, layer=layer)
            books.left(Way.SQLITE, "/store/kv", 1 << 20)
            books.found(call, call + 1, form, "/store/kv", layer=layer)
    assert set(books.fates()) == {(Fate.READ, Why.NONE), (Fate.NOT_AT_REST, Why.CUT)}


def test_zeros_behind_a_record_that_is_cut_are_no_kv() -> None:
    books = Books()
    for call in (1, 2, 3):
        books.read(call, call)
        books.left(Way.SQLITE, "/store/kv", 1 << 20)
        books.found(call, call + 1, Form.ZEROED if call == 2 else Form.CUT, "/store/kv")
    assert books.fates() == [(Fate.NOT_AT_REST, Why.CUT)] * 3


@pytest.mark.parametrize(("in_place", "still", "fate"), [
    (-1, "0", Fate.READ), (-1, "1", Fate.NEVER_LEFT), (1 << 20, "0", Fate.NEVER_LEFT),
])  # fmt: skip
def test_what_is_not_found_may_have_been_overwritten_at_once_where_a_ring_wraps(
    in_place: int, still: str, fate: Fate
) -> None:
    books = Books()
    for call in (1, 2, 3):
        books.read(call, call)
    books.left(Way.FILE, "/store/ring", in_place)
    for call, stands in ((1, still), (3, "1")):
        books.found(call, call + 1, Form.VERBATIM, "/store/ring")
        books.piece(call, "/store/ring", stands)
    books.file("/store/ring")
    assert books.fates()[1] == (fate, Why.NONE)


def test_of_what_a_listing_may_lead_to_no_more_it_is_not_said_that_it_is_at_rest() -> None:
    books = Books()
    books.left(Way.FILE, "/store/log", 1 << 20)
    for call, stands in ((1, LEFT_BEHIND), (2, STILL)):
        books.read(call, call)
        books.found(call, call + 1, Form.VERBATIM, "/store/log")
        books.piece(call, "/store/log", stands)
    books.file("/store/log")
    assert books.fates() == [(Fate.LEFT_BEHIND, Why.NONE), (Fate.PROVED, Why.NONE)]


@pytest.mark.parametrize(
    ("missing", "fates"),
    [
        ("third", [Fate.WRITTEN, Fate.NOT_AT_REST, Fate.NOT_AT_REST]),
        ("first", [Fate.NEVER_LEFT, Fate.NOT_AT_REST, Fate.NEVER_LEFT]),
    ],
)
def test_layers_behind_one_that_is_cut_are_cut_off_with_it(missing: str, fates: list[Fate]) -> None:
    books = Books()
    for call in (1, 2, 3):
        for layer, form in (("first", Form.VERBATIM), ("second", Form.CUT), ("third", Form.VERBATIM)):
            books.read(call, call, layer=layer)
            if layer != missing and (layer != "third" or call == 3):
                books.left(Way.FILE, f"/store/{call}", 1 << 20)
                books.found(call, call + 1, form, f"/store/{call}", layer=layer)
    assert [fate for fate, _ in books.fates()][3:6] == fates


def test_what_is_never_found_while_later_kv_is() -> None:
    books = Books()
    for call in (1, 2, 3):
        books.read(call, 10 * call)
    books.found(1, 12, Form.VERBATIM, "/a")
    books.found(3, 33, Form.VERBATIM, "/b")
    assert [one for one, _ in books.fates()] == [Fate.WRITTEN, Fate.NEVER_LEFT, Fate.WRITTEN]


@pytest.mark.parametrize(("unseen", "ended"), [((1,), 10_000), ((), 15)])
def test_what_may_leave_out_of_sight_is_not_lost(unseen: tuple[int, ...], ended: int) -> None:
    """By native code of which nothing is recorded; or in a step that was not watched, after it was read."""
    books = Books()
    for call in (1, 2, 3):
        books.read(call, 10 * call)
    books.found(1, 12, Form.VERBATIM, "/a")
    books.found(3, 33, Form.VERBATIM, "/b")
    books.unseen, books.ended = frozenset(unseen), ended
    assert [one for one, _ in books.fates()] == [Fate.WRITTEN, Fate.READ, Fate.WRITTEN]


def test_an_empty_file_is_not_the_store_of_what_may_leave_out_of_sight() -> None:
    books = Books()
    books.read(1, 10)
    books.left(Way.FILE, "/a", 0)
    books.file("/a", size=0)
    assert books.fates() == [(Fate.NOT_AT_REST, Why.EMPTY)]
    books.unseen = frozenset({1})
    assert books.fates() == [UNKNOWN]


@pytest.mark.parametrize(("layers", "fate"), [(2, Fate.NEVER_LEFT), (1, Fate.WRITTEN)])
def test_a_record_of_several_layers_is_not_whole_without_one_of_them(layers: int, fate: Fate) -> None:
    books = Books()
    for call in (1, 2, 3):
        for number in range(3):
            books.read(call, 10 * call, layer=f"layer.{number}")
    for call in (1, 3):
        for number in range(3 if call == 1 else 2):
            target = f"/{call}" if layers > 1 else f"/{call}.{number}"
            books.found(call, 10 * call + 2, Form.VERBATIM, target, layer=f"layer.{number}")
    for number in range(2):
        books.found(2, 40, Form.VERBATIM, "/2" if layers > 1 else f"/2.{number}", layer=f"layer.{number}")
    rest = books.result()
    fates = {
        (call, number): rest.split(call, books.name(f"layer.{number}"), ALL)[0].fate
        for call in (1, 2)
        for number in range(3)
    }
    assert [fates[2, number] for number in range(3)] == [fate, fate, Fate.NEVER_LEFT]


@pytest.mark.parametrize(
    ("found", "fate"),
    [
        ({(1, 0), (2, 0)}, Fate.NOT_AT_REST),
        ({(1, 1), (2, 1)}, Fate.NEVER_LEFT),
        ({(1, 0), (2, 0), (2, 1)}, Fate.NEVER_LEFT),
        ({(1, 0)}, Fate.NEVER_LEFT),
    ],
    ids=["first layers only", "last layers only", "sometimes", "not all of the first"],
)
def test_records_whose_last_layers_are_never_found_are_cut(found: set[tuple[int, int]], fate: Fate) -> None:
    books = Books()
    for call in (1, 2):
        for number in range(3):
            books.read(call, 10 * call, layer=f"layer.{number}")
    for call, number in sorted(found):
        books.found(call, 10 * call + 2, Form.VERBATIM, f"/{call}", layer=f"layer.{number}")
    (last,) = books.result().split(2, books.name("layer.2"), ALL)
    assert last.fate == fate


@pytest.mark.parametrize(
    ("other", "fate"),
    [(Form.PARTLY, Fate.READ), (Form.CUT, Fate.READ), (Form.VERBATIM, Fate.NEVER_LEFT)],
)
def test_nothing_is_missing_of_a_call_whose_other_layers_were_found_in_part_only(
    other: Form, fate: Fate
) -> None:
    """A file was looked at while it was written: what comes next in it was not there yet."""
    books = Books()
    for call in (1, 2, 3, 4):
        for layer in ("first", "second"):
            books.read(call, 10 * call, layer=layer)
            if call != 2:
                books.found(call, 10 * call + 1, Form.VERBATIM, f"/store/{call}", layer=layer)
    books.found(2, 21, other, "/store/2", layer="first")
    books.left(Way.FILE, "/store/2", 1 << 20)
    assert books.fates()[3] == (fate, Why.NONE)


@pytest.mark.parametrize(("layer", "fate"), [("first", Fate.NEVER_LEFT), ("second", Fate.READ)])
def test_nothing_is_missing_of_a_call_of_whose_later_layers_one_record_was_found_in_part(
    layer: str, fate: Fate
) -> None:
    """In the first layer a piece may be that of another prompt, which has the same tokens there."""
    books = Books()
    for call in (1, 2, 3):
        for name in ("first", "second"):
            books.read(call, 10 * call, layer=name)
            slots = f"0+{SLOTS // 2}" if call == 2 else f"0+{SLOTS}"
            books.found(call, 10 * call + 1, Form.VERBATIM, f"/store/{call}", slots, layer=name)
    half = (SLOTS // 2, SLOTS)
    books.found(2, 21, Form.PARTLY, "/store/2", f"{SLOTS // 2}+{SLOTS // 2}", layer=layer)
    books.left(Way.FILE, "/store/2", 1 << 20)
    other = "second" if layer == "first" else "first"
    parts = books.result().split(2, books.name(other), ALL)
    assert [one.fate for one in parts if one.slots == (half,)] == [fate]


@pytest.mark.parametrize(
    ("others", "fate"),
    [(["gone", "gone"], Fate.READ), (["/kv/3", "/kv/4"], Fate.WRITTEN)],
    ids=["a record of several layers", "a file for each layer"],
)
def test_a_layer_alone_in_another_record_is_another_prompts(others: list[str], fate: Fate) -> None:
    """A first layer computes the same for the same tokens: its bytes stand in other prompts' records."""
    books = Books()
    for layer, target in zip("abc", ["/kv/2", *others], strict=True):
        books.read(1, 1, layer=layer)
        books.file(target, exists=target != "gone")
        books.found(1, 2, Form.VERBATIM, target, layer=layer)
    assert books.fates()[0] == (fate, Why.NONE)


@pytest.mark.parametrize(("whole", "fate"), [(1, Fate.READ), (3, Fate.WRITTEN)])
def test_what_is_whole_in_memory_beside_more_that_is_altered_is_only_read(whole: int, fate: Fate) -> None:
    """As it stood before it was altered: what alters KV does so with all that it stores."""
    books = Books()
    for call in range(1, 3 + whole):
        books.read(call, call)
        books.found(call, call, Form.VERBATIM if call > 2 else Form.ZEROED, MEMORY + "store")
    assert books.fates()[-1] == (fate, Why.NONE)


def test_what_may_still_be_on_its_way_is_not_missing() -> None:
    books = Books()
    books.read(1, 10)
    books.found(1, 60, Form.VERBATIM, "/a")
    books.read(2, 100)
    books.ended = 700
    assert [one for one, _ in books.fates()] == [Fate.WRITTEN, Fate.READ], (
        "ten times the slowest, and a margin"
    )
    books.ended = 5000
    assert [one for one, _ in books.fates()] == [Fate.WRITTEN, Fate.NEVER_LEFT]


@pytest.mark.parametrize("how", ["not kept", "not looked through"])
def test_nothing_is_missing_where_it_could_not_have_been_found(how: str) -> None:
    books = Books()
    books.read(1, 10, kept=how != "not kept")
    books.read(2, 20)
    books.found(2, 22, Form.VERBATIM, "/a")
    if how == "not looked through":
        books.left(Way.FILE, "/large", 1 << 40, marks=0)
    assert [one for one, _ in books.fates()] == [Fate.READ, Fate.WRITTEN]


def test_one_child_s_memory_says_nothing_beside_the_other_s_files() -> None:
    books = Books()
    books.read(1, 10, connector=1)
    books.read(2, 20, connector=2)
    books.found(2, 22, Form.VERBATIM, "/a", connector=2)
    assert [one for one, _ in books.fates()] == [Fate.READ, Fate.WRITTEN]


def test_what_was_found_of_no_known_connector_is_of_the_one_that_read_in_its_call() -> None:
    """A thread that a connector started before its first hook, in a process that holds two of them."""
    books = Books()
    books.read(1, 10, connector=1)
    books.found(1, 12, Form.VERBATIM, "/a", connector=0)
    books.read(2, 20, connector=2)
    books.found(3, 22, Form.VERBATIM, "/b", connector=0)
    assert [one for one, _ in books.fates()] == [Fate.WRITTEN, Fate.READ]


@pytest.mark.parametrize(("other", "fate"), [(Form.VERBATIM, Fate.READ), (Form.CUT, Fate.NOT_AT_REST)])
def test_pieces_in_a_write_that_holds_all_of_another_child_s_kv_are_no_cut(other: Form, fate: Fate) -> None:
    """Both read the same prompts, one keeps whole prompts, the other one a file for each of their units."""
    books = Books()
    for n in (1, 2):
        books.read(n, 10 * n, connector=1)
        books.read(10 + n, 10 * n, connector=2)
        books.found(n, 10 * n + 2, Form.CUT, f"/units/{n}", connector=1, by=100 + n)
        books.found(10 + n, 10 * n + 2, other, f"/units/{n}", connector=2, by=100 + n)
    assert [one for one, _ in books.fates()][::2] == [fate, fate]


@pytest.mark.parametrize(("sharing", "fate"), [((), Fate.NEVER_LEFT), ((1, 2), Fate.READ)])
def test_what_two_children_took_may_have_been_found_as_the_other_s(
    sharing: tuple[int, ...], fate: Fate
) -> None:
    books = Books()
    books.sharing = frozenset(sharing)
    books.read(1, 10, connector=1)
    books.read(2, 20, connector=1)
    books.found(2, 22, Form.VERBATIM, "/a")
    assert [one for one, _ in books.fates()] == [fate, Fate.WRITTEN]


@pytest.mark.parametrize(
    ("files", "fate"),
    [
        ({"/store/a": 0, "/store/b": 0}, (Fate.NOT_AT_REST, Why.EMPTY)),
        ({"/store/data.kv": 0, "/store/index": 50}, (Fate.NOT_AT_REST, Why.EMPTY)),
        ({"/store/.lock": 0, "/store/index": 50}, (Fate.READ, Why.NONE)),
        ({"/store/a": 0, "/store/compressed": 5000}, (Fate.READ, Why.NONE)),
    ],
)
def test_empty_files(files: dict[str, int], fate: tuple[Fate, Why]) -> None:
    books = Books()
    books.read(1, 10)
    for path, size in files.items():
        books.left(Way.FILE, path, size)
        books.file(path, size=size)
    assert books.fates() == [fate]


@pytest.mark.parametrize(("size", "fate"), [(448, Fate.NOT_AT_REST), (4096, Fate.READ), (None, Fate.READ)])
def test_an_index_that_is_written_in_place_beside_an_empty_file(size: int | None, fate: Fate) -> None:
    """Where it is too small for what any call read, no KV stands in it."""
    books = Books()
    books.read(1, 1)
    books.left(Way.FILE, "/store/data")
    books.left(Way.FILE, "/store/index", 32)
    books.left(Way.FILE, "/store/index", -1)
    books.file("/store/data", size=0)
    books.file("/store/index", size=size)
    assert [one for one, _ in books.fates()] == [fate]


def test_a_server_that_is_not_there_or_refuses_all() -> None:
    books = Books()
    books.read(1, 10)
    books.left(Way.SOCKET, "tcp host:1", 0, calls=0, errors=3)
    assert books.fates() == [(Fate.PUT_FAILED, Why.UNREACHABLE)]
    books = Books()
    books.read(1, 10)
    books.left(Way.SOCKET, "tcp host:1", 1 << 20, calls=3, errors=3)
    assert books.fates() == [(Fate.PUT_FAILED, Why.REFUSED)], "whatever form it had"
    books.left(Way.SOCKET, "tcp host:1", 1 << 20, calls=1, errors=0)
    assert books.fates() == [(Fate.READ, Why.NONE)]


@pytest.mark.parametrize(
    ("targets", "sent_to"),
    [
        (["tcp host:1"], "tcp host:1"), (["unix /run/store"], "unix /run/store"), (["/store/a"], ""),
        (["tcp host:1", "/store/a"], ""), (["/store/a", "tcp host:1"], ""),
    ],
)  # fmt: skip
def test_what_left_for_a_peer_alone_is_not_seen_at_rest(targets: list[str], sent_to: str) -> None:
    books = Books()
    books.read(1, 10)
    for target in targets:
        books.found(1, 11, Form.VERBATIM, target)
    (part,) = books.result().split(1, books.name("layer"), ALL)
    assert part.fate == Fate.WRITTEN
    assert part.sent_to == sent_to


def test_what_a_peer_refused_was_not_sent_to_it() -> None:
    assert Part(ALL, Fate.PUT_FAILED, Why.REFUSED, "tcp host:1").sent_to == ""


def test_a_server_that_is_not_there_beside_another_connector_s_large_file() -> None:
    books = Books()
    books.read(1, 10, connector=1)
    books.left(Way.SOCKET, "tcp 10.0.0.1:8080", 0, calls=0, errors=1, connector=1)
    books.read(2, 10, connector=2)
    books.left(Way.FILE, "/store/a", 1 << 20, connector=2)
    books.file("/store/a", size=1 << 20)
    assert books.fates()[0] == (Fate.PUT_FAILED, Why.UNREACHABLE)
    books.left(Way.FILE, "/store/a", 1 << 20, connector=1)
    assert books.fates()[0] == (Fate.READ, Why.NONE), "it may be its own"


def test_a_transaction_that_is_open_at_the_end() -> None:
    books = Books()
    books.read(1, 10)
    books.left(Way.SQLITE, "/kv.sqlite", -1, errors=1, marks=0, t=11)
    books.file("/kv.sqlite", size=100)
    assert books.fates() == [(Fate.NOT_AT_REST, Why.UNCOMMITTED)], "rolled back: it holds nothing"
    books.file("/kv.sqlite", size=1 << 20)
    assert books.fates() == [(Fate.READ, Why.NONE)], "committed at the end"
    books.left(Way.SQLITE, "/kv.sqlite", -1, errors=0, marks=0, t=12)
    books.file("/kv.sqlite", size=100)
    assert books.fates() == [(Fate.READ, Why.NONE)], "compressed, for all that is known"


@pytest.mark.parametrize(
    ("stands", "fate"),
    [
        ("11", (Fate.PROVED, Why.NONE)),
        ("00", (Fate.LOST_LATER, Why.OVERWRITTEN)),
        ("10", (Fate.READ, Why.NONE)),
        ("??", (Fate.READ, Why.NONE)),
    ],
)
def test_a_row_of_a_database_at_the_end(stands: str, fate: tuple[Fate, Why]) -> None:
    """Nothing else is seen of rows that are deleted: without a look at the end they are just read."""
    books = Books()
    books.read(1, 10)
    books.left(Way.SQLITE, "/kv.sqlite", -1, t=11)
    books.found(1, 11, Form.VERBATIM, "/kv.sqlite")
    for still in stands:
        books.piece(1, "/kv.sqlite", still)
    books.file("/kv.sqlite")
    assert books.fates() == [fate]


@pytest.mark.parametrize(("size", "rolled_back"), [(24, True), (1 << 20, False), (None, False)])
def test_a_database_that_is_too_small_for_what_was_written_in_its_transaction(
    size: int | None, rolled_back: bool
) -> None:
    """Where its pages may have moved, it is not known whether a piece still stands in it: its size is."""
    books = Books()
    books.read(1, 10)
    books.left(Way.SQLITE, "/kv.sqlite", -1, t=5)
    books.left(Way.SQLITE, "/kv.sqlite", -1, errors=1, t=11)
    books.found(1, 11, Form.VERBATIM, "/kv.sqlite")
    books.piece(1, "/kv.sqlite", "?")
    books.file("/kv.sqlite", size=size)
    fate = (Fate.NOT_AT_REST, Why.UNCOMMITTED) if rolled_back else (Fate.READ, Why.NONE)
    assert books.fates() == [fate]


@pytest.mark.parametrize(
    ("ended", "log", "fate"),
    [(1, False, Fate.NOT_AT_REST), (1, True, Fate.READ), (0, False, Fate.READ)],
)
def test_a_database_that_ends_before_the_place_at_which_kv_was_found_was_rolled_back(
    ended: int, log: bool, fate: Fate
) -> None:
    """What was not found in it, or in part, went the same way: nothing was committed after that."""
    books = Books()
    books.left(Way.SQLITE, "/kv.sqlite", -1, t=5)
    books.read(1, 10)
    books.read(2, 20)
    books.read(3, 30)
    books.left(Way.SQLITE, "/kv.sqlite", -1, errors=ended, t=31)
    books.found(1, 31, Form.VERBATIM, "/kv.sqlite")
    books.found(2, 31, Form.PARTLY, "/kv.sqlite")
    books.piece(1, "/kv.sqlite", "?", offset=12_456)
    books.ended = 32
    books.file("/kv.sqlite", size=12_288)
    books.file("/kv.sqlite-wal", exists=log)
    assert [one for one, _ in books.fates()] == [fate] * 3


@pytest.mark.parametrize(("whole", "fate"), [(0, Fate.ALTERED), (9, Fate.READ)])
def test_a_piece_with_zeros_beside_many_whole_ones_was_on_its_way(whole: int, fate: Fate) -> None:
    books = Books()
    for call in range(1, whole + 2):
        books.read(call, 10 * call)
        books.found(call, 10 * call + 1, Form.VERBATIM if call <= whole else Form.ZEROED, "/kv.bin")
    assert books.fates()[-1][0] == fate


def test_what_was_written_in_a_transaction_that_was_never_seen_to_end() -> None:
    books = Books()
    books.read(1, 10)
    books.left(Way.SQLITE, "/kv.sqlite", -1, t=5)
    books.left(Way.SQLITE, "/kv.sqlite", -1, errors=1, t=11)
    books.found(1, 11, Form.VERBATIM, "/kv.sqlite")
    books.piece(1, "/kv.sqlite", "0")
    books.file("/kv.sqlite")
    assert books.fates() == [(Fate.NOT_AT_REST, Why.UNCOMMITTED)]


@pytest.mark.parametrize(
    ("fates", "lost"),
    [
        ((Fate.NEVER_LEFT, Fate.NEVER_LEFT), [(0, 32)]),
        ((Fate.NEVER_LEFT, Fate.NEVER_LEFT, Fate.READ), [(0, 32)]),
        ((Fate.NEVER_LEFT, Fate.NEVER_LEFT, Fate.WRITTEN), []),
        ((Fate.NEVER_LEFT, Fate.READ), []),
    ],
    ids=["in no layer", "in one layer some pieces", "all of one layer", "one layer alone"],
)
def test_tokens_that_never_left_in_a_step_in_which_others_did(
    fates: tuple[Fate, ...], lost: list[tuple[int, int]]
) -> None:
    step = [Touch(1, 1, 1 << layer, ((0, 32),), fate=fate) for layer, fate in enumerate(fates)]
    other = Touch(1, 1, 0b111, ((32, 64),), fate=Fate.WRITTEN)
    assert left_in_part([*step, other]) == {1: lost}
    assert left_in_part([one for one in step if one.fate == Fate.NEVER_LEFT]) == {}, "nothing else left"
    whole = Touch(1, 1, 1, ((0, 48),), fate=Fate.NEVER_LEFT)
    assert [(one.fate, one.positions) for one in split(whole, [(0, 32)])] == [
        (Fate.NEVER_LEFT, ((0, 32),)),
        (Fate.READ, ((32, 48),)),
    ]


@pytest.mark.parametrize(
    ("lost", "often"),
    [([0, 1], True), ([0], False), ([0, 0], False)],
    ids=["in two layers", "a tenth", "in one layer alone"],
)
def test_what_never_left_in_several_layers_is_no_matter_of_matching(lost: list[int], often: bool) -> None:
    some = [Touch(1, 1, 1 << layer, ((0, 32),), fate=Fate.NEVER_LEFT) for layer in lost]
    rest = [Touch(step, 1, 1, ((0, 32),), fate=Fate.PROVED) for step in range(10 - len(some))]
    assert often_lost({0: some, 1: rest}) == often


@pytest.mark.parametrize(
    ("other", "steps", "often"),
    [(Fate.PROVED, 3, True), (Fate.PROVED, 2, False), (Fate.NEVER_LEFT, 3, False), (Fate.READ, 3, False)],
    ids=["of no other one", "in two steps", "once of another one", "of another one it is not known"],
)
def test_a_layer_of_which_nothing_ever_left_is_no_matter_of_matching(
    other: Fate, steps: int, often: bool
) -> None:
    lost = [Touch(step, 1, 1, ((0, 32),), fate=Fate.NEVER_LEFT) for step in range(steps)]
    rest = [Touch(step, 1, 0b1110, ((0, 320),), fate=Fate.PROVED) for step in range(1, 10)]
    assert often_lost({0: lost, 1: [*rest, Touch(0, 1, 0b10, ((0, 32),), fate=other)]}) == often


@pytest.mark.parametrize(("step", "often"), [(12, True), (8, False)])
def test_what_was_read_in_the_newest_step_may_still_be_on_its_way(step: int, often: bool) -> None:
    """Of another layer it is not known whether it left: it speaks against a layer that never did only where
    more was read since."""
    lost = [Touch(one, 1, 1, ((0, 32),), fate=Fate.NEVER_LEFT) for one in range(3)]
    rest = [Touch(one, 1, 0b1110, ((0, 320),), fate=Fate.PROVED) for one in range(1, 10)]
    assert often_lost({0: lost, 1: [*rest, Touch(step, 1, 0b10, ((0, 32),), fate=Fate.READ)]}) == often


def first_parts(
    head: int, unit: int, requests: int = 2, last: Fate = Fate.NEVER_LEFT
) -> dict[int, list[Touch]]:
    """Of each unit of two requests the first tokens are at rest, in three layers."""
    units = [(row, unit * number) for row in range(requests) for number in range(2)]
    reads: dict[int, list[Touch]] = {row: [] for row in range(requests)}
    for row, low in units:
        reads[row].append(Touch(1, 1, 0b111, ((low, low + head),), fate=Fate.PROVED))
        fate = last if (row, low) == units[-1] else Fate.NEVER_LEFT
        reads[row].append(Touch(1, 1, 0b111, ((low + head, low + unit),), fate=fate))
    return reads


@pytest.mark.parametrize(
    ("reads", "unit", "cut"),
    [
        (first_parts(32, 128), 128, True),
        (first_parts(32, 128), 64, True),
        (first_parts(32, 128, last=Fate.READ), 128, True),
        (first_parts(32, 128), 32, False),
        (first_parts(32, 128), 0, False),
        (first_parts(32, 128, requests=1), 128, False),
        (first_parts(32, 128, last=Fate.PROVED), 128, False),
        ({**first_parts(32, 128), 2: [Touch(1, 1, 0b111, ((0, 128),), fate=Fate.NEVER_LEFT)]}, 128, False),
        ({**first_parts(32, 128), 2: first_parts(64, 128)[0]}, 128, False),
    ],
    ids=[
        "of each record", "two of the metadata's units in a record", "the last one on its way", "by the unit",
        "a unit is not known", "of one request", "once whole", "once nothing", "once more",
    ],
)  # fmt: skip
def test_records_of_which_the_same_first_part_left_are_cut(
    reads: dict[int, list[Touch]], unit: int, cut: bool
) -> None:
    """Whole units that never left are another matter: something held them on their way."""
    assert cut_records(reads, unit) == cut


def test_amounts_and_examples() -> None:
    books = Books()
    for call in range(1, 9):
        books.read(call, call)
        books.found(call, call, Form.REFUSED, f"tcp host:{call}", slots="0+8")
    rest = books.result()
    assert rest.amounts == {(Fate.PUT_FAILED, Why.REFUSED): 64}
    assert len(rest.examples[Fate.PUT_FAILED, Why.REFUSED]) == 5


intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda one: (one[0], sum(one))))


@given(
    st.lists(st.tuples(intervals, st.sampled_from(list(Form))), max_size=6),
    intervals,
)
def test_each_slot_has_one_fate_whatever_was_found(
    found: list[tuple[list[tuple[int, int]], Form]], asked: list
) -> None:
    books = Books()
    books.read(1, 10)
    for parts, form in found:
        text = ",".join(f"{start}+{end - start}" for start, end in union(parts))
        books.found(1, 11, form, "/a", slots=text)
    rest = books.result()
    layer = books.name("layer")
    stored = [one for part in rest.parts.get((1, layer), ()) for one in part.slots]
    assert length(stored) == length(union(stored)), "no slot twice"
    split: list[Part] = rest.split(1, layer, asked)
    pieces = [one for part in split for one in part.slots]
    assert length(pieces) == length(union(pieces)) == length(union(asked))
    assert not subtract(union(pieces), union(asked))
    assert sum(rest.amounts.values()) == length(stored)


@pytest.mark.parametrize("at_rest", [False, True])
def test_an_index_that_is_written_anew_takes_no_kv_away(at_rest: bool) -> None:
    """Small files that are written for one prompt after the other may hold KV, or say where it is."""
    prompts = [SimpleNamespace(id=name, prefixes={number: 16}) for number, name in enumerate("ab", 1)]
    cells = {
        step: {0: Cell(16, bytes=20 * 16, files=1, targets={7: step}, replaced=step > 1)} for step in (1, 2)
    }
    lost = []
    calls: Any = SimpleNamespace(
        table=SimpleNamespace(steps=cells),
        stores=SimpleNamespace(steps=np.array([1, 2]), slots=np.array([16, 16]), alone=prompts),
        worker=SimpleNamespace(kv_layers=["layer"]),
        stands=lambda at: True,
        at_rest=lambda at: at_rest,
        lose=lambda at, end: lost.append(at),
    )
    assert overwritten_files([calls]).overwritten_calls == len(lost) == (0 if at_rest else 1)


@pytest.mark.parametrize("named", [True, False])
def test_what_lies_whole_in_the_store_is_at_rest_whether_the_metadata_names_it_or_not(named: bool) -> None:
    of_step: dict[int, list[Interval]] = {3: [(0, 16)]}
    calls: Any = SimpleNamespace(
        stores=SimpleNamespace(named=(of_step if named else {},), seen=({} if named else of_step,)),
        _slots=Slots(reads={3: [Touch(step=5, t=1, columns=1, positions=((0, 16),), fate=Fate.PROVED)]}),
        _step=lambda at: 5,
    )
    assert PositionCalls.at_rest(calls, (0, 0))


# --- a store in the process's memory ---------------------------------------------------------

PLACE = MEMORY + "store.HELD"
GONE, THERE, UNKNOWN = (Fate.NEVER_LEFT, Why.NOT_HELD), (Fate.WRITTEN, Why.NONE), (Fate.READ, Why.NONE)


def in_memory(*held: bool) -> Books:
    """Two calls a step, one layer; which of them is held at the end."""
    books = Books()
    for at, there in enumerate(held):
        books.read(at + 1, 10 + at, step=1 + at // 2)
        if there:
            books.found(at + 1, 9_000, Form.VERBATIM, PLACE)
    return books


def test_kv_that_is_held_in_memory_is_written() -> None:
    assert in_memory(True, True).fates() == [THERE, THERE]


def test_kv_is_dropped_where_other_kv_of_its_step_and_of_an_earlier_one_is_held() -> None:
    assert in_memory(True, True, False, True).fates() == [THERE, THERE, GONE, THERE]


def test_a_cache_that_forgot_what_is_oldest_lost_nothing_by_mistake() -> None:
    assert in_memory(False, False, False, True, True, True).fates() == [*[UNKNOWN] * 3, *[THERE] * 3]


def test_what_is_held_of_some_layers_only_is_not_known_to_be_whole() -> None:
    books = Books()
    for call in (1, 2):
        for layer in ("layer.0", "layer.1"):
            books.read(call, call, layer=layer)
            if (call, layer) != (2, "layer.1"):
                books.found(call, 9_000, Form.VERBATIM, PLACE, layer=layer)
    assert books.fates() == [THERE, THERE, UNKNOWN, UNKNOWN]


def test_what_is_last_may_be_on_its_way() -> None:
    assert in_memory(True, True, True, False).fates() == [THERE, THERE, THERE, UNKNOWN]


def test_what_is_not_held_is_not_known_where_not_all_was_looked_at() -> None:
    books = in_memory(True, True, False, True)
    books.read(5, 15)
    books.found(5, 9_000, Form.VERBATIM, PLACE, marks=0)
    assert books.fates() == [THERE, THERE, UNKNOWN, THERE, THERE]


def test_what_is_not_held_is_not_known_where_kv_may_go_another_way() -> None:
    held = True, True, False, True
    native = in_memory(*held)
    native.limited = frozenset({1})
    fetched = in_memory(*held)
    fetched.lent = True
    sent = in_memory(*held)
    sent.left(Way.SOCKET, "tcp 10.0.0.1:80", size=1 << 20)
    for books in (native, fetched, sent):
        assert books.fates() == [THERE, THERE, UNKNOWN, THERE]


@pytest.mark.parametrize(
    ("form", "fate"),
    [
        (Form.CUT, (Fate.NOT_AT_REST, Why.CUT)),
        (Form.ZEROED, (Fate.ALTERED, Why.ZEROED)),
        (Form.ALTERED, (Fate.ALTERED, Why.ROUNDED)),
        (Form.CAST, (Fate.WRITTEN, Why.NARROWER)),
    ],
)
def test_what_is_held_is_judged_as_what_left_but_only_where_it_goes_no_other_way(
    form: Form, fate: tuple[Fate, Why]
) -> None:
    books = Books()
    for call in (1, 2):
        books.read(call, call)
        books.found(call, 9_000, form, PLACE)
    assert books.fates() == [fate, fate]
    books.left(Way.FILE, "/store/compressed", size=1 << 20)
    assert books.fates() == [fate if form == Form.CAST else UNKNOWN] * 2


def test_kv_in_memory_beside_a_store_is_on_its_way_there() -> None:
    books = Books()
    for call in (1, 2, 3):
        books.read(call, call)
    books.found(1, 1, Form.VERBATIM, "/store/a")
    books.found(3, 3, Form.VERBATIM, "/store/c")
    books.found(2, 9_000, Form.VERBATIM, PLACE)
    books.left(Way.FILE, "/store/a", size=1 << 20)
    assert books.fates()[1] == (Fate.NEVER_LEFT, Why.NONE)


def test_kv_in_memory_of_a_store_that_refused_it_is_not_at_rest() -> None:
    books = Books()
    for call in (1, 2, 3):
        books.read(call, call)
    books.found(3, 9_000, Form.VERBATIM, PLACE)
    books.left(Way.SOCKET, "tcp 10.0.0.1:80", size=1 << 20, calls=3, errors=3)
    assert books.fates() == [(Fate.PUT_FAILED, Why.REFUSED)] * 3


# --- heads in another order -------------------------------------------------------------------


def test_heads_that_always_stand_in_another_order_are_altered() -> None:
    books = Books()
    for call in (1, 2):
        books.read(call, call)
        books.found(call, call, Form.TURNED, "/store/a")
    assert books.fates() == [(Fate.ALTERED, Why.TURNED)] * 2


def test_heads_that_now_and_then_stand_in_another_order_are_those_of_two_records() -> None:
    books = Books()
    for call, form in enumerate((Form.TURNED, Form.VERBATIM, Form.TURNED), 1):
        books.read(call, call)
        in_order = Flag.FIRST if form == Form.VERBATIM else 0
        books.found(call, call, form, "/store/a", marks=Flag.KEPT | in_order)
    assert books.fates() == [THERE] * 3


@pytest.mark.parametrize(("turned", "unseen", "fates"), [
    (3, 2, [(Fate.ALTERED, Why.TURNED)] * 3 + [UNKNOWN] * 2),
    (2, 3, [THERE] * 5),
])  # fmt: skip
def test_an_order_that_was_not_seen_speaks_for_no_order(
    turned: int, unseen: int, fates: list[tuple[Fate, Why]]
) -> None:
    """It did: heads that stood in another order were called stored where half of them were not seen."""
    books = Books()
    for call, form in enumerate([Form.TURNED] * turned + [Form.VERBATIM] * unseen, 1):
        books.read(call, call)
        books.found(call, call, form, "/store/a")
    assert books.fates() == fates


def test_one_record_with_heads_in_another_order_is_not_enough() -> None:
    books = Books()
    books.read(1, 1)
    books.found(1, 1, Form.TURNED, "/store/a")
    assert books.fates() == [THERE]


def test_where_heads_stand_in_another_order_nothing_is_called_whole_whose_order_was_not_seen() -> None:
    books = Books()
    for call in range(1, 6):
        books.read(call, call)
        books.found(call, call, Form.VERBATIM if call == 3 else Form.TURNED, "/store/a")
    altered = (Fate.ALTERED, Why.TURNED)
    assert books.fates() == [altered, altered, UNKNOWN, altered, altered]
