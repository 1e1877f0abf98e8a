"""The one decision on a token that was to be loaded: as :mod:`test_decide` has it for those that were to be
saved."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synth import Chunk, Entry, Prompt, Sim
from test_decide import known_less, outcomes, recorded_in_any_order
from test_forgotten import FIRST, WAYS, Chance, change, faults
from test_positions import cache

from kvtrace.ledger.contents.compare import Wrong
from kvtrace.ledger.contents.prints import ZEROES
from kvtrace.ledger.ends import NOT_LOADED, LoadEnd
from kvtrace.ledger.loads.decide import (
    By,
    Gathered,
    InPair,
    LoadContents,
    LoadOutcome,
    LoadToken,
    Sign,
    decide,
    judge,
    signs,
)
from kvtrace.ledger.run import Engine
from kvtrace.terms import LOADED, Grade
from kvtrace.trace import facts, rows
from kvtrace.trace.format import Flag, Kind

LOAD, ASYNC = int(Flag.LOAD), int(Flag.ASYNC)

# --- the function ---------------------------------------------------------------------------------

UNKNOWN = (LoadEnd.PENDING, LoadEnd.NOT_OBSERVED)
NOT_LOST = (LoadEnd.LOADED, *UNKNOWN)


def said(by: By, *ends: LoadEnd) -> list[tuple[Sign, ...]]:
    return [(Sign(by, end, (f"{by.name} {end.name}",)),) for end in ends]


# Of a call that did not return the slots say nothing.
REPORTS = [(), *said(By.REPORT, LoadEnd.FAILED)]
SEEN = [
    (), *said(By.CALL, LoadEnd.FAILED, LoadEnd.NOT_WRITTEN, LoadEnd.USED_BEFORE),
    *said(By.SLOT, LoadEnd.NOT_WRITTEN, LoadEnd.PARTLY, LoadEnd.USED_BEFORE),
]  # fmt: skip
ALONE = [*said(By.REPORT, LoadEnd.PENDING, LoadEnd.NOT_FINISHED), *said(By.CALL, *UNKNOWN)]
SIGNS = [one for of in (REPORTS, SEEN, ALONE) for one in sum(of, ())]


def wrongs() -> st.SearchStrategy[Wrong]:
    flag = st.booleans()
    return st.builds(Wrong, st.just(0), st.just(64), st.just(1), st.just("why"), flag, flag, altered=flag)


def tokens() -> st.SearchStrategy[LoadToken]:
    """No piece of evidence contradicts another."""
    flag = st.booleans()
    seen = st.tuples(*map(st.sampled_from, (REPORTS, SEEN))).map(lambda of: sum(of, ()))
    known = st.builds(
        LoadToken, st.one_of(seen, st.sampled_from(ALONE)), flag, flag, st.none() | wrongs(), flag, flag,
        flag, st.sampled_from([(), ("OSError",)]),
    )  # fmt: skip
    return known.map(consistent)


def consistent(token: LoadToken) -> LoadToken:
    ends = {sign.end for sign in token.signs}
    wrong = None if LoadEnd.PENDING in ends else token.wrong
    lost = bool(ends - {*UNKNOWN})
    return token._replace(
        wrong=wrong, explained=token.explained or lost, proved=token.proved and not (wrong or ends)
    )


def forgotten(token: LoadToken) -> Iterator[LoadToken]:
    """With one thing less that is known."""
    for at, sign in enumerate(token.signs):
        others = (*token.signs[:at], *token.signs[at + 1 :])
        watched = token.watched and sign.by is not By.SLOT
        yield token._replace(signs=others, watched=watched)
        if sign.end not in UNKNOWN:  # it may be all that explains the block
            yield token._replace(signs=others, watched=watched, explained=False)
        yield token._replace(signs=(*others, sign._replace(end=LoadEnd.NOT_OBSERVED)))
    yield token._replace(proved=False)
    yield token._replace(wrong=None)
    yield token._replace(watched=False)


def no_stronger(now: LoadOutcome, before: LoadOutcome, wrong: bool) -> bool:
    """No new loss, nothing new that is proved, and no better grade, but for what the content of its block
    proves (``wrong``) whatever else is known."""
    if now.end in NOT_LOST:
        return now.proved <= before.proved and now.grade <= Grade.READ
    return before.end not in NOT_LOST and now.grade <= (Grade.PROVED if wrong else before.grade)


@given(tokens())
def test_less_known_of_a_loaded_token_makes_no_claim_stronger(token: LoadToken) -> None:
    before = decide(token)
    for less in forgotten(token):
        assert no_stronger(decide(less), before, token.wrong is not None), less


@pytest.mark.parametrize("sign", SIGNS)
def test_what_is_there_was_written_whoever_saw_it(sign: Sign) -> None:
    """What nobody was seen to write, and holds its tokens' KV all the same, is proved; then of other tokens
    that nobody was seen to write nothing is known, unless their content tells."""
    silent = sign.end in (LoadEnd.NOT_WRITTEN, LoadEnd.PARTLY)
    proved = decide(LoadToken((sign,), proved=True))
    assert proved.proved == (silent or sign.end == LoadEnd.NOT_OBSERVED)
    assert proved.end == (LoadEnd.LOADED if proved.proved else sign.end)
    assert decide(LoadToken((sign,), doubted=True)).end == (LoadEnd.NOT_OBSERVED if silent else sign.end)
    other = Wrong(0, 16, 1, "why")
    known = decide(LoadToken((sign,), doubted=True, wrong=other, explained=True))
    assert known.end == sign.end


def test_no_report_of_a_load_that_broke_off_is_believed() -> None:
    """Its thread caught an error and reported the load as finished: what nobody saw counted as loaded."""
    assert decide(LoadToken(broken_off=True)).end == LoadEnd.NOT_OBSERVED
    assert decide(LoadToken(broken_off=True, watched=True)).end == LoadEnd.LOADED
    assert decide(LoadToken(broken_off=True, proved=True)).proved


@given(tokens(), st.randoms(use_true_random=False))
def test_the_order_of_the_signs_does_not_matter(token: LoadToken, chance: random.Random) -> None:
    shuffled = list(token.signs)
    chance.shuffle(shuffled)
    assert decide(token._replace(signs=tuple(shuffled))) == decide(token)


@given(tokens())
def test_what_is_not_observed_of_a_load_has_no_grade(token: LoadToken) -> None:
    fate = decide(token)
    assert (fate.end == LoadEnd.NOT_OBSERVED) == (fate.grade == Grade.NOT_OBSERVED)
    assert fate.proved <= (fate.end == LoadEnd.LOADED)


BLOCK = st.integers(0, 3).map(lambda at: (at * 16, at * 16 + 16))
SPANS = st.tuples(st.integers(0, 64), st.integers(0, 64), st.sampled_from(SIGNS))
IN_PAIRS = st.builds(
    InPair, st.lists(SPANS, max_size=3).map(lambda of: sum((signs([(a, b)], c) for a, b, c in of), ())),
    st.booleans(),
)  # fmt: skip


@given(
    st.lists(IN_PAIRS, min_size=4, max_size=4),
    st.lists(st.tuples(BLOCK, st.integers(1, 15), st.booleans(), st.booleans()), max_size=3),
    st.lists(st.tuples(st.integers(1, 15), BLOCK), max_size=3),
)
def test_each_accepted_token_is_decided_once_in_each_pair(
    known: list[InPair], wrong: list[tuple[tuple[int, int], int, bool, bool]],
    proved: list[tuple[int, tuple[int, int]]],
) -> None:  # fmt: skip
    in_pairs: dict[InPair, int] = {}
    for pair, one in enumerate(known):
        in_pairs[one] = in_pairs.get(one, 0) | 1 << pair
    engine = Engine(0, 1, "engine core", facts.EngineFact(block_size=16), None, pairs=4)
    found = [Wrong(*block, pairs, "why", a, unlike=b) for block, pairs, a, b in wrong]
    one = judge(
        (5, 64), Gathered(in_pairs), LoadContents(found, [(of, (block,)) for of, block in proved]), engine
    )
    for parts, pairs in one.lost.items():
        assert parts and pairs and LoadEnd.LOADED not in {end for _, _, end in parts}
        assert [*parts] == sorted(parts) and parts[0][0] >= 5 and parts[-1][1] <= 64
        assert all(a < b <= c for (a, b, _), (c, _, _) in pairwise(parts))
        assert not any(pairs & other for of, other in one.lost.items() if of is not parts)
    lost = sum((b - a) * of.bit_count() for parts, of in one.lost.items() for a, b, _ in parts)
    assert 0 <= one.proved <= 59 * 4 - lost


# --- runs -----------------------------------------------------------------------------------------


def computes(sim: Sim) -> None:
    """What the others load."""
    sim.arrive(Prompt("a", 64, digest=14, prefixes=(11, 12, 13, 14)))
    sim.give("a", [3, 4, 5, 6], flags=FIRST)
    sim.lookup("a", 0, 0, 0)
    sim.step([Chunk("a", 0, 64, first=True)], [Entry("a", 64, 64, 0)], prompts={"a": 64})
    sim.read("a", 0, 64)
    sim.prints("a", [8, 7, 6, 5])
    sim.finish("a", 64)


def loads(
    sim: Sim, name: str, prints: tuple[int, ...] = (8, 7, 6, 9), wrote: int = 48, hook: str = "start_load_kv",
    failed: int = 0, status: str = "FINISHED_STOPPED",
) -> None:  # fmt: skip
    sim.arrive(Prompt(name, 64, digest=14, prefixes=(11, 12, 13, 14)))
    first = 10 * "abcd".index(name)
    sim.give(name, [first, first + 1, first + 2, first + 3], flags=FIRST)
    sim.lookup(name, 0, 48, 48)
    entries = [Entry(name, 48, 48, 0, LOAD)]
    step = sim.step([Chunk(name, 48, 16, first=True)], entries, prompts={name: 64})
    if wrote:
        before = {} if hook else {"step": step, "t": sim.hook_t[0, step, "start_load_kv", ""]}
        sim.write_kv(name, 0, wrote, hook=hook, **before)
    if failed:
        sim.load_errors(0, step, failed)
    sim.prints(name, list(prints))
    sim.finish(name, 64, status=status)


def loads_in_its_hook(sim: Sim) -> None:
    computes(sim)
    for name in "bcd":
        loads(sim, name)


def loads_in_a_thread(sim: Sim) -> None:
    computes(sim)
    for name in "bcd":
        loads(sim, name, hook="")


def loads_in_the_background(sim: Sim) -> None:
    computes(sim)
    for name in "bcd":
        sim.arrive(Prompt(name, 64, digest=14, prefixes=(11, 12, 13, 14)))
        sim.lookup(name, 0, 48, 48, ASYNC)
        sim.grow(name, 64)
        sim.step([], [Entry(name, 48, 48, 0, LOAD)], tokens=0)
        sim.write_kv(name, 0, 48)
        for rank in (0, None):
            sim.done(name, rank, flags=LOAD)
        sim.step([Chunk(name, 48, 16, first=True)], prompts={name: 64})
        sim.prints(name, [8, 7, 6, 9])
        sim.finish(name, 64)


def loads_a_part(sim: Sim) -> None:
    computes(sim)
    loads(sim, "b")
    loads(sim, "c", (8, 7, ZEROES, 9), wrote=32)
    loads(sim, "d", (8, 7, 6, 9), wrote=48)


def loads_nothing_once(sim: Sim) -> None:
    computes(sim)
    loads(sim, "b")
    loads(sim, "c", (ZEROES, ZEROES, ZEROES, 9), wrote=0)


def loads_where_nothing_is_seen(sim: Sim) -> None:
    """... and nothing came."""
    computes(sim)
    loads(sim, "b", (ZEROES, ZEROES, ZEROES, 9), wrote=0)


def loads_other_kv(sim: Sim) -> None:
    computes(sim)
    loads(sim, "b", (7, 8, 6, 9))
    loads(sim, "c", (8, 7, 99, 9))


def loads_what_fails(sim: Sim) -> None:
    computes(sim)
    loads(sim, "b")
    loads(sim, "c", (8, 7, ZEROES, 9), wrote=32, failed=1, status="FINISHED_ERROR")


def loads_what_fails_unheard(sim: Sim) -> None:
    """The reported block is not the request's, which runs on."""
    computes(sim)
    loads(sim, "b")
    loads(sim, "c", (8, 7, ZEROES, 9), wrote=32, failed=1)


HEALTHY = [loads_in_its_hook, loads_in_a_thread, loads_in_the_background]
RUNS = [
    *HEALTHY, loads_a_part, loads_nothing_once, loads_where_nothing_is_seen, loads_other_kv, loads_what_fails,
    loads_what_fails_unheard,
]  # fmt: skip


def without_fingerprints(sim: Sim, chance: Chance) -> None:
    change(sim.workers[0], lambda words: None if rows.kind(words[0]) == Kind.PRINTS else words)


@pytest.mark.parametrize("forget", [*WAYS, without_fingerprints])
@pytest.mark.parametrize("made", RUNS)
def test_less_known_of_loads_makes_no_claim_stronger(
    tmp_path: Path, made: Callable[[Sim], None], forget: Callable[[Sim, Chance], None]
) -> None:
    known_less(tmp_path, made, forget)


@pytest.mark.parametrize("forget", [*WAYS, without_fingerprints])
@pytest.mark.parametrize("healthy", HEALTHY)
def test_what_becomes_unknown_of_loads_makes_no_fault(
    tmp_path: Path, healthy: Callable[[Sim], None], forget: Callable[[Sim, Chance], None]
) -> None:
    for seed in range(3):
        sim = cache(tmp_path / str(seed))
        healthy(sim)
        forget(sim, random.Random(seed))
        assert faults(sim) == [], seed


@pytest.mark.parametrize("made", RUNS)
@settings(max_examples=8, deadline=None)
@given(chance=st.randoms(use_true_random=False))
def test_threads_and_processes_record_loads_in_any_order(
    made: Callable[[Sim], None], chance: random.Random
) -> None:
    recorded_in_any_order(made, chance)


@pytest.mark.parametrize(
    ("made", "ends"),
    [
        (loads_in_its_hook, set()),
        (loads_in_a_thread, set()),
        (loads_in_the_background, set()),
        (loads_a_part, {LoadEnd.PARTLY}),
        (loads_nothing_once, {LoadEnd.NOT_WRITTEN}),
        (loads_where_nothing_is_seen, {LoadEnd.NOT_WRITTEN}),
        (loads_other_kv, {LoadEnd.WRONG}),
        (loads_what_fails, {LoadEnd.FAILED}),
        (loads_what_fails_unheard, {LoadEnd.PARTLY}),
    ],
)
def test_the_runs_lose_what_they_say(tmp_path: Path, made: Callable[[Sim], None], ends: set[LoadEnd]) -> None:
    sim = cache(tmp_path)
    made(sim)
    found = set(outcomes(sim).values())
    assert {one.end for one in found if one.name == NOT_LOADED} == ends
    assert any(one.name == LOADED for one in found) == (made is not loads_where_nothing_is_seen)
