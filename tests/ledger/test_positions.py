"""What became of each token, by the slots that were touched: outcome, end and grade."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from both_books import balanced
from synth import WATCHED, Chunk, Entry, Fate, Prompt, Sim

from kvtrace.causes import diagnose
from kvtrace.ledger import Run, read_run
from kvtrace.ledger.ends import SaveEnd
from kvtrace.ledger.saves.calls import Call
from kvtrace.report.build import build_report
from kvtrace.terms import Grade
from kvtrace.trace.facts import Limit, WatchLimitsFact
from kvtrace.trace.format import Fact, Flag

LOAD, ASYNC = int(Flag.LOAD), int(Flag.ASYNC)
BLOCK = 16

SAVED, TAKEN, UNSEEN = "saved READ", "saved DECLARED", "not-observed NOT_OBSERVED"
NOT_OFFERED, NOT_OFFERED_DECLARED = "NOT_DECLARED READ", "NOT_DECLARED DECLARED"

Fates = dict[tuple[int, int], str]
"""Positions [start, end) -> outcome or end, and its grade."""


def cache(tmp_path: Path, **more: object) -> Sim:
    """An engine of two layers, with blocks of 16 tokens."""
    return Sim(tmp_path, **{"layers": 2, "block": BLOCK, "kv_blocks": 64, **more})  # type: ignore[arg-type]


def checked(sim: Sim, *requests: str) -> Run:
    """The run; every ledger balances."""
    sim.write()
    run, diagnosis = balanced(sim.dir, requests)
    for account, grades in diagnosis.saves.grades.items():
        assert all(grade != Grade.NOT_OBSERVED for grade in grades) or account == "not-observed"
    return run


def by_pair(sim: Sim, request: str = "a") -> list[Fates]:
    """Of each pair: ranks in order, each with its layers."""
    run = checked(sim, request)
    found: list[Fates] = [{} for _ in range(sim.tp * sim.layers)]
    for span in run.spans:
        outcome = span.outcome
        end = outcome.end
        name = outcome.name if end is None else end.name if isinstance(end, SaveEnd) else f"load {end.name}"
        for pair in span.pairs:
            fates, mine = found[pair], (span.start, span.end)
            before = next((one for one in fates if one[1] == span.start), None)
            word = f"{name} {outcome.grade.name}"
            if before is not None and fates[before] == word:
                del fates[before]
                mine = (before[0], span.end)
            fates[mine] = word
    return found


def alike(sim: Sim, request: str = "a") -> Fates:
    """... in all pairs."""
    found = by_pair(sim, request)
    assert all(one == found[0] for one in found), found
    return found[0]


def prefill(sim: Sim, request: str, start: int, end: int, stores: list[Entry] | None = None, *, of: int = 0,
            fate: Fate | None = None, unreadable: bool = False) -> int:  # fmt: skip
    """A step that computes [start, end) of a prompt of ``of`` tokens (0: ``end``)."""
    if not start:
        sim.arrive(Prompt(request, of or end))
    chunk = Chunk(request, start, end - start, first=not start)
    return sim.step(
        [chunk], stores or [], prompts={request: of or end}, fate=fate or Fate(), unreadable=unreadable
    )


def entry(request: str, start: int, end: int, flags: int = int(Flag.STORE)) -> Entry:
    return Entry(request, end - start, end, start, flags)


def witness(sim: Sim, request: str = "w") -> None:
    """Another request, saved as it should be: this connector reads where it can be seen."""
    prefill(sim, request, 0, 32, [entry(request, 0, 32)])
    sim.read(request, 0, 32)
    sim.finish(request, 32)


# ----------------------------------------------------------------------------------- what was read


Reading = Callable[[Sim], None]
MISPLACED, LATE, STALE, PART, NOTHING = (
    "MISPLACED READ",
    "READ_LATE READ",
    "STALE READ",
    "PART_READ READ",
    "NOTHING_READ READ",
)
UNREADABLE = -1
"""The metadata can't be read; else so many of a prompt's first tokens are named."""


def read(start: int, end: int, **more: Any) -> Reading:
    """Positions of request a."""
    return lambda sim: sim.read("a", start, end, **more)


def shifted(start: int, end: int, by: int) -> Reading:
    """The slots that lie so many behind those of request a."""
    return lambda sim: sim.touch_all([slot + by for slot in sim.slots("a", start, end)])


def at(slots: range) -> Reading:
    return lambda sim: sim.touch_all(slots)


NOBODYS, NULL_BLOCK = at(range(800, 864)), at(range(BLOCK))


def one_step(sim: Sim, prompt: int, named: int, reads: Sequence[Reading]) -> None:
    """Request a: computed in one step, after which its slots are read."""
    entries = [entry("a", 0, named)] if named > 0 else []
    prefill(sim, "a", 0, prompt, entries, unreadable=named == UNREADABLE)
    for one in reads:
        one(sim)
    sim.finish("a", prompt)


ONE_STEP: dict[str, tuple[int, int, list[Reading], Fates]] = {
    "all of it": (64, 64, [read(0, 64)], {(0, 64): SAVED}),
    "more than is named": (64, 32, [read(0, 48)], {(0, 48): SAVED, (48, 64): NOT_OFFERED}),
    "nothing is named": (64, 0, [read(0, 48)], {(0, 48): SAVED, (48, 64): NOT_OFFERED}),
    "metadata that can't be read": (64, UNREADABLE, [read(0, 48)], {(0, 48): SAVED, (48, 64): NOT_OFFERED}),
    "of this connector nothing was ever seen": (64, 64, [], {(0, 64): TAKEN}),
    "a part": (64, 64, [read(0, 32)], {(0, 32): SAVED, (32, 64): PART}),
    "the middle": (64, 64, [read(16, 32)], {(0, 16): PART, (16, 32): SAVED, (32, 64): PART}),
    "less than a block is left": (60, 60, [read(0, 48)], {(0, 48): SAVED, (48, 60): NOT_OFFERED}),
    "the same slots twice": (60, 60, [read(0, 48)] * 2, {(0, 48): SAVED, (48, 60): NOT_OFFERED}),
    "slots that hold nobody's tokens": (64, 64, [NOBODYS], {(0, 64): MISPLACED}),
    # Three of the slots are the request's own: read in the place of others, they are not saved by that.
    "the block after the right one": (64, 64, [shifted(0, 64, BLOCK)], {(0, 64): MISPLACED}),
    # Left out alone is not misplaced: the store knows their head already, or a unit leaves their end out.
    "all but the head": (64, UNREADABLE, [read(16, 64)], {(0, 16): NOT_OFFERED, (16, 64): SAVED}),
    "all but the end": (64, UNREADABLE, [read(0, 32)], {(0, 32): SAVED, (32, 64): NOT_OFFERED}),
    # A copy of a range of the cache holds blocks of nobody, too.
    "nobody's beyond the right ones": (
        64, UNREADABLE, [read(0, 32), NOBODYS], {(0, 32): SAVED, (32, 64): NOT_OFFERED},
    ),
    "the null block pads": (
        64, UNREADABLE, [read(16, 64), NULL_BLOCK], {(0, 16): NOT_OFFERED, (16, 64): SAVED},
    ),
    "before the forward": (64, 64, [read(0, 64, hook="start_load_kv")], {(0, 64): STALE}),
    "before the forward and after it": (
        64, 64, [read(0, 64, hook="start_load_kv"), read(0, 64)], {(0, 64): SAVED},
    ),
    # A thread begins too early. The slots are the right ones: nothing was read in their place.
    "partly before the forward": (
        64, 64, [read(0, 16, hook="start_load_kv"), read(16, 64)], {(0, 16): STALE, (16, 64): SAVED},
    ),
    "a last block that is not full, before the forward alone": (
        60, UNREADABLE, [read(0, 48), read(48, 60, hook="start_load_kv")],
        {(0, 48): SAVED, (48, 60): NOT_OFFERED},
    ),
    "the same, and it is named": (
        60, 60, [read(0, 48), read(48, 60, hook="start_load_kv")], {(0, 48): SAVED, (48, 60): STALE},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ONE_STEP)
def test_what_is_read_of_a_prompt_is_saved(tmp_path: Path, case: str) -> None:
    prompt, named, reads, fates = ONE_STEP[case]
    sim = cache(tmp_path)
    one_step(sim, prompt, named, reads)
    assert alike(sim) == fates


@pytest.mark.parametrize(
    ("named", "reads", "fates"),
    [
        (64, [read(0, 64, layers=[0])], [SAVED, NOTHING]),
        (0, [read(0, 64, layers=[0])], [SAVED, NOTHING]),
        (64, [read(0, 64, layers=[1])] * 2, [MISPLACED, SAVED]),
    ],
    ids=["one layer", "one layer, nothing is named", "both calls read the second layer"],
)
def test_each_layer_is_judged_by_what_was_read_of_it(
    tmp_path: Path, named: int, reads: list[Reading], fates: list[str]
) -> None:
    sim = cache(tmp_path)
    one_step(sim, 64, named, reads)
    assert by_pair(sim) == [{(0, 64): fate} for fate in fates]


@pytest.mark.parametrize(
    ("watching", "named", "reads", "fates", "of_the_other"),
    [
        (WATCHED, 64, [], {(0, 64): NOTHING}, SAVED),
        # A block that is nobody's is read, and the first one is not: what else was read stands for other
        # tokens, and of the rest of the run that is not known.
        (WATCHED, UNREADABLE, [shifted(0, 64, BLOCK)], {(0, 64): MISPLACED}, UNSEEN),
        # A single prompt that is read from within a block says nothing of the others.
        (
            WATCHED, UNREADABLE, [shifted(0, 48, 1)],
            {(0, 1): NOT_OFFERED, (1, 49): SAVED, (49, 64): NOT_OFFERED}, SAVED,
        ),
        (0, 48, [], {(0, 48): TAKEN, (48, 64): NOT_OFFERED_DECLARED}, SAVED),
        (0, UNREADABLE, [], {(0, 64): UNSEEN}, SAVED),
    ],
    ids=["nothing", "a block off", "a slot off", "not watched", "neither watched nor named"],
)  # fmt: skip
def test_a_connector_of_which_another_read_was_seen(
    tmp_path: Path, watching: int, named: int, reads: list[Reading], fates: Fates, of_the_other: str
) -> None:
    sim = cache(tmp_path)
    witness(sim)
    sim.watching = watching
    one_step(sim, 64, named, reads)
    assert alike(sim) == fates
    assert alike(sim, "w") == {(0, 32): of_the_other}


@pytest.mark.parametrize(("also", "fate"), [(False, NOTHING), (True, SAVED)])
def test_tokens_that_no_background_copy_took_were_not_read(tmp_path: Path, also: bool, fate: str) -> None:
    """It picked slots by an index, and none; unless another look at the same layer found some."""
    sim = cache(tmp_path)
    step = prefill(sim, "a", 0, 64, [entry("a", 0, 64)])
    sim.finish("a", 64)
    for layer in range(sim.layers):
        sim.touch({layer: []}, hook="", step=step)
    if also:
        sim.read("a", 0, 64, hook="", step=step)
    assert alike(sim) == {(0, 64): fate}


def test_tokens_read_in_the_background_a_step_later_are_saved(tmp_path: Path) -> None:
    sim = cache(tmp_path)
    step = prefill(sim, "a", 0, 64, [entry("a", 0, 64)])
    sim.finish("a", 64)
    sim.step([], tokens=1)
    sim.read("a", 0, 64, hook="", step=step)
    assert alike(sim) == {(0, 64): SAVED}


@pytest.mark.parametrize(("steps", "fate"), [(1, NOTHING), (2, UNSEEN)])
def test_an_unread_step_says_nothing_where_copies_come_later(tmp_path: Path, steps: int, fate: str) -> None:
    """Of the steps behind a watched one only the next is known to be watched."""
    sim = cache(tmp_path)
    prefill(sim, "w", 0, 32, [entry("w", 0, 32)])
    for _ in range(steps):
        sim.step([], tokens=1)
    sim.read("w", 0, 32, hook="get_finished")
    sim.finish("w", 32)
    prefill(sim, "a", 0, 64, [entry("a", 0, 64)])
    sim.step([], tokens=1)
    sim.finish("a", 64)
    assert alike(sim, "w") == {(0, 32): SAVED}
    assert alike(sim) == {(0, 64): fate}


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_read_a_step_later_may_be_behind_the_traces_end(tmp_path: Path, in_thread: bool) -> None:
    """As that of another request was, in a hook of the next step or in the background."""
    sim = cache(tmp_path)
    flags = int(Flag.STORE | Flag.ASYNC if in_thread else Flag.STORE)
    step = prefill(sim, "w", 0, 32, [entry("w", 0, 32, flags)])
    if in_thread:
        sim.read("w", 0, 32, hook="", step=step)
    else:
        sim.step([], tokens=1)
        sim.read("w", 0, 32, hook="get_finished")
    prefill(sim, "a", 0, 64, [entry("a", 0, 64, flags)])
    assert alike(sim) == {(0, 64): UNSEEN}


def test_without_a_known_read_each_unknown_one_may_be_late(tmp_path: Path) -> None:
    """A hook copies two steps later, by an operation that is not known."""
    sim = cache(tmp_path)
    step = prefill(sim, "a", 0, 64, [entry("a", 0, 64)])
    for layer in range(sim.layers):
        sim.effect(0, step, layer, 0)
    sim.step([], tokens=1)
    sim.step([], tokens=1)
    sim.touch_unknown(hook="get_finished")
    sim.finish("a", 64)
    assert alike(sim) == {(0, 64): TAKEN}


@pytest.mark.parametrize("understood", [True, False])
def test_a_table_in_metadata_not_understood_is_no_order(tmp_path: Path, understood: bool) -> None:
    """The blocks of all who run stood in it: of one that is not to be stored none was read, a fault."""
    sim = cache(tmp_path)
    witness(sim)
    prefill(sim, "a", 0, 64, [entry("a", 0, 64)], unreadable=not understood)
    sim.step([], tokens=1)
    sim.finish("a", 64)
    assert alike(sim) == {(0, 64): NOTHING if understood else NOT_OFFERED}


@pytest.mark.parametrize("layer", [0, 1])
def test_others_slots_stand_for_none_of_another_layer(tmp_path: Path, layer: int) -> None:
    """A connector that leaves a layer out, and copies other requests' KV beside: it was called misplaced."""
    sim = cache(tmp_path)
    prefill(sim, "z", 0, 64)
    prefill(sim, "a", 0, 64, [entry("a", 0, 64)])
    sim.read("a", 0, 64, layers=[0])
    sim.read("z", 0, 64, layers=[layer])
    for one in ("z", "a"):
        sim.finish(one, 64)
    assert by_pair(sim)[1] == {(0, 64): NOTHING if layer == 0 else MISPLACED}


@pytest.mark.parametrize(("watched", "fate"), [(True, LATE), (False, TAKEN)])
def test_what_an_unwatched_step_named_may_have_been_read(tmp_path: Path, watched: bool, fate: str) -> None:
    """Later its blocks are read as another request's, which is not named."""
    sim = cache(tmp_path)
    witness(sim)
    sim.watching = WATCHED if watched else 0
    sim.give("a", [20, 21], flags=int(Flag.FIRST))
    prefill(sim, "a", 0, 32, [entry("a", 0, 32)])
    sim.finish("a", 32)
    sim.watching = WATCHED
    sim.give("b", [20, 21], flags=int(Flag.FIRST))
    prefill(sim, "b", 0, 32)
    sim.read("b", 0, 32)
    sim.finish("b", 32)
    assert alike(sim) == {(0, 32): fate}


def test_a_whole_prefix_that_is_read_again_with_each_chunk(tmp_path: Path) -> None:
    sim = cache(tmp_path)
    for start in (0, 32, 64):
        prefill(sim, "a", start, start + 32, [entry("a", 0, start + 32)], of=96)
        sim.read("a", 0, start + 32)
    sim.finish("a", 96)
    assert alike(sim) == {(0, 96): SAVED}


def test_a_prompt_that_was_read_once_it_was_computed_in_full(tmp_path: Path) -> None:
    sim = cache(tmp_path)
    for start in (0, 32):
        prefill(sim, "a", start, start + 32, of=64)
    sim.read("a", 0, 64, hook="wait_for_save")
    sim.finish("a", 64)
    assert alike(sim) == {(0, 64): SAVED}


def test_decode_tokens_that_were_read(tmp_path: Path) -> None:
    sim = cache(tmp_path)
    prefill(sim, "a", 0, 30)
    sim.read("a", 0, 30)
    sim.grow("a", 34)
    for _ in range(4):
        sim.step([], tokens=1)
    sim.read("a", 0, 32, hook="wait_for_save")
    sim.finish("a", 34, 5)
    assert alike(sim) == {(0, 32): SAVED, (32, 34): UNSEEN}


@pytest.mark.parametrize(
    ("prompt_unreadable", "decode_unreadable", "fate"),
    [(True, False, NOT_OFFERED_DECLARED), (True, True, UNSEEN), (False, False, UNSEEN)],
    ids=["its metadata speaks", "of decode steps too", "the worker decides"],
)
def test_decode_tokens_under_metadata_that_is_not_understood(
    tmp_path: Path, prompt_unreadable: bool, decode_unreadable: bool, fate: str
) -> None:
    """No decode step is watched. What is read is read in steps alone whose metadata can't be read: that says
    it, and where no decode step has such, nothing is stored there."""
    sim = cache(tmp_path)
    prefill(sim, "a", 0, 32, unreadable=prompt_unreadable)
    sim.read("a", 0, 32)
    sim.grow("a", 36)
    sim.watching = 0
    for _ in range(4):
        sim.step([], tokens=1, unreadable=decode_unreadable)
    sim.finish("a", 36, 5)
    assert alike(sim) == {(0, 32): SAVED, (32, 36): fate}


@pytest.mark.parametrize(
    ("unreadable", "fate"), [(1, UNSEEN), (2, NOT_OFFERED_DECLARED)], ids=["of its end", "of the step after"]
)
def test_metadata_not_understood_behind_its_end(tmp_path: Path, unreadable: int, fate: str) -> None:
    """Workers are told of a request's end in the step behind its last one: metadata may name it then."""
    sim = cache(tmp_path)
    witness(sim)
    sim.watching = 0
    prefill(sim, "a", 0, 32)
    sim.finish("a", 32)
    for step in (1, 2):
        sim.step([], tokens=1, unreadable=step == unreadable)
    assert alike(sim) == {(0, 32): fate}


@pytest.mark.parametrize(
    ("named", "fates"),
    [(32, {(0, 32): "local-hit READ", (32, 64): SAVED}), (0, {(0, 64): SAVED})],
    ids=["though another request's store read it", "unless it is named and read for this one, too"],
)
def test_what_the_prefix_cache_gave_is_a_hit(tmp_path: Path, named: int, fates: Fates) -> None:
    """``named``: from where on the second request is."""
    sim = cache(tmp_path, prefix_caching=True)
    prefill(sim, "a", 0, 64, [entry("a", 0, 64)])
    sim.arrive(Prompt("b", 64))
    sim.lookup("b", 32, 0, 0)
    sim.give("b", sim.blocks.table("a")[:2], flags=int(Flag.FIRST))  # type: ignore[union-attr]
    sim.step([Chunk("b", 32, 32, first=True)], [entry("b", named, 64)], prompts={"b": 64})
    sim.read("a", 0, 64, hook="wait_for_save")
    sim.read("b", named, 64)
    for request in ("a", "b"):
        sim.finish(request, 64)
    assert alike(sim, "a") == {(0, 64): SAVED}
    assert alike(sim, "b") == fates


def test_a_preempted_request_that_was_read_in_both_its_lives(tmp_path: Path) -> None:
    sim = cache(tmp_path)
    prefill(sim, "a", 0, 32, [entry("a", 0, 32)], of=64)
    sim.read("a", 0, 32)
    sim.preempt("a", 32)
    sim.free("a")
    sim.step([Chunk("a", 0, 64, first=True, resumed=True)], [entry("a", 32, 64)], prompts={"a": 64})
    sim.read("a", 32, 64)
    sim.finish("a", 64)
    assert alike(sim) == {(0, 64): SAVED}


def test_an_unwatched_step_where_stores_stand_in_no_metadata(tmp_path: Path) -> None:
    sim = cache(tmp_path)
    prefill(sim, "w", 0, 32)
    sim.read("w", 0, 32)
    sim.finish("w", 32)
    sim.watching = 0
    prefill(sim, "a", 0, 64)
    sim.finish("a", 64)
    assert alike(sim) == {(0, 64): UNSEEN}


# --------------------------------------------------------------------------- steps without a watch


def test_an_unwatched_step_is_not_filled_in_from_watched_ones(tmp_path: Path) -> None:
    sim = cache(tmp_path)
    prefill(sim, "a", 0, 32, of=96)
    sim.read("a", 0, 32)
    sim.watching = 0
    prefill(sim, "a", 32, 64, of=96)
    sim.watching = int(Flag.STORE)
    prefill(sim, "a", 64, 96, of=96)
    sim.read("a", 64, 96)
    sim.finish("a", 96)
    assert alike(sim) == {(0, 32): SAVED, (32, 64): UNSEEN, (64, 96): SAVED}


def test_where_steps_were_not_watched_it_says_how_many_were(tmp_path: Path) -> None:
    sim = cache(tmp_path)
    for start, watching in ((0, Flag.STORE), (32, 0), (64, Flag.LOAD)):
        sim.watching = int(watching)
        prefill(sim, "a", start, start + 32, of=96)
    sim.step([], tokens=1)
    sim.finish("a", 96)
    limit = WatchLimitsFact(1, Limit.STEPS, "full", "", "", sim.step_id)
    sim.workers[0].fact(Fact.WATCH_LIMITS, asdict(limit))
    sim.write()
    limits = build_report(tmp_path)["limits"]
    assert limits["partly_watched"] == {"watched": 2, "steps": 3}
    assert "2 of 3 steps with prompt tokens were watched, the others not" in limits["notes"]


def test_a_part_read_in_another_step_does_not_declare_the_rest(tmp_path: Path) -> None:
    sim = cache(tmp_path)
    witness(sim)
    sim.watching = 0
    prefill(sim, "a", 0, 64, [entry("a", 0, 64)])
    sim.watching = int(Flag.STORE)
    sim.step([], tokens=1)
    sim.read("a", 0, 32, hook="")
    sim.finish("a", 64)
    assert alike(sim) == {(0, 32): SAVED, (32, 64): UNSEEN}


def test_a_step_of_which_it_is_not_known_which_slots_were_read(tmp_path: Path) -> None:
    sim = cache(tmp_path)
    witness(sim)
    prefill(sim, "a", 0, 64, [entry("a", 0, 64)])
    sim.touch_unknown()
    sim.finish("a", 64)
    assert alike(sim) == {(0, 64): UNSEEN}


# ----------------------------------------------------------------------- declared, and not read


def test_a_part_read_beside_unknown_ones_with_a_small_file(tmp_path: Path) -> None:
    """The file is an index: it says nothing of what else was read."""
    sim = cache(tmp_path)
    step = prefill(sim, "a", 0, 64, [entry("a", 0, 64)])
    sim.read("a", 0, 32)
    sim.touch_unknown()
    for layer in range(2):
        sim.effect(0, step, layer, 32, files=1, size=100)
    sim.finish("a", 64)
    assert alike(sim) == {(0, 32): SAVED, (32, 64): UNSEEN}


def test_each_rank_answers_for_its_own_part(tmp_path: Path) -> None:
    sim = cache(tmp_path, tp=2)
    witness(sim)
    sim.read("w", 0, 32, rank=1)
    prefill(sim, "a", 0, 64, [entry("a", 0, 64)])
    sim.read("a", 0, 64, rank=0)
    sim.read("a", 0, 32, rank=1)
    sim.finish("a", 64)
    half = {(0, 32): SAVED, (32, 64): PART}
    assert by_pair(sim) == [{(0, 64): SAVED}, {(0, 64): SAVED}, half, half]


def test_kv_cache_groups_with_their_own_block_sizes(tmp_path: Path) -> None:
    sim = cache(tmp_path, groups=[(16, [0]), (32, [1])])
    prefill(sim, "a", 0, 60, [entry("a", 0, 60)])
    sim.read("a", 0, 48, layers=[0])
    sim.read("a", 0, 32, layers=[1])
    sim.finish("a", 60)
    first, second = by_pair(sim)
    assert first == {(0, 48): SAVED, (48, 60): NOT_OFFERED}
    assert second[0, 32] == SAVED and SAVED not in [one for place, one in second.items() if place != (0, 32)]


def test_kv_cache_groups_on_the_same_bytes(tmp_path: Path) -> None:
    """Each read has a record of both layers; the block's owner is meant."""
    sim = cache(tmp_path, groups=[(16, [0]), (16, [1])])
    flags = int(Flag.STORE | Flag.SHARED)
    witness(sim)
    prefill(sim, "a", 0, 64, [entry("a", 0, 64)])
    for layer in range(2):
        read = sim.slots("a", 0, 64 - 32 * layer, group=layer)
        sim.touch({0: read, 1: read}, flags=flags)
    sim.finish("a", 64)
    assert by_pair(sim) == [{(0, 64): SAVED}, {(0, 32): SAVED, (32, 64): PART}]


def test_a_hook_that_raises_after_it_read(tmp_path: Path) -> None:
    sim = cache(tmp_path)
    prefill(sim, "a", 0, 64, [entry("a", 0, 64)], fate=Fate(raising=frozenset({(0, 1)})))
    sim.read("a", 0, 64, layers=[0])
    sim.read("a", 0, 32, layers=[1])
    sim.finish("a", 64)
    assert by_pair(sim) == [{(0, 64): SAVED}, {(0, 64): "RAISED READ"}]


def test_background_work_that_left_one_step_out(tmp_path: Path) -> None:
    """A thread reads each step's tokens in the next step, and forgets the second one's. What it reads
    meanwhile is of other steps, and is read in the place of nothing."""
    sim = cache(tmp_path)
    for start in (0, 32, 64, 96):
        step = prefill(sim, "a", start, start + 32, [entry("a", start, start + 32)], of=128)
        if start in (32, 96):
            sim.read("a", start - 32, start, hook="", step=step - 1)
    sim.step([], tokens=1)
    sim.read("a", 96, 128, hook="", step=step)
    sim.finish("a", 128)
    assert alike(sim) == {(0, 32): SAVED, (32, 64): NOTHING, (64, 128): SAVED}


def test_background_work_that_left_one_request_out(tmp_path: Path) -> None:
    """A thread reads each request's tokens in the next step, and forgets the second one's. What it reads
    meanwhile is due, and is read in the place of nothing."""
    sim = cache(tmp_path)
    for request in "abc":
        step = prefill(sim, request, 0, 32, [entry(request, 0, 32)])
        if request == "b":
            sim.read("a", 0, 32, hook="", step=step - 1)
    sim.step([], tokens=1)
    sim.read("c", 0, 32, hook="", step=step)
    for request in "abc":
        sim.finish(request, 32)
    assert alike(sim, "a") == alike(sim, "c") == {(0, 32): SAVED}
    assert alike(sim, "b") == {(0, 32): NOTHING}


# --------------------------------------------------------------------------- other slots were read


def test_slots_shifted_by_one_over_several_blocks_and_steps(tmp_path: Path) -> None:
    """Whatever the metadata names, the first token of each step's alone is not read."""
    sim = cache(tmp_path)
    for start in range(0, 96, 32):
        prefill(sim, "a", start, start + 32, [entry("a", start, start + 32)], of=96)
        sim.touch_all([slot + 1 for slot in sim.slots("a", start, start + 32)])
    sim.finish("a", 96)
    misplaced = [part for part, fate in alike(sim).items() if fate == MISPLACED]
    assert misplaced == [(1, 32), (33, 64), (65, 96)]


@pytest.mark.parametrize(("shift", "length"), [(1, 32), (0, 32), (1, 30)])
def test_whole_blocks_that_all_begin_within_blocks(tmp_path: Path, shift: int, length: int) -> None:
    """No metadata says what is meant: these tokens are not. Sets of any length may well be meant."""
    sim = cache(tmp_path)
    for request in "abc":
        prefill(sim, request, 0, 48, unreadable=True)
        slots = [slot + shift for slot in sim.slots(request, 0, length)]
        sim.touch_all(slots)
        sim.finish(request, 48)
    fates = set(alike(sim, "b").values())
    assert (MISPLACED in fates) == (shift > 0 and length == 32)
    assert (SAVED in fates) == (shift == 0 or length == 30)


@pytest.mark.parametrize(("named", "fate"), [(True, SAVED), (False, MISPLACED)])
def test_anothers_slots_of_the_same_step_are_read_twice(tmp_path: Path, named: bool, fate: str) -> None:
    """A step of two requests. Of the second one, that is what was meant only where it is named, too."""
    sim = cache(tmp_path)
    for request in "ab":
        sim.arrive(Prompt(request, 32))
    chunks = [Chunk(request, 0, 32, first=True) for request in "ab"]
    entries = [entry(request, 0, 32) for request in "ab"] if named else []
    sim.step(chunks, entries, prompts={"a": 32, "b": 32}, unreadable=not named)
    sim.read("b", 0, 32)
    sim.read("b", 0, 32)
    for request in "ab":
        sim.finish(request, 32)
    assert alike(sim, "a") == {(0, 32): MISPLACED}
    assert alike(sim, "b") == {(0, 32): fate}


@pytest.mark.parametrize("times", [1, 4])
def test_a_block_that_one_call_reads_for_those_before(tmp_path: Path, times: int) -> None:
    """A table of block numbers that is cut short. Read once, the last block stands for itself."""
    sim = cache(tmp_path)
    step = prefill(sim, "a", 0, 64, unreadable=True)
    for layer in range(2):
        sim.effect(0, step, layer, times * BLOCK)
    sim.read("a", 48, 64)
    sim.finish("a", 64)
    fates = {(0, 64): MISPLACED} if times > 1 else {(0, 48): NOT_OFFERED, (48, 64): SAVED}
    assert alike(sim) == fates


@pytest.mark.parametrize(
    ("reached", "unknown", "end"),
    [
        (SaveEnd.NO_FORWARD, False, (SaveEnd.NO_FORWARD, Grade.READ)),
        (SaveEnd.NO_FORWARD, True, (SaveEnd.NOT_OBSERVED, Grade.NOT_OBSERVED)),
        (SaveEnd.NOT_BOUND, True, (SaveEnd.NOT_OBSERVED, Grade.NOT_OBSERVED)),
        (SaveEnd.RAISED, True, (SaveEnd.RAISED, Grade.READ)),
    ],
)
def test_a_stage_ends_no_save_where_unknown_slots_were_read(
    reached: SaveEnd, unknown: bool, end: tuple[SaveEnd, Grade]
) -> None:
    """They may be its own: another hook took them."""
    assert Call(reached, named=16, unread=16, slots=16, unknown=unknown).end == end


@pytest.mark.parametrize(
    ("saved", "between", "fate"), [(True, 0, SAVED), (True, 2, SAVED), (False, 0, NOT_OFFERED)]
)
def test_slots_read_in_place_of_anothers_save_nothing(
    tmp_path: Path, saved: bool, between: int, fate: str
) -> None:
    """The step does not name the request whose slots are read: what is at rest of it is under another name.
    What was saved of it when it was due stays so, however many steps ago: it is no late copy."""
    sim = cache(tmp_path)
    prefill(sim, "w", 0, 64, [entry("w", 0, 64)] if saved else [])
    if saved:
        sim.read("w", 0, 64)
    for _ in range(between):
        sim.step([], tokens=0)
    prefill(sim, "a", 0, 64, [entry("a", 0, 64)])
    sim.read("w", 0, 64)
    for request in ("a", "w"):
        sim.finish(request, 64)
    assert alike(sim) == {(0, 64): MISPLACED}
    assert alike(sim, "w") == {(0, 64): fate}


@pytest.mark.parametrize("under_way", [True, False])
def test_nothing_is_missed_of_a_save_that_is_under_way(tmp_path: Path, under_way: bool) -> None:
    """A queue may hold it still: blocks of no request were not read in its place, and those of another one
    were read for that one."""
    sim = cache(tmp_path)
    prefill(sim, "a", 0, 32, unreadable=True)
    prefill(sim, "b", 0, 32, unreadable=True)
    sim.read("a", 0, 32)
    sim.touch_all(range(800, 832))
    for request in "ab":
        if request == "a" or under_way:
            sim.open_save(request)
        sim.finish(request, 32)
    sim.done("a", 0)
    sim.done("a")
    assert alike(sim) == {(0, 32): SAVED if under_way else MISPLACED}
    assert alike(sim, "b") == {(0, 32): UNSEEN if under_way else MISPLACED}


@pytest.mark.parametrize("overdue", [True, False])
def test_what_a_step_asked_for_stands_for_no_later_token(tmp_path: Path, overdue: bool) -> None:
    """A thread reads the blocks of one request while the next one is computed, of which others are read."""
    sim = cache(tmp_path)
    prefill(sim, "a", 0, 32, unreadable=True)
    asked = sim.step_id
    prefill(sim, "b", 0, 64, unreadable=True)
    sim.read("a", 0, 32, hook="", step=asked if overdue else sim.step_id)
    sim.read("b", 32, 64, hook="")
    sim.touch_all(range(800, 832), hook="")
    for request in "ab":
        sim.finish(request, 32 if request == "a" else 64)
    assert alike(sim, "b") == {(0, 64): MISPLACED}
    assert alike(sim) == {(0, 32): UNSEEN if overdue else MISPLACED}


def test_a_step_that_reads_its_own_requests_reads_none_in_place(tmp_path: Path) -> None:
    """A later step reads blocks of nobody. Of the first one a prompt of less than a unit is left out."""
    sim = cache(tmp_path)
    for request, end in (("a", 32), ("short", 16)):
        sim.arrive(Prompt(request, end))
    both = [Chunk(request, 0, end, first=True) for request, end in (("a", 32), ("short", 16))]
    sim.step(both, [], prompts={"a": 32, "short": 16}, unreadable=True)
    sim.read("a", 0, 32)
    prefill(sim, "b", 0, 32, unreadable=True)
    sim.touch_all(range(800, 832))
    for request, end in (("a", 32), ("short", 16), ("b", 32)):
        sim.finish(request, end)
    assert alike(sim, "b") == {(0, 32): MISPLACED}
    assert alike(sim) == {(0, 32): UNSEEN}
    assert alike(sim, "short") == {(0, 16): NOT_OFFERED}


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_part_that_is_read_by_a_worker_that_reads_other_slots(tmp_path: Path, elsewhere: bool) -> None:
    """Places in the table, taken for block numbers, name some of a request's own blocks by chance."""
    sim = cache(tmp_path)
    prefill(sim, "a", 0, 64, [entry("a", 0, 64)])
    sim.touch_all(range(800, 864)) if elsewhere else sim.read("a", 0, 64)
    prefill(sim, "b", 0, 64, [entry("b", 0, 64)])
    sim.read("b", 32, 64)
    for request in ("a", "b"):
        sim.finish(request, 64)
    assert alike(sim) == {(0, 64): MISPLACED if elsewhere else SAVED}
    assert alike(sim, "b") == {(0, 32): PART, (32, 64): SAVED}


def test_old_blocks_of_the_same_request_are_read_instead(tmp_path: Path) -> None:
    """A table whose new blocks stand behind the old ones: the step names the new ones."""
    sim = cache(tmp_path)
    prefill(sim, "a", 0, 32, [entry("a", 0, 32)])
    sim.read("a", 0, 32)
    prefill(sim, "a", 32, 64, [entry("a", 32, 64)])
    sim.read("a", 0, 32)
    sim.finish("a", 64)
    assert alike(sim) == {(0, 32): SAVED, (32, 64): MISPLACED}


@pytest.mark.parametrize(
    ("shape", "fate"),
    [
        ("list of int: numbers that no request of this step holds", NOT_OFFERED),
        ("neither store nor load", NOT_OFFERED),
        ("how much of it is not understood", NOTHING),
    ],
)
def test_what_orders_nothing_in_some_steps_names_nothing(tmp_path: Path, shape: str, fate: str) -> None:
    """A table of all who run, or numbers that count something and are blocks by chance: sound connectors
    got faults."""
    sim = cache(tmp_path)
    witness(sim)
    said = {"connector": sim.tag * 10 + 1 & 0xFF, "class": "Meta", "field": "rows[].table", "shape": shape}
    sim.scheduler.fact(Fact.UNREADABLE_METADATA, {**said, "load": False, "steps": 1})
    prefill(sim, "a", 0, 32, [entry("a", 0, 32)])
    sim.finish("a", 32)
    assert alike(sim) == {(0, 32): fate}


def test_what_is_not_understood_may_name_what_is_read(tmp_path: Path) -> None:
    """A step passes on new blocks, and an earlier one, not understood, those that are read."""
    sim = cache(tmp_path)
    prefill(sim, "a", 0, 32, of=64, unreadable=True)
    prefill(sim, "a", 32, 64, [entry("a", 32, 64)])
    sim.read("a", 0, 32)
    sim.finish("a", 64)
    assert alike(sim) == {(0, 32): SAVED, (32, 64): NOT_OFFERED}


def test_more_in_one_layer_stands_for_none_in_another(tmp_path: Path) -> None:
    """Layer 0 is read whole, where the metadata names a part; layer 1 is left out."""
    sim = cache(tmp_path)
    prefill(sim, "a", 0, 64, [entry("a", 0, 32)])
    sim.read("a", 0, 64, layers=[0])
    sim.finish("a", 64)
    assert not [fate for fates in by_pair(sim) for fate in fates.values() if fate == MISPLACED]


def test_the_null_block_alone_pads_steps_that_store_nothing(tmp_path: Path) -> None:
    sim = cache(tmp_path)
    for name in ("a", "b"):
        prefill(sim, name, 0, 10)
        sim.touch_all(range(BLOCK))
        sim.finish(name, 10)
    prefill(sim, "c", 0, 32, [entry("c", 0, 32)])
    sim.read("c", 0, 32)
    sim.finish("c", 32)
    assert alike(sim, "c") == {(0, 32): SAVED}


def test_the_next_layer_is_read_with_each_one(tmp_path: Path) -> None:
    """Layer 1 is read in layer 0's hook, before it is computed; layer 0 in no one's."""
    sim = cache(tmp_path)
    step = prefill(sim, "a", 0, 64, [entry("a", 0, 64)])
    sim.read("a", 0, 64, layers=[1], t=sim.hook_t[0, step, "save_kv_layer", sim.layer_names[0]])
    sim.finish("a", 64)
    assert by_pair(sim)[1] == {(0, 64): STALE}


@pytest.mark.parametrize("named", [True, False])
def test_a_block_read_before_its_new_holders_layer_is_not_old(tmp_path: Path, named: bool) -> None:
    """Each hook reads the next layer, too early. The block still holds what another request computed into it,
    and that is not saved by this."""
    sim = cache(tmp_path, kv_blocks=3)
    prefill(sim, "w", 0, 32)
    sim.finish("w", 32)
    sim.free("w")
    step = prefill(sim, "a", 0, 32, [entry("a", 0, 32)] if named else [], unreadable=not named)
    early = sim.hook_t[0, step, "save_kv_layer", sim.layer_names[0]]
    sim.read("a", 0, 32, layers=[1], t=early, hook="save_kv_layer")
    sim.read("a", 0, 32, layers=[0])
    sim.finish("a", 32)
    assert by_pair(sim) == [{(0, 32): SAVED}, {(0, 32): STALE}]
    assert SAVED not in {word for fates in by_pair(sim, "w") for word in fates.values()}


def test_a_unit_that_is_read_as_it_begins_to_fill_is_stale(tmp_path: Path) -> None:
    """Rounded up: 64 tokens for the first 40, and never again."""
    sim = cache(tmp_path)
    sim.arrive(Prompt("a", 64))
    sim.grow("a", 64)
    sim.step([Chunk("a", 0, 40, first=True)], prompts={"a": 64})
    sim.read("a", 0, 64)
    prefill(sim, "a", 40, 64)
    sim.finish("a", 64)
    assert alike(sim) == {(0, 40): SAVED, (40, 64): STALE}


@pytest.mark.parametrize("again", [True, False])
def test_what_a_step_computed_behind_a_failed_load_is_stale(tmp_path: Path, again: bool) -> None:
    """UCM#1007: vLLM throws that step away, and computes anew; what was dumped in it is no one's KV."""
    sim = cache(tmp_path)
    sim.arrive(Prompt("a", 96))
    sim.lookup("a", 0, 32, 32)
    sim.grow("a", 96)
    sim.step([Chunk("a", 32, 64, first=True)], prompts={"a": 96})
    sim.load_errors(0, sim.step_id, 1)
    sim.read("a", 32, 96)
    sim.step([Chunk("a", 0, 96)], prompts={"a": 96})
    if again:
        sim.read("a", 32, 96)
    sim.finish("a", 96)
    assert alike(sim)[32, 96] == (SAVED if again else STALE)
    found = [one for one in diagnose(read_run(sim.dir)).findings if one.id == "kv-stale"]
    assert [one.remedy[0][:47] for one in found] == (
        [] if again else ["Store nothing of a request in a step in which i"]
    )


def test_blocks_read_after_they_went_to_another_request(tmp_path: Path) -> None:
    sim = cache(tmp_path)
    first = int(Flag.FIRST)
    sim.give("a", [5, 6], flags=first)
    step = prefill(sim, "a", 0, 32, [entry("a", 0, 32)])
    sim.finish("a", 32)
    sim.give("b", [5, 6], flags=first)
    prefill(sim, "b", 0, 32)
    sim.touch_all(range(80, 112), hook="", step=step)
    sim.finish("b", 32)
    assert set(alike(sim).values()) <= {NOTHING, LATE}


def _copies_a_step_late(sim: Sim, requests: str) -> None:
    """One request after the other in three blocks; each is read once the next one has them: it is given the
    last block first."""
    due: list[int] = []
    for request in requests:
        prefill(sim, request, 0, 48, [entry(request, 0, 32)])
        if due:
            sim.touch_all(due, hook="wait_for_save")
        due = sim.slots(request, 0, 32)
        sim.finish(request, 48)
        sim.free(request)


def test_a_read_after_blocks_went_to_another_is_neither_ones(tmp_path: Path) -> None:
    sim = cache(tmp_path, kv_blocks=4)
    _copies_a_step_late(sim, "abc")
    assert alike(sim, "a") == {(0, 32): LATE, (32, 48): NOT_OFFERED}
    assert SAVED not in alike(sim, "b").values()


@pytest.mark.parametrize(("steps", "fate"), [(0, NOTHING), (2, UNSEEN)])
def test_reads_that_come_too_late_say_how_late_copies_come(tmp_path: Path, steps: int, fate: str) -> None:
    """Of the steps behind a watched one only the next is known to be watched: others may have been read."""
    sim = cache(tmp_path, kv_blocks=4)
    prefill(sim, "a", 0, 48, [entry("a", 0, 32)])
    due = sim.slots("a", 0, 32)
    sim.finish("a", 48)
    sim.free("a")
    for _ in range(steps):
        sim.step([], tokens=1)
    prefill(sim, "b", 0, 48, [entry("b", 0, 32)])
    sim.touch_all(due, hook="wait_for_save")
    sim.finish("b", 48)
    sim.free("b")
    prefill(sim, "c", 0, 32, [entry("c", 0, 32)])
    sim.step([], tokens=1)
    sim.finish("c", 32)
    assert alike(sim, "a")[0, 32] == LATE
    assert alike(sim, "c") == {(0, 32): fate}


@pytest.mark.parametrize("said", ["named", "unreadable", ""])
@pytest.mark.parametrize("in_time", [True, False])
def test_a_thread_that_reads_blocks_of_another(tmp_path: Path, said: str, in_time: bool) -> None:
    """The work is known to be for the step that asked for it: for what the blocks held then. Whoever was read
    in time is missed by nobody; of who was not named nobody knows, as the worker decides what it reads."""
    sim = cache(tmp_path, kv_blocks=4)
    stores = [entry("a", 0, 32)] if said == "named" else []
    asked = prefill(sim, "a", 0, 48, stores, unreadable=said == "unreadable")
    due = sim.slots("a", 0, 32)
    if in_time:
        sim.touch_all(due, hook="", step=asked)
    sim.finish("a", 48)
    sim.free("a")
    prefill(sim, "b", 0, 48, [entry("b", 0, 48)])
    sim.touch_all(due, hook="", step=asked)
    late = bool(said) and not in_time
    fate = LATE if late else SAVED if in_time else UNSEEN
    assert next(iter(alike(sim, "a").values())) == fate
    assert (SAVED in alike(sim, "b").values()) != late


@pytest.mark.parametrize("understood", [True, False])
def test_new_blocks_named_and_read_once_are_the_new_holders(tmp_path: Path, understood: bool) -> None:
    """A connector that passes on which blocks are new, and copies whole units as they are complete: what it
    reads of the second request are by chance the very blocks that it never read of the first one. Metadata
    that is not understood may name them, too."""
    sim = cache(tmp_path)
    first = int(Flag.FIRST)
    sim.give("a", [4, 5, 6], flags=first)
    prefill(sim, "a", 0, 16, [entry("a", 0, 16)], of=48)
    sim.read("a", 0, 16)
    prefill(sim, "a", 16, 48, [entry("a", 16, 48)])
    sim.finish("a", 48)
    sim.give("b", [6], flags=first)
    prefill(sim, "b", 0, 16, [entry("b", 0, 16)], of=48)
    sim.give("b", [5, 7])
    prefill(sim, "b", 16, 48, [entry("b", 16, 48)] if understood else [], unreadable=not understood)
    sim.read("b", 0, 32)
    sim.finish("b", 48)
    assert alike(sim, "b")[0, 32] == SAVED
    assert MISPLACED not in {*alike(sim).values(), *alike(sim, "b").values()}


def test_a_read_that_comes_late_and_in_time_is_saved(tmp_path: Path) -> None:
    """The blocks are held back: nobody else has them."""
    sim = cache(tmp_path)
    _copies_a_step_late(sim, "ab")
    assert alike(sim, "a") == {(0, 32): SAVED, (32, 48): NOT_OFFERED}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("hook", "fate"), [("get_finished", UNSEEN), ("wait_for_save", NOT_OFFERED)])
def test_an_empty_step_says_nothing_if_reads_follow_save_hooks(
    tmp_path: Path, hook: str, fate: str, named: bool
) -> None:
    """It reads when a request is over, and the metadata can't be read, or not all of it (``named``): more may
    be read in any later step."""
    sim = cache(tmp_path)
    prefill(sim, "w", 0, 32, unreadable=True)
    step = sim.step([], tokens=0)
    sim.read("w", 0, 32, hook=hook)
    sim.effect(0, step, 0, 32, hook=hook)
    sim.finish("w", 32)
    step = prefill(sim, "a", 0, 64, [entry("a", 0, 64)] if named else [], unreadable=True)
    sim.effect(0, step, None, 0, hook="wait_for_save")
    sim.finish("a", 64)
    sim.step([], tokens=0)
    assert alike(sim) == {(0, 64): fate}


def test_nothing_is_left_out_of_a_step_before_an_unknown_read(tmp_path: Path) -> None:
    """Each hook copies a step late; of one copy it is not known which slots it read."""
    sim = cache(tmp_path)
    prefill(sim, "a", 0, 64, [entry("a", 0, 64)])
    sim.step([], tokens=0)
    sim.read("a", 0, 32, hook="get_finished")
    sim.touch_unknown(hook="get_finished")
    sim.finish("a", 64)
    assert alike(sim) == {(0, 32): SAVED, (32, 64): UNSEEN}


def test_a_unit_read_in_parts_is_not_late_when_others_hold_it(tmp_path: Path) -> None:
    """Less is read than the metadata names, in time; later another request's tokens are read in the same
    blocks, for itself."""
    sim = cache(tmp_path, kv_blocks=4)
    prefill(sim, "a", 0, 48, [entry("a", 0, 48)])
    sim.read("a", 0, 32)
    sim.finish("a", 48)
    sim.free("a")
    prefill(sim, "b", 0, 48, unreadable=True)
    sim.read("b", 0, 48)
    sim.finish("b", 48)
    assert alike(sim, "a")[0, 32] == SAVED
    assert alike(sim, "b") == {(0, 48): SAVED}


def test_what_a_thread_reads_for_a_former_holder_is_not_new(tmp_path: Path) -> None:
    """A thread copies just before the forward; the new holder's tail is below the connector's unit."""
    sim = cache(tmp_path)
    first = int(Flag.FIRST)
    sim.give("a", [5, 6], flags=first)
    step = prefill(sim, "a", 0, 32, [entry("a", 0, 32)])
    sim.finish("a", 32)
    sim.give("b", [5, 6], flags=first)
    later = prefill(sim, "b", 0, 24, [entry("b", 0, 16)])
    before = sim.hook_t[0, later, "start_load_kv", ""]
    sim.touch_all(range(80, 112), hook="", step=step, t=before)
    sim.read("b", 0, 16)
    sim.finish("b", 24)
    assert alike(sim) == {(0, 32): SAVED}
    assert alike(sim, "b") == {(0, 16): SAVED, (16, 24): NOT_OFFERED}


def test_a_load_that_reads_what_it_fills_saves_nothing_former(tmp_path: Path) -> None:
    """A thread loads into a copy of blocks in which an earlier request's tail still stands."""
    sim = cache(tmp_path)
    first = int(Flag.FIRST)
    sim.give("a", [5, 6, 7], flags=first)
    prefill(sim, "a", 0, 48, [entry("a", 0, 32)])
    sim.read("a", 0, 32)
    sim.finish("a", 48)
    sim.arrive(Prompt("b", 64))
    sim.give("b", [5, 6, 7, 8], flags=first)
    sim.lookup("b", 0, 48, 48)
    step = sim.step([Chunk("b", 48, 16, first=True)], prompts={"b": 64})
    before = sim.hook_t[0, step, "start_load_kv", ""]
    sim.touch_all(range(80, 128), hook="", step=step, t=before)
    sim.finish("b", 64)
    assert alike(sim) == {(0, 32): SAVED, (32, 48): NOT_OFFERED}


@pytest.mark.parametrize(("parts", "saved"), [(2, True), (3, False)])
def test_runs_that_all_begin_within_blocks_are_no_tokens(tmp_path: Path, parts: int, saved: bool) -> None:
    """Slots that are off by one in all that is read, be it read at once."""
    sim = cache(tmp_path)
    off = [slot + 1 for part in range(parts) for slot in _every_other_block(part)]
    one_step(
        sim, 6 * BLOCK, UNREADABLE, [lambda sim: sim.touch_all([sim.slots("a", 0, 1)[0] + i for i in off])]
    )
    assert any(fate.startswith("saved") for fate in alike(sim).values()) is saved


def _every_other_block(part: int) -> range:
    return range(2 * part * BLOCK, (2 * part + 1) * BLOCK)
