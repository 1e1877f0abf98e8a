"""Reads that may be for an earlier holder of their blocks."""

from __future__ import annotations

from kvtrace.ledger.slots.lag import Due, Lag, lag, owners_of

A, B, C = 0, 1, 2
BOTH = frozenset({5, 6})
GIVEN = [(step, row, block) for step, row in ((1, A), (2, B), (3, C)) for block in BOTH]
DUE = [Due(A, 1, BOTH), Due(B, 2, BOTH), Due(C, 3, BOTH)]


def of(reads: dict[int, set[int]], due: list[Due] = DUE, given: list[tuple[int, int, int]] = GIVEN) -> Lag:
    return lag(due, owners_of(given), reads)


def test_reads_a_step_late_may_be_each_of_the_one_before() -> None:
    assert of({2: {5, 6}, 3: {5, 6}}) == Lag(frozenset({(B, 2), (C, 3)}), frozenset({A, B}))


def test_reads_in_time_are_no_others() -> None:
    assert of({1: {5, 6}, 2: {5, 6}, 3: {5, 6}}) == Lag()


def test_a_request_of_which_a_part_was_read_in_time_was_not_missed() -> None:
    assert of({1: {5}, 2: {5, 6}}) == Lag()


def test_what_was_not_to_be_stored_leaves_no_doubt() -> None:
    assert of({2: {5, 6}, 3: {5, 6}}, DUE[1:]) == Lag()


def test_fewer_blocks_than_were_to_be_stored_are_not_the_earlier_holders() -> None:
    assert of({2: {5}, 3: {5}}) == Lag()


def test_blocks_that_nobody_else_got_are_not_missed() -> None:
    given = [(1, A, 5), (1, A, 6), (2, B, 5), (2, B, 7)]
    assert of({2: {5, 7}}, [Due(A, 1, BOTH), Due(B, 2, frozenset({5, 7}))], given) == Lag()


def test_a_later_holder_with_more_blocks_is_in_doubt_as_well() -> None:
    """The first one's blocks go to the second one in another order, and with others beside them."""
    given = [(1, A, 5), (1, A, 6), (2, B, 6), (2, B, 5), (2, B, 7)]
    found = of({2: {5, 6}}, [Due(A, 1, BOTH), Due(B, 2, frozenset({5, 6, 7}))], given)
    assert found == Lag(frozenset({(B, 2)}), frozenset({A}))


def test_reads_of_more_than_the_earlier_holders_blocks_are_the_present_ones() -> None:
    """A connector that drops some of what it is to store reads others' blocks as they come."""
    given = [*GIVEN[:2], (2, B, 5), (2, B, 6), (2, B, 7)]
    assert of({2: {5, 6, 7}}, [Due(A, 1, BOTH), Due(B, 2, frozenset({5, 6, 7}))], given) == Lag()
