"""Metadata of connectors that nobody here has seen: read by structure, or said to be unreadable."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtrace.agent.metadata import Declared, Totals, is_empty, read, totals
from kvtrace.agent.metadata import StepRequests as Blocks
from kvtrace.agent.metadata import words as metadata_words
from kvtrace.trace.format import UNKNOWN, Flag

from .fakes import KVConnectorMetadata

BLOCK = 16


def blocks(**req_blocks: list[int]) -> Blocks:
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=req, block_ids=(ids,)) for req, ids in req_blocks.items()]
    )
    scheduler = SimpleNamespace(block_size=BLOCK, requests=dict.fromkeys(req_blocks))
    return Blocks(scheduler, output)


def slots(*ids: int, tokens: int | None = None) -> np.ndarray:
    every = np.concatenate([np.arange(i * BLOCK, (i + 1) * BLOCK) for i in ids]) if ids else np.arange(0)
    return every[:tokens] if tokens is not None else every


@dataclass
class ReqMeta:
    token_ids: Any
    slot_mapping: Any
    is_store: bool


@dataclass
class ExampleConnectorMetadata(KVConnectorMetadata):
    requests: list[Any] = field(default_factory=list)


class _Slotted(KVConnectorMetadata):
    __slots__ = ("jobs",)

    def __init__(self) -> None:
        self.jobs = [("a", [4])]
        self.none: list[int] = []


Pair = namedtuple("Pair", "first second")


def test_vllms_example_connector_by_blocks_and_by_order():
    meta = ExampleConnectorMetadata(
        [
            ReqMeta(range(32), slots(4, 5), True),
            ReqMeta([], slots(), True),
            ReqMeta(range(16), slots(9), False),
        ]
    )
    declared = read(meta, blocks(a=[4, 5, 6], b=[7], c=[9, 10]))
    assert declared.readable
    assert [(e.req_id, e.direction, e.slots, e.start) for e in declared.entries] == [
        ("a", Flag.STORE, 32, 0),
        ("b", Flag.STORE, 0, UNKNOWN),
        ("c", Flag.LOAD, 16, 0),
    ]
    assert (declared.store_slots, declared.store_entries, declared.load_slots) == (32, 2, 16)


_values = st.one_of(
    st.none(), st.integers(), st.booleans(), st.text(max_size=3),
    st.builds(list), st.builds(dict), st.builds(set), st.just(()),
    st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    st.builds(KVConnectorMetadata), st.builds(object), st.just(np.arange(3)), st.just(Enum),
)  # fmt: skip


@given(st.dictionaries(st.from_regex("[a-z_]{1,8}", fullmatch=True), _values, max_size=4), st.booleans())
def test_metadata_empty_at_a_glance_is_empty_to_the_reader(fields, slotted):
    meta = (_Slotted if slotted else ExampleConnectorMetadata)()
    vars(meta).clear()
    vars(meta).update(fields)
    if is_empty(meta):
        assert read(meta, blocks(**{"no field's name": [4]})) == Declared()


def test_what_is_found_empty_at_a_glance():
    assert is_empty(ExampleConnectorMetadata())
    assert not is_empty(KVConnectorMetadata())  # nothing in it: the worker decides by itself
    assert not is_empty(_Slotted())
    assert not is_empty(None) and not is_empty({}) and not is_empty(Pair([], []))
    assert read(None, blocks(a=[1])) == Declared()


def test_order_is_not_trusted_where_it_leaves_a_choice():
    meta = ExampleConnectorMetadata([ReqMeta([], slots(), True)])
    assert read(meta, blocks(a=[1], b=[2])).entries[0].req_id is None


def test_nested_metadata_of_a_wrapper_is_summed():
    class Multi(KVConnectorMetadata):
        def __init__(self) -> None:
            self.metadata = (
                ExampleConnectorMetadata([ReqMeta(range(16), slots(1), True)]),
                ExampleConnectorMetadata([ReqMeta(range(16), slots(1), True)]),
            )

    declared = totals(Multi())
    assert (declared.store_entries, declared.store_slots) == (2, 32)
    assert declared.readable


@pytest.mark.parametrize(
    "meta",
    [
        SimpleNamespace(version=3),
        SimpleNamespace(requests=[SimpleNamespace(blob=b"x")]),
        SimpleNamespace(rows=[np.array([0, 1])], keys=["k"]),
        SimpleNamespace(moves={"k": ["u0001<1f"]}),
        SimpleNamespace(puts=[("k", 2), ("l", 1)]),
        SimpleNamespace(jobs=[["k", [1, 2], 0, 0, True]]),
    ],
)
def test_what_cannot_be_read_is_not_taken_for_nothing(meta):
    assert not read(meta, blocks(a=[1, 2])).readable


@pytest.mark.parametrize("name", ["jobs", "tasks", "state", "layers"])
def test_the_name_of_a_list_of_records_hides_none(name: str):
    declared = read(SimpleNamespace(**{name: [[["k"], [2]], ("a", [1])]}), blocks(a=[1], b=[2]))
    assert {one.req_id for one in declared.entries} == {"a", "b"} or not declared.readable
    of_one = read(SimpleNamespace(**{name: [[["k"], [1]]]}), blocks(a=[1]))
    assert [one.req_id for one in of_one.entries] == ["a"] or not of_one.readable


# --- connectors with words of their own --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("reqs_to_save", Flag.STORE),
        ("isPut", Flag.STORE),
        ("reqs_to_offload", Flag.STORE),
        ("reqs_to_onload", Flag.LOAD),
        ("restoreJobs", Flag.LOAD),
        ("already_there", 0),
        ("outputs", 0),
        ("threads", 0),
    ],
)
def test_a_direction_is_told_by_words_not_by_letters(name: str, direction: int):
    assert metadata_words.read(name).direction == direction


def test_what_the_scheduler_read_travels_as_a_plain_tuple():
    """To workers that may not have kvtrace: nothing of its own may be in what is pickled."""
    declared = read(SimpleNamespace(to_save={"a": [4, 5]}), blocks(a=[4, 5, 6]))
    sent = declared.totals()
    assert {type(value) for value in sent} <= {bool, int}
    assert Totals(*sent).store_slots == 2 * BLOCK
