"""Blocks read beside those of the prompts, all by the same number: what is concluded, and from what not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from synth import Chunk as Computed
from synth import Prompt
from test_positions import SAVED, UNSEEN, alike, cache

from kvtrace.ledger.requests import Chunk, Request
from kvtrace.ledger.slots.displaced import displaced
from kvtrace.ledger.slots.tables import Given
from kvtrace.trace.rows import BlocksGiven

SIZE = 16
Tables = Sequence[tuple[int, Sequence[int]]]
"""Of each prompt its tokens and its blocks."""
MIXED: Tables = [(32, [6, 5]), (50, [7, 4, 3, 2]), (20, [1, 8])]
"""No two of them lie as they would were all blocks one further."""


def request(tokens: int, chunks: Sequence[tuple[int, int, int]]) -> Request:
    parts = tuple(Chunk(step=step, start=start, end=end, t=0) for step, start, end in chunks)
    return Request("r", 1, tokens, tokens, 0, chunks=parts)


def found(
    tables: Tables,
    read: Mapping[int, set[int]],
    blank: Mapping[int, int] | None = None,
    chunked: bool = False,
) -> set[tuple[int, int, int]]:
    """Each prompt is computed in a step of its own, from 1 on, unless all in one: that of ``read``."""
    steps = [next(iter(read))] * len(tables) if len(read) == 1 else [*range(1, len(tables) + 1)]
    given, requests = [], {}
    for row, ((tokens, blocks), step) in enumerate(zip(tables, steps, strict=True)):
        whole = [(step, 0, tokens)]
        requests[row] = request(tokens, [(step, 0, 8), (step + 9, 8, tokens)] if chunked else whole)
        given += [
            Given(row, BlocksGiven(0, 0, 0, step, 0, place, block, 1)) for place, block in enumerate(blocks)
        ]
    return {(one.row, one.step, one.end) for one in displaced(read, blank or {}, given, requests, SIZE)}


def test_all_blocks_are_one_too_far() -> None:
    """A block of the second prompt's middle is not read."""
    assert found(MIXED, {1: {7, 6, 8, 5, 4, 2}}) == {(0, 1, 32), (1, 1, 48), (2, 1, 16)}


def test_blocks_of_nobody_are_read() -> None:
    tables = [(32, [1, 2]), (48, [3, 4, 5])]
    read = {1: {2, 3}, 2: {4, 5, 6}}
    assert found(tables, read, {2: SIZE}) == {(0, 1, 32), (1, 2, 48)}
    assert not found(tables, read)  # all of that may be the prompts' own, without their beginnings


def test_what_is_as_a_unit_makes_it_is_not_off() -> None:
    assert not found(MIXED, {1: {6, 5, 7, 4, 3, 1}}, {1: SIZE})


@pytest.mark.parametrize(
    "read",
    [{1: {7, 6, 8, 5, 4}}, {1: {7, 6, 8, 5, 4, 2, 9}}, {1: {7, 6, 8, 5, 4, 3}}],
    ids=["one is missing", "one is more", "one is another"],
)
def test_what_is_off_but_for_one_block_says_nothing(read: Mapping[int, set[int]]) -> None:
    assert not found(MIXED, read, {1: SIZE})


def test_one_prompt_says_nothing() -> None:
    assert not found([(48, [3, 4, 5])], {1: {4, 5, 6}}, {1: SIZE})


def test_prompts_of_one_length_say_nothing() -> None:
    assert not found([(32, [1, 2]), (32, [3, 4])], {1: {2, 3}, 2: {4, 5}}, {2: SIZE})


def test_steps_that_compute_a_part_of_a_prompt_say_nothing() -> None:
    assert not found(MIXED, {1: {7, 6, 8, 5, 4, 2}}, chunked=True)


def test_what_stands_for_other_blocks_is_not_saved(tmp_path: Path) -> None:
    sim = cache(tmp_path)
    lengths = {"a": 32, "b": 48}
    for name, tokens in lengths.items():
        sim.arrive(Prompt(name, tokens))
        chunks = [Computed(name, 0, tokens, first=True)]
        sim.step(chunks, prompts={name: tokens}, unreadable=True)
        slots = [slot + SIZE for slot in sim.slots(name, 0, tokens)]
        sim.touch(dict.fromkeys(range(2), slots))
        sim.finish(name, tokens)
    assert [alike(sim, name) for name in lengths] == [{(0, n): "MISPLACED READ"} for n in lengths.values()]


@pytest.mark.parametrize("first", [0, SIZE])
def test_beginnings_that_may_have_been_read_out_of_sight(tmp_path: Path, first: int) -> None:
    """What is known of both begins a block late, and what else was read is not known: for which tokens it
    stands is not known either. Where it begins with the prompts it is theirs."""
    sim = cache(tmp_path)
    sim.workers[0].names["0+1"] = 0  # which slots is not known
    for name, tokens in {"a": 64, "b": 80}.items():
        sim.arrive(Prompt(name, tokens))
        sim.step([Computed(name, 0, tokens, first=True)], prompts={name: tokens}, unreadable=True)
        sim.read(name, first, tokens)
        sim.touch({0: [0], 1: [0]})
        sim.finish(name, tokens)
    assert alike(sim, "a") == {(0, 64): UNSEEN if first else SAVED}
