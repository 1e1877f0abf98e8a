"""Tokens that were read for a later request alone, which reuses their blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtrace.ledger.ends import EVER, Doubt
from kvtrace.ledger.requests import Request, StoreEntry
from kvtrace.ledger.saves.reused_later import with_reused
from kvtrace.ledger.slots.reads import Touch

EARLIER = Request("a", 0, 60, 60, 0, first_step=1, last_step=3)
LATER = Request("b", 0, 80, 80, 0, reused=((0, 48),), first_step=5, last_step=9)
FOR_LATER = Touch(7, 70, 0b11, ((0, 32),)), Touch(7, 70, 0b11, ((32, 64),))
"""What a call read of the later one, in two accesses."""


def unknown(earlier: Request, *own: Touch, later: Request = LATER) -> tuple[tuple[int, int], ...]:
    shared = Touch(7, 70, 0b11, ((0, 32),)), Touch(7, 70, 0b11, ((32, 48),))
    found = with_reused({}, [earlier, later], [{0: [*own, *shared], 1: FOR_LATER}])
    return found[0].unknown if 0 in found else ()


def entry(step: int) -> StoreEntry:
    return StoreEntry(step, 48, 48, 0, 60, False)


def test_what_was_read_for_a_later_request_alone_says_nothing_of_the_earlier_one() -> None:
    """The earlier one was stored up to 32, in the background after it left."""
    assert unknown(EARLIER, Touch(4, 40, 0b11, ((0, 32),))) == ((32, 48),)
    assert unknown(EARLIER, Touch(4, 40, 0b11, ((0, 48),))) == ()


@pytest.mark.parametrize(("step", "left"), [(2, ()), (7, ((0, 48),))], ids=["before", "with the later one"])
def test_what_the_metadata_named_before_the_later_request_began_is_its_own(
    step: int, left: tuple[tuple[int, int], ...]
) -> None:
    """Blocks that it names later may be meant for the later one."""
    assert unknown(replace(EARLIER, entries=(entry(step),))) == left


@pytest.mark.parametrize(
    "later", [replace(LATER, first_step=2), replace(LATER, reused=())], ids=["at the same time", "not reused"]
)
def test_a_request_that_ran_beside_it_or_reuses_nothing_takes_nothing_from_it(later: Request) -> None:
    assert unknown(EARLIER, later=later) == ()


def test_what_was_in_doubt_before_stays_so() -> None:
    before = {0: Doubt(16, ((0, 8),)), 1: Doubt(EVER, ((70, 80),))}
    found = with_reused(before, [EARLIER, LATER], [{0: [Touch(7, 70, 1, ((32, 48),))], 1: FOR_LATER[1:]}])
    assert found[0] == Doubt(16, ((0, 8),)), "another call's, of one layer"
    shared = [{0: [Touch(7, 70, 3, ((32, 48),))], 1: FOR_LATER[1:]}]
    assert with_reused(before, [EARLIER, LATER], shared) == {
        0: Doubt(16, ((0, 8), (32, 48))), 1: before[1]
    }  # fmt: skip
