"""Shapes of metadata, by what their numbers are: read as they are meant, or said not to be understood."""

from __future__ import annotations

import enum
from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass, field, make_dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from kvtrace.agent.metadata import Admissions, Declared, StepRequests, is_empty, read
from kvtrace.agent.metadata.walk import NAMES_NOBODY
from kvtrace.trace.format import Flag

from .holding import BLOCK, Meta, Req, freeze, rows, slots, step

STORE, LOAD = int(Flag.STORE), int(Flag.LOAD)
A, B, C, D = "req-a", "req-b", "req-c", "req-d"


def one_step() -> dict[str, Req]:
    """a: a new prompt. b: waits for what is to come. c: decodes. d: the second chunk of its prompt."""
    return {
        A: Req(([111, 112, 113, 114, 115, 116, 117],), prompt=100, now=100),
        B: Req(([121, 122, 123, 124, 125],), prompt=80, before=64, awaited=64),
        C: Req(([131, 132, 133],), prompt=40, before=47, now=1, output=8),
        D: Req(([141, 142, 143, 144],), prompt=90, before=32, now=32),
    }


def record(name: str = "Item", **fields: Any) -> Any:
    return make_dataclass(name, list(fields))(**fields)


def declared(meta: Any, holdings: StepRequests | None = None) -> Declared:
    return read(meta, holdings or step(one_step()))


def said(meta: Any, holdings: StepRequests | None = None) -> list[tuple[Any, ...]]:
    found = declared(meta, holdings)
    assert found.readable and not found.problems, found.problems
    return rows(found)


def not_understood(meta: Any, holdings: StepRequests | None = None) -> list[tuple[str, str]]:
    found = declared(meta, holdings)
    assert not found.readable, rows(found)
    assert all(one.slots < 0 and one.tokens < 0 for one in found.entries if one.direction), rows(found)
    return [(problem.field, problem.shape) for problem in found.problems]


A_FIRST = [(A, STORE, 0, 48)]
QUIET = ["things", "zork", "where", "indices", "offsets", "ids_all", "_index"]
"""Names that say nothing."""


@pytest.mark.parametrize(
    "puts",
    [
        pytest.param([{"key": "f00d", "bid": 111, "rid": A}], id="a dictionary an entry"),
        pytest.param([record(key="f00d", bid=111, rid=A)], id="a record an entry"),
        pytest.param({A: {"key": "f00d", "bid": 111}}, id="a dictionary a request"),
        pytest.param([{A: {"key": "f00d", "bid": 111}}], id="a list of such"),
        pytest.param([{"at": {"key": "f00d", "bid": 111}, "rid": A}], id="a dictionary in an entry"),
        pytest.param([{"key": "f00d", "bid": 111}], id="no request"),
    ],
)
def test_entries_without_blocks_never_look_like_nothing(puts: Any) -> None:
    assert not_understood(Meta(puts=puts, gets=[]))


@pytest.mark.parametrize("name", [*QUIET, "block_ids", "pages"])
def test_blocks_are_what_the_request_holds_under_any_name(name: str):
    for given in ([111, 112, 113], np.array([111, 112, 113])):
        assert said(Meta(work=[record(rid=A, put=True, **{name: given})])) == A_FIRST


@pytest.mark.parametrize(
    "blocks",
    [
        (111, 112, 113), range(111, 114), np.array([111, 112, 113]),
        np.array([[111, 112, 113]]), [np.int64(111), np.int64(112), np.int64(113)], {111, 112, 113},
        frozenset({113, 112, 111}), deque([111, 112, 113]), [[111, 112, 113]], ([111, 112, 113],),
        {0: [111, 112, 113]}, [111, 112, 113, 0],
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_blocks_are_what_the_request_holds_in_any_container(blocks: Any):
    assert said(Meta(work=[record(rid=A, put=True, zork=blocks)])) == A_FIRST


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("indices", [0, 1, 2]), ("order", [3, 4, 5]), ("offsets", list(range(48))), ("layer_ids", [111, 112]),
        ("ranks", [111, 112, 113]), ("indices", [113, 111]),
    ],
)  # fmt: skip
def test_places_and_numbers_of_something_else_are_no_blocks(name: str, given: list[int]):
    small = {A: Req(([3, 4, 5, 6],), prompt=60, now=60)}
    assert not_understood(Meta(work=[record(rid=A, put=True, **{name: given})]), step(small))
    if name != "indices" or given[0]:
        assert not_understood(Meta(work=[record(rid=A, put=True, **{name: given})]))


def test_an_index_in_front_of_blocks_is_no_block():
    """Though the request may have a block of that number."""
    small = step({A: Req(([2, 3, 1, 4],), prompt=60, now=60)})
    rows = [np.array([0, 2]), np.array([1, 3])]
    assert said(Meta(rid=[A], egress=rows), small) == [(A, STORE, 0, 32)]
    assert said(Meta(egress=[record(rid=A, put=True, zork=rows)]), small) == [(A, STORE, 0, 32)]


def test_slots_that_may_be_anothers_blocks_are_neither():
    small = step({A: Req(([1, 2, 3, 4],), prompt=60, now=60), B: Req(([17, 18, 19],), prompt=40, now=40)})
    assert not_understood(Meta(work=[record(put=True, zork=[17, 18, 19])]), small)
    assert said(Meta(work=[record(put=True, block_ids=[17, 18, 19])]), small) == [(B, STORE, 0, 48)]


@pytest.mark.parametrize("name", [*QUIET, "slot_mapping", "positions"])
def test_slots_are_what_lies_in_the_requests_blocks(name: str):
    mapping = slots([112, 113, 114], 0, 40)
    for given in (mapping, tuple(mapping), np.array(mapping)):
        assert said(Meta(work=[record(rid=A, put=True, **{name: given})])) == [(A, STORE, 16, 40)]


def test_slots_that_leave_some_out_are_not_understood():
    mapping = slots([111, 112, 113, 114])
    for given in (mapping[:10] + mapping[32:40], [*mapping, -1]):
        assert not_understood(Meta(work=[record(rid=A, put=True, slot_mapping=given)]))


@pytest.mark.parametrize("name", ["ids", "stuff", "token_ids"])
@pytest.mark.parametrize(("start", "end"), [(0, 100), (0, 48), (64, 100)])
def test_token_ids_are_the_requests_own(name: str, start: int, end: int):
    tokens = one_step()[A].tokens[start:end]
    assert said(Meta(work=[record(put=True, **{name: tokens})])) == [(A, STORE, start, end - start)]
    item = record(put=True, blocks=[111, 112, 113, 114, 115, 116, 117], **{name: np.array(tokens)})
    assert said(Meta(work=[item])) == [(A, STORE, start, end - start)]


def test_offsets_beside_blocks_that_are_called_so_are_no_slots() -> None:
    """96 is a slot of block 3, which the request holds as well: three slots of it were said to be stored."""
    holdings = step({A: Req(([*range(1, 19)],), prompt=565, before=96, now=96)}, sizes=(32,))
    entry = {"keys": ["k1", "k2", "k3"], "blocks": np.array([4, 5, 6]), "at": np.array([96, 128, 160])}
    assert said(Meta(push={A: entry}, pull={}), holdings) == [(A, STORE, 96, 96)]


# --- flat lists, pairs, dictionaries of keys --------------------------------------------------------------


@pytest.mark.parametrize(
    "meta",
    [
        Meta(store_gpu_blocks=[111, 112, 113], store_cpu_blocks=[121, 122, 123]),
        Meta(to_save=[111, 112, 113], keys=["k1", "k2", "k3"]),
        Meta(save_src_blocks=[111, 112, 113], save_dst_blocks=[9, 8, 7], event=5),
        Meta(save=[("k1", 111), ("k2", 112), ("k3", 113)]),
        Meta(save=[(b"k1", 111), (b"k2", 112), (b"k3", 113)]),
        Meta(puts={"k1": 111, "k2": 112, "k3": 113}),
        Meta(puts={b"k1": 111, b"k2": 112, b"k3": 113}),
        Meta(puts={111: "k1", 112: "k2", 113: "k3"}),
        Meta(puts={111: 7001, 112: 7002, 113: 7003}),
        Meta(puts={A: [("k1", 111), ("k2", 112), ("k3", 113)]}),
        Meta(puts={A: {"k1": 111, "k2": 112, "k3": 113}}),
        Meta(puts=[(111, 9001), (112, 9002), (113, 9003)]),
        Meta(ops=[record(op="put", block_id=block) for block in (111, 112, 113)]),
        Meta(ops=[record(op="put", key="k", page=block, rid=A) for block in (111, 112, 113)]),
        Meta(uploads=deque([record(block_id=block, checksum=123456789) for block in (111, 112, 113)])),
        Meta(plan=record(saving=record(items=[record(inner=record(things=[111, 112, 113]))]))),
        Meta(dump={A: range(111, 114)}, unfinished_request_ids={A, C}, finalize=["gone", C]),
        Meta(push={"tier": "ram", "jobs": {77: {"rid": A, "xs": [111, 112, 113]}}}),
        [(A, "put", [111, 112, 113])],
        {A: {"action": "dump", "where": (111, 112, 113)}},
        {(A, 0): ("store", [111, 112, 113])},
        OrderedDict([(A, SimpleNamespace(store=True, blocks=[111, 112, 113]))]),
        (Meta(saves={A: [111, 112, 113]}), Meta(saves={})),
    ],
    ids=range(23),
)  # fmt: skip
def test_the_first_three_blocks_of_a_are_stored(meta: Any):
    before = freeze(meta)
    assert said(meta) == A_FIRST
    assert freeze(meta) == before


def test_flat_lists_are_shared_out_to_their_requests():
    meta = Meta(save_blocks=[111, 112, 143, 144], fetch_blocks=[122, 123, 124])
    assert said(meta) == [(A, STORE, 0, 32), (B, LOAD, 16, 48), (D, STORE, 32, 32)]


Span = namedtuple("Span", "span where action")


def test_a_plain_dictionary_of_requests_may_hold_more():
    meta = {D: Span((40, 60), (143, 144), "dump"), "version": 3}
    assert said(meta) == [(D, STORE, 40, 20)]


def test_lists_side_by_side():
    """With an item for each request: in dictionaries, or in lists that nothing ties to each other."""
    meta = Meta(to_copy={A: [111, 112], D: [143, 144]}, lengths={A: 30, D: 32})
    assert said(meta) == [(A, STORE, 0, 30), (D, STORE, 32, 32)]
    assert not_understood(Meta(req_ids=[A, D], puts=[[111, 112], [143, 144]], num_tokens=[30, 32]))
    assert not_understood(Meta(put=[record(xs=[[111, 112], [143, 144]], num_tokens=[30, 32])]))


# --- several KV cache groups --------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "sizes", "now", "named", "expected"),
    [
        (([11, 12, 13, 14], [21, 22, 23, 24]), (16, 16), 64, ([11, 12], [21, 22]), (0, 32)),
        (([21], [11, 12, 13, 14]), (528, 16), 64, ([21], [11, 12, 13, 14]), (0, 64)),
        (([21], [11, 12, 13, 14]), (528, 16), 64, ([], [13, 14]), (32, 32)),
        (([21], [11, 12, 13, 14]), (528, 16), 64, [21, 11, 12, 13], (0, 48)),
        (([11, 12, 13, 14], [21, 22]), (16, 32), 50, ([11, 12, 13], [21, 22]), (0, 48)),
        (([11, 12, 13, 14], [0, 0, 23, 24]), (16, 16), 64, ([11, 12, 13, 14], [0, 0, 23, 24]), (0, 64)),
        (([11, 12, 13, 14], [21, 22, 23, 24]), (16, 16), 64, {0: [11, 12], 1: [21, 22]}, (0, 32)),
    ],
)
def test_groups_have_block_sizes_of_their_own(tables, sizes, now, named, expected):
    holdings = step({A: Req(tables, prompt=now, now=now)}, sizes)
    assert said(Meta(save=[record(rid=A, block_ids=named)]), holdings) == [(A, STORE, *expected)]


def test_slots_are_counted_in_the_block_size_of_their_group():
    holdings = step({A: Req(([21], [11, 12, 13, 14]), prompt=64, now=64)}, (528, 16))
    mapping = slots([11, 12, 13, 14], 16, 64)
    assert said(Meta(save=[record(slot_mapping=mapping)]), holdings) == [(A, STORE, 16, 48)]


# --- whose, where several share --------------------------------------------------------------


def shared() -> dict[str, Req]:
    return {
        A: Req(([11, 12, 13],), prompt=48, now=48),
        B: Req(([11, 12, 23, 24],), prompt=64, before=32, now=32, local=32),
    }


def test_a_shared_block_is_of_the_named_or_computing_request():
    assert said(Meta(save=[record(rid=B, xs=[11, 12])]), step(shared())) == [(B, STORE, 0, 32)]
    assert said(Meta(save=[record(xs=[11, 12])]), step(shared())) == [(A, STORE, 0, 32)]
    assert said(Meta(save=[record(xs=[11, 12, 23])]), step(shared())) == [(B, STORE, 0, 48)]
    assert said(Meta(save_blocks=[11, 12, 24]), step(shared())) == [(B, STORE, 0, 32), (B, STORE, 48, 16)]


def test_the_requests_of_a_step_are_not_asked_one_by_one() -> None:
    asked = []

    class Counting(StepRequests):
        def tables(self, req_id: str) -> list[list[int]]:
            asked.append(req_id)
            return super().tables(req_id)

    requests = {f"req-{n}": Req(([n + 1],), BLOCK, now=BLOCK) for n in range(64)}
    jobs = [record(token_ids=req.tokens, slots=slots(req.tables[0]), put=True) for req in requests.values()]
    counting = step(requests)
    counting.__class__ = Counting
    assert read(Meta(jobs=jobs), counting).store_entries == 64
    assert len(asked) < 64 * 16


def test_a_block_that_nobody_made_in_this_step_names_no_request():
    requests = shared()
    requests[A].before, requests[A].now, requests[B].local = 48, 0, 0
    requests[B].before, requests[B].now = 64, 0
    assert not_understood(Meta(save=[record(xs=[11, 12])]), step(requests))


# --- which way --------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([111, 112, 113], [(A, STORE, 0, 48)]),
        ([143, 144], [(D, STORE, 32, 32)]),
        ([141, 142], [(D, STORE, 0, 32)]),
        ([121, 122, 123, 124], [(B, LOAD, 0, 64)]),
        ([132], [(C, STORE, 16, 16)]),
    ],
)
def test_without_a_word_the_way_is_what_is_computed_or_awaited(blocks: list[int], expected: Any):
    assert said(Meta(work=[record(xs=blocks)])) == expected
    assert said(Meta(work={expected[0][0]: blocks})) == expected


@pytest.mark.parametrize(
    "meta",
    [
        Meta(save=[record(rid=A, xs=[141, 142])]),  # an id beside the blocks of another request
        Meta(push={B: [121, 122, 123]}),  # a store of what is still to come
    ],
)
def test_what_contradicts_the_step_is_not_believed(meta: Any):
    assert not_understood(meta)


def test_what_could_be_either_is_neither():
    requests = {A: Req(([11, 12, 13, 14],), prompt=64, before=32, now=32, awaited=32)}
    assert said(Meta(work=[record(rid=A, xs=[11, 12])]), step(requests)) == [(A, LOAD, 0, 32)]
    assert said(Meta(work=[record(rid=A, xs=[13, 14])]), step(requests)) == [(A, STORE, 32, 32)]
    assert not_understood(Meta(work=[record(rid=A, xs=[11, 12, 13, 14])]), step(requests))


def test_all_blocks_of_a_decoding_request_may_be_information():
    assert not_understood(Meta(block_tables={C: [131, 132, 133]}))
    assert not_understood(Meta(reqs={C: [131, 132, 133]}))
    named = record("SaveJob", rid=C, xs=[131, 132, 133])
    assert said(Meta(jobs=[named])) == [(C, STORE, 0, 48)], "but for the name of their class"


class Way(enum.Enum):
    UPLOAD = "up"
    GET = "down"


@pytest.mark.parametrize(
    ("fields", "direction"),
    [
        ({"is_store": True}, STORE), ({"push": True}, STORE), ({"way": Way.UPLOAD}, STORE),
        ({"way": Way.GET}, LOAD), ({"action": "pull"}, LOAD), ({"kind": "download"}, LOAD),
        ({"op": "dump"}, STORE), ({"get": True}, LOAD),
        ({"skip_save": False, "do_load": True}, LOAD), ({"skip_load": True, "is_store": True}, STORE),
        ({"already_saved": True, "do_load": True}, LOAD), ({"save_done": False, "fetch": True}, LOAD),
        ({"ready": True, "put": True}, STORE), ({"num_saved_tokens": 0, "put": True}, STORE),
    ],
)  # fmt: skip
def test_words_say_the_way(fields: dict[str, Any], direction: int):
    name, blocks = (A, [111, 112]) if direction == STORE else (B, [121, 122])
    assert said(Meta(work=[record(rid=name, xs=blocks, **fields)])) == [(name, direction, 0, 32)]


@pytest.mark.parametrize("fields", [{"skip_save": True}, {"is_store": False}, {"no_put": True}])
def test_what_shall_not_be_stored_is_no_store(fields: dict[str, Any]):
    assert said(Meta(work=[record(rid=A, xs=[111, 112], **fields)])) == []
    assert said(Meta(saves=[record(rid=A, xs=[111, 112], **fields)])) == []


# --- numbers --------------------------------------------------------------

ALL = [111, 112, 113, 114, 115, 116, 117]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"start": 16, "end": 64}, (16, 48)),
        ({"begin": 0, "upto": 40}, (0, 40)),
        ({"span": (16, 40)}, (16, 24)),
        ({"token_range": [16, 40]}, (16, 24)),
        ({"zork": (16, 48)}, (16, 32)),
        ({"part": slice(16, 40)}, (16, 24)),
        ({"positions": list(range(16, 40))}, (16, 24)),
        ({"num_tokens": 96}, (0, 96)),
        ({"num_blocks": 6}, (0, 96)),
        ({"first_block": 2, "num_blocks": 3}, (32, 48)),
        ({"start_block": 2, "end_block": 4}, (32, 32)),
        ({"start": 2, "end": 4}, (32, 32)),  # no block begins or ends at these as tokens
        ({"key": "7f3a", "at": range(2, 4)}, (32, 32)),
        ({"at": range(32, 64)}, (32, 32)),
        ({"store_start_block": 2, "store_end_block": 4}, (32, 32)),
        ({"token_len_chunk": 96}, (0, 96)),
        ({"skip_leading_tokens": 32}, (32, 80)),
        ({"skip": 32, "num_tokens": 64}, (32, 32)),  # what is skipped is a part of what is counted
        ({"start": 64, "num_tokens": 96}, (64, 32)),  # 96 tokens from there on are more than there are
        ({"start": 0, "end": 7}, (0, 112)),
        ({"where": {"from": 16, "upto": 40}}, (16, 24)),
        ({"where": SimpleNamespace(begin=16, end=40)}, (16, 24)),
        ({"crc": 1 << 40, "tp_rank": 1, "seq_no": 3, "epoch": 5}, (0, 112)),
        ({"num_prompt_tokens": 100, "n": 96}, (0, 96)),
    ],
)
def test_numbers_say_which_part(fields: dict[str, Any], expected: tuple[int, int]):
    assert said(Meta(work=[record(rid=A, put=True, xs=ALL, **fields)])) == [(A, STORE, *expected)]


@pytest.mark.parametrize(
    "fields",
    [
        {"zork": 16}, {"start": 64, "end": 16}, {"start": 16, "begin": 32, "end": 96},
        {"end": 96, "num_tokens": 32}, {"num_chunks": 1}, {"since": 0, "last": 48}, {"begin": 0, "to": 100},
        {"head": 32, "tail": 64}, {"head": 3}, {"since": 0, "to": 0}, {"start": 0, "tail": 0},
        {"since": 2, "tail": 5},
        {"zork": 32, "stop": 64},  # it may be a beginning
        # a prompt that was rounded to nothing, in the metadata all the same; or anything
        {"rng": range(0)}, {"block_range": range(0)}, {"zork": range(0)},
    ],
)  # fmt: skip
def test_numbers_that_leave_a_choice_are_not_understood(fields: dict[str, Any]):
    assert not_understood(Meta(work=[record(rid=A, put=True, xs=ALL, **fields)]))


def test_positions_in_blocks_or_tokens_are_not_understood():
    long = step({A: Req((list(range(100, 140)),), prompt=640, now=640)})
    for where in ({"start": 16, "end": 32}, {"at": range(16, 32)}):
        item = record(rid=A, xs=list(range(100, 140)), **where)
        assert not_understood(Meta(save=[item]), long)


def test_a_prompt_rounded_to_nothing_has_an_entry_of_nothing():
    item = record(
        rid=A, start=0, num_tokens=0, slot_mapping=np.array([], dtype=np.int64), keys=[], is_store=True
    )
    assert said(Meta(requests=[item])) == [(A, STORE, -1, 0)]


def test_a_prompt_in_parts_by_two_places_without_names():
    blocks = ALL[:6]
    items = [(A, "key", blocks, 0, 48, True), (A, "key", blocks, 48, 96, True)]
    assert said(Meta(save=items)) == [(A, STORE, 0, 48), (A, STORE, 48, 48)]


def test_places_in_a_store_are_no_slots_beside_blocks():
    """By their numbers they are slots of another block of the request."""
    places = [ALL[3] * 16 + 3, ALL[3] * 16 + 4]
    assert not_understood(Meta(save=[(A, places, ALL[:2])]))
    own = [block * 16 + at for block in ALL[:2] for at in range(16)]
    assert said(Meta(save=[(A, own, ALL[:2])])) == [(A, STORE, 0, 32)]


def test_a_tuple_of_two_ends_of_blocks_says_which_tokens():
    card = record(rid=A, held=ALL, put_span=(16, 48), fetch=None)
    assert said(Meta(cards={A: card})) == [(A, STORE, 16, 32)]


def test_a_zero_is_no_null_block_where_the_table_has_none():
    one = step({A: Req(([2, 1],), prompt=32, now=32)})
    item = record(rid=A, keys=["7f"], xs=[2], ranks=(0, 1), zork=(0, 1))
    assert said(Meta(save=[item]), one) == [(A, STORE, 0, 16)]


@pytest.mark.parametrize("nested", [True, False])
def test_blocks_that_a_window_has_left_are_still_named(nested):
    """The connector is told of new blocks alone, and keeps its list."""
    before, sizes = Admissions(), (16, 16) if nested else (16,)

    def named(*tables):
        return Meta(save=[record(rid=A, held=tables if nested else tables[0])])

    tables = ([5, 6], [7, 8])
    first = step({A: Req(tables[: len(sizes)], prompt=64, now=32)}, sizes, before)
    assert said(named(*tables), first) == [(A, STORE, 0, 32)]
    tables = ([0, 0, 9, 6], [7, 8, 10, 5])  # two of its blocks are given out again
    later = step({A: Req(tables[: len(sizes)], prompt=64, before=32, now=32)}, sizes, before)
    assert said(named([5, 6, 9, 6], tables[1]), later) == [(A, STORE, 0, 64)]
    assert not declared(named([5, 4, 9, 6], tables[1]), later).readable


def test_what_the_step_computes_is_no_order():
    scheduled = {A: 100, C: 1, D: 32}
    card = record(rid=A, held=ALL, save=(0, 96))
    assert said(Meta(cards={A: card}, quota=scheduled)) == [(A, STORE, 0, 96)]
    assert said(Meta(save=[], quota=scheduled)) == []


def test_a_tracker_of_requests_orders_nothing():
    """Tokens, blocks and how far it is, of a request that stands within a block: the worker decides."""
    tracker = Meta(fresh={A: (one_step()[A].tokens, ALL, 0)}, upto={A: 100})
    found = declared(tracker)
    assert not found.readable and not any(one.direction for one in found.entries)


# --- several lists for all -------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"rids": [A, A, D], "counts": [2, 1, 2]},
        {"put_who": [(A, 3), (D, 2)]},
        {"lens": [3, 2]},
    ],
)
def test_a_list_of_blocks_that_another_cuts_is_right_or_unread(more: dict[str, Any]):
    found = declared(Meta(flat=[111, 112, 113, 143, 144], **more))
    assert not found.readable or rows(found) == [(A, STORE, 0, 48), (D, STORE, 32, 32)]


@pytest.mark.parametrize("kind", [list, tuple])
def test_hashes_beside_blocks_are_no_entry_of_their_own(kind: Any):
    """A request's id and hashes of its blocks were "a request's id, and not how much of it": the step could
    not be read (vLLM's MooncakeStoreConnector, PegaFlow's connector)."""
    hashes = kind([bytes(32), bytes(32)])
    intent = record("SaveIntent", block_ids=kind([111, 112]), block_hashes=hashes)
    assert said(Meta(save_intents={A: intent}, load_intents={})) == [(A, STORE, 0, 32)]
    entry = record("ReqMeta", req_id=A, token_len_chunk=32, block_ids=[111, 112], block_hashes=hashes,
                   can_save=True)  # fmt: skip
    assert said(Meta(requests=[entry])) == [(A, STORE, 0, 32)]
    entry = record("ReqMeta", req_id=A, token_len_chunk=12, block_ids=[111], block_hashes=kind([]),
                   can_save=True)  # fmt: skip
    assert said(Meta(requests=[entry])) == [(A, STORE, 0, 12)]
    assert not_understood(Meta(messages=kind([bytes(80)]))) == [("messages", "list of bytes")]


def test_bytes_may_hold_anything():
    assert not_understood(Meta(wire=b'[["req-a", [111]]]', running=[])) == [("wire", "18 bytes")]
    assert said(Meta(wire=b"", running=[])) == []
    assert is_empty(Meta(wire=b"", running=[])) and not is_empty(Meta(wire=b"[]", running=[]))


# --- what is no entry --------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"finalize": ["x", A]}, {"unfinished_request_ids": {A, B}}, {"finished": []},
        {"block_hashes": [b"1", b"2"]}, {"hashes": ["ab", "cd"]}, {"deadlines": {A: 1.5}},
        {"reqs_to_send": {A: 2.5}}, {"peers": {"e": {"host": "h"}}},
        {"agents": [record("Agent", host="h", port=112, tp_size=2)]}, {"job_ids": {111, 112}}, {"clock": 1.5},
        {"remote_blocks": {A: [111, 112]}}, {"cpu_block_ids": [111, 112]},
        {"request_to_transfer": {A: "t-1"}},
        {"layer_ids": [111, 112, 113]}, {"failed_loads": {A: [111]}},
        {"by_event": {3: [A, B]}}, {"priorities": {A: 3}}, {"stats": record(sizes=[111, 112], count=3)},
        {"config": record(chunk=16, path="/tmp/x")}, {"finished_store_jobs": {}}, {"d": {"file": 112}},
    ],
)  # fmt: skip
def test_what_names_no_kv_leaves_the_step_readable(fields: dict[str, Any]):
    assert said(Meta(requests=[], **fields)) == []
    assert said(Meta(saves={A: [111, 112, 113]}, **fields)) == A_FIRST


# --- what is not understood says so --------------------------------------------------------------


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        (
            Meta(jobs=[record(rid=A, put=True, spans=[(0, 16, 3), (16, 32, 4)])]),
            ("jobs[].spans", "list of tuple of int: numbers that no request of this step holds"),
        ),
        (Meta(requests=[object()]), ("requests[]", "object")),
        (
            Meta(store_gpu_blocks=[3, 4]),
            ("store_gpu_blocks", "list of int: numbers that no request of this step holds"),
        ),
        (Meta(), ("", NAMES_NOBODY)),
        (Meta(saves=[record("Job", rid=A)]), ("saves[]", "a request's id, and not how much of it")),
        (Meta(reqs_to_send={A}), ("reqs_to_send", "ids of requests, and not how much of them")),
        (Meta(keys_to_save=["k1"]), ("keys_to_save", "list of str")),
        (Meta(puts=[{"key": "k1"}, {"key": "k2"}]), ("puts[]", "an entry of str")),
        (Meta(puts=[record(key="k1")]), ("puts[]", "an entry of str")),
        (
            Meta(save=[record(rid=A, xs=[111, 112], zork=9)]),
            ("save[].zork", "how much of it is not understood"),
        ),
    ],
)  # fmt: skip
def test_class_and_field_of_what_is_not_understood(meta: Any, expected: tuple[str, str]):
    assert not_understood(meta) == [expected]


def test_a_load_that_is_not_understood_leaves_the_stores_known():
    found = declared(Meta(saves={A: [111, 112, 113]}, loads={B: record(xs=[9])}))
    assert found.readable and found.problems and rows(found)[0] == A_FIRST[0]


# --- foreign objects --------------------------------------------------------------


class Touchy:
    """Whatever is asked of it is noticed."""

    touched: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.rid, self.blocks, self.put = A, [111, 112, 113], True

    @property
    def slot_mapping(self) -> Any:
        self.touched.append("property")
        raise AssertionError

    def __getattr__(self, name: str) -> Any:
        self.touched.append(name)
        raise AttributeError(name)

    def __iter__(self) -> Any:
        self.touched.append("iter")
        return iter(())

    def __len__(self) -> int:
        self.touched.append("len")
        return 0

    def __bool__(self) -> bool:
        self.touched.append("bool")
        return False

    def __eq__(self, other: object) -> bool:
        self.touched.append("eq")
        return False

    __hash__ = None  # type: ignore[assignment]


def test_nothing_of_a_foreign_object_is_called():
    Touchy.touched.clear()
    assert said(Meta(work=[Touchy()])) == A_FIRST
    assert Touchy.touched == []


class Struct:
    __slots__ = ("blocks", "never_set", "rid", "store")

    def __init__(self) -> None:
        self.rid, self.blocks, self.store = A, [111, 112, 113], True


def test_slots_structs_and_wrapped_lists():
    msgspec = pytest.importorskip("msgspec")
    assert said(Meta(work=[Struct()])) == A_FIRST
    made = msgspec.defstruct("Job", [("rid", str), ("blocks", list), ("put", bool)])
    assert said(Meta(work=[made(A, [111, 112, 113], True)])) == A_FIRST
    constant = type("ConstantList", (), {"__init__": lambda self, x: setattr(self, "_x", x)})
    assert said(Meta(work=[record(rid=A, put=True, blocks=constant([111, 112, 113]))])) == A_FIRST


def test_what_refers_to_itself_ends():
    meta = Meta(saves={A: [111, 112, 113]})
    meta.self = meta  # type: ignore[attr-defined]
    loop: list[Any] = []
    loop.append(loop)
    meta.loop = loop  # type: ignore[attr-defined]
    assert A_FIRST[0] in rows(declared(meta))


def test_generators_are_left_alone():
    def numbers():
        yield from [111, 112, 113]

    left = numbers()
    declared(Meta(work=[record(rid=A, put=True, blocks=left)]))
    assert list(left) == [111, 112, 113]


Pair = namedtuple("Pair", "rid blocks")


def test_a_finished_request_can_still_be_named_by_its_id():
    """Its blocks alone are nobody's: they were freed."""
    holdings = step(one_step())
    holdings._admissions.freed("req-gone", [[211, 212, 213]])
    assert not_understood(Meta(store_blocks=[211, 212]), holdings)
    assert said(Meta(store={"req-gone": Pair("req-gone", [212])}), holdings) == [("req-gone", STORE, 16, 16)]


@dataclass
class Deep:
    next: Any = None
    saves: Any = field(default_factory=dict)


def test_work_is_bounded():
    deep = Deep(saves={A: [111]})
    for _ in range(50):
        deep = Deep(deep)
    assert not declared(Meta(plan=deep)).readable
    many = Meta(saves=[record(rid=A, blocks=[111])] * 10_000)
    assert not declared(many).readable


@pytest.mark.parametrize("inner", [False, True])
def test_one_block_beside_more_of_the_request_s_may_be_either(inner: bool):
    """Neither name says which: the one block of the entry, or all that the request has."""
    more = {"qqd": [111, 112]}
    item = SimpleNamespace(kkd=[111], **({"wwd": SimpleNamespace(**more)} if inner else more))
    assert not_understood(Meta(saves={A: item}))
    named = SimpleNamespace(kkd=[111], block_ids=[111, 112])
    assert said(Meta(saves={A: named})) == [(A, STORE, 0, 32)]
    assert said(Meta(saves={A: SimpleNamespace(kkd=[3], qqd=[111, 112])})) == [(A, STORE, 0, 32)]


@pytest.mark.parametrize(
    "array",
    [np.array([{"block": 111}]), np.array([[111, 9001], [112, 9002]]), np.array([(111, 7)], dtype="i4,i4")],
    ids=["objects", "two dimensions", "records"],
)
def test_an_array_that_is_not_read_is_not_empty(array: np.ndarray):
    assert not_understood(Meta(work=array))
    assert said(Meta(work=array[:0])) == [] and said(Meta(work=np.ones((2, 3)))) == []
