"""Tokens that were computed on KV that a load did not bring."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtrace.ledger.contents.residue import Places
from kvtrace.ledger.ends import NOT_SAVED, Doubt, LoadEnd, Outcome, SaveEnd, Spoiled
from kvtrace.ledger.intervals import Interval
from kvtrace.ledger.loads.model import LoadOf
from kvtrace.ledger.model import Engine
from kvtrace.ledger.requests import Chunk, Request
from kvtrace.ledger.saves.positions import Segment
from kvtrace.ledger.saves.spoiled import doubted, doubts, spoiled
from kvtrace.ledger.slots.reads import Touch
from kvtrace.ledger.slots.tables import Given
from kvtrace.terms import LOADED, NOT_OBSERVED, SAVED, Grade
from kvtrace.trace import facts, rows

ENGINE = Engine(0, 1, "engine core", facts.Engine(block_size=16), None, pairs=2)
LOADER = Request(
    "a", 0, 64, 64, 0, chunks=(Chunk(2, 2, 32, 64),), external=((0, 32),), first_step=2,
    prefixes={100 + end: end for end in (16, 32, 48, 64)},
)  # fmt: skip
REUSER = Request(
    "b", 0, 80, 80, 0, chunks=(Chunk(3, 3, 48, 80),), reused=((0, 48),), first_step=3,
    prefixes={100 + end: end for end in (16, 32, 48, 64)},
)  # fmt: skip


def load(end: LoadEnd, **more: object) -> LoadOf:
    lost = {((16, 32, end),): 0b10}
    return replace(LoadOf(0, "a", 0, 64, 2, accepted=32, lost=lost), **more)  # type: ignore[arg-type]


def given(row: int, block: int) -> Given:
    return Given(row, rows.BlocksGiven(0, 0, 0, 2 + row, 0, 0, block, 5))


def found(end: LoadEnd, second: int = 7, **more: object) -> dict[int, Spoiled]:
    """``second``: the first block of the request that reuses the other one's, which begin with block 7."""
    places = Places([given(0, 7), given(1, second)])
    return spoiled([LOADER, REUSER], [ENGINE], [load(end, **more)], places)


def test_what_is_computed_on_a_wrong_load_and_what_reuses_its_blocks() -> None:
    by = Spoiled(16, LoadEnd.WRONG)
    assert found(LoadEnd.WRONG) == {0: by, 1: by}
    assert found(LoadEnd.WRONG, second=20) == {0: by}, "others' blocks, with the same tokens"


@pytest.mark.parametrize("end", [LoadEnd.NOT_OBSERVED, LoadEnd.PENDING, LoadEnd.NOT_WRITTEN])
def test_what_is_not_known_of_a_load_spoils_nothing(end: LoadEnd) -> None:
    """Of NOT_WRITTEN it is known where the load's writes were watched."""
    assert found(end) == {}
    assert bool(found(end, measured=True)) == (end is LoadEnd.NOT_WRITTEN)


def test_what_was_computed_after_all_spoils_nothing() -> None:
    again = replace(LOADER, chunks=(Chunk(2, 2, 16, 64),))
    places = Places([given(0, 7)])
    assert spoiled([again], [ENGINE], [load(LoadEnd.FAILED)], places) == {}


def test_it_was_read_and_is_not_called_stored() -> None:
    stored = Outcome(SAVED, grade=Grade.PROVED)
    lost = Segment(64, 80, Outcome(NOT_SAVED, SaveEnd.NOT_DECLARED, Grade.READ), -1)
    loaded = Segment(0, 16, Outcome(LOADED, grade=Grade.READ), -1)
    segments = [loaded, Segment(16, 64, stored, 0), lost]
    assert doubted(segments, Doubt(32)) == [
        loaded,
        Segment(16, 32, stored, 0),
        Segment(32, 64, Outcome(SAVED, grade=Grade.READ), 0),
        lost,
    ]
    assert doubted(segments, None) == segments


@pytest.mark.parametrize(
    ("read", "starts"),
    [((16, 32), {0: 16, 1: 16}), ((32, 64), {1: 16}), ((0, 16), {1: 16})],
    ids=["read anew", "other tokens", "before the wrong ones"],
)
def test_what_was_stored_before_may_be_replaced_by_what_is_wrong(
    read: tuple[int, int], starts: dict[int, int]
) -> None:
    """Where the wrong KV was read, it may have been stored under the same key."""
    first = replace(LOADER, id="f", chunks=(Chunk(1, 1, 0, 64),), external=(), first_step=1,
                    prefixes={116: 16, 132: 32})  # fmt: skip
    by = Spoiled(16, LoadEnd.USED_BEFORE)
    reads = {1: (Touch(2, 0, 0b11, (read,)),)}
    found = doubts([first, LOADER], {1: by}, [], [reads])
    assert {row: doubt.start for row, doubt in found.items()} == starts


@pytest.mark.parametrize(("start", "unknown"), [(16, ((16, 48),)), (48, ())], ids=["within", "behind it"])
def test_a_wrong_load_that_another_request_reuses_is_not_called_saved(
    start: int, unknown: tuple[Interval, ...]
) -> None:
    """It stands in the GPU's prefix cache, and is stored as this request's."""
    by = Spoiled(start, LoadEnd.NOT_WRITTEN)
    found = doubts([LOADER, REUSER], {1: by}, [], [{1: (Touch(3, 0, 0b11, ((0, 80),)),)}])
    assert found[1].unknown == unknown


def test_without_a_wrong_load_nothing_is_doubted() -> None:
    assert doubts([LOADER, REUSER], {}, [], [{0: (Touch(2, 0, 1, ((0, 64),)),)}]) == {}


@pytest.mark.parametrize(
    ("again", "left"),
    [((), {0: ((16, 64),)}), ((16, 64), {}), ((16, 48), {0: ((48, 64),)})],
    ids=["not read again", "all read again", "a part read again"],
)
def test_what_became_of_kv_that_a_later_step_computed_anew_is_not_known(
    again: tuple[int, int], left: dict[int, tuple[Interval, ...]]
) -> None:
    """The load failed in step 2, what stood behind it was computed and read in that step, and step 3 computed
    all of it anew."""
    anew = replace(LOADER, chunks=(*LOADER.chunks, Chunk(3, 3, 16, 64)))
    touches = [Touch(2, 0, 0b11, ((16, 64),)), *([Touch(3, 0, 0b11, (again,))] if again else [])]
    loads = [load(LoadEnd.FAILED)]
    assert spoiled([anew], [ENGINE], loads, Places([given(0, 7)])) == {}
    found = doubts([anew], {}, loads, [{0: touches}])
    assert {row: doubt.unknown for row, doubt in found.items()} == left


def test_what_was_computed_anew_is_not_called_saved() -> None:
    stored = Segment(0, 64, Outcome(SAVED, grade=Grade.PROVED), 0)
    unknown = Outcome(NOT_OBSERVED, grade=Grade.NOT_OBSERVED)
    assert doubted([stored], Doubt(64, ((16, 32), (48, 64)))) == [
        replace(stored, end=16),
        Segment(16, 32, unknown, 0),
        replace(stored, start=32, end=48),
        Segment(48, 64, unknown, 0),
    ]
