"""The one decision on a token: the order of the records does not matter, and not knowing claims no more."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synth import Sim, SpoolFile
from test_forgotten import HEALTHY, WAYS, Chance
from test_positions import BLOCK, cache, entry, prefill

from kvtrace.ledger import Run, read_run
from kvtrace.ledger.ends import NOT_LOADED, NOT_SAVED, Blind, LoadEnd, Outcome, SaveEnd
from kvtrace.ledger.saves.calls import Call
from kvtrace.ledger.saves.pairs import StoreResult
from kvtrace.ledger.saves.positions import Token, decide
from kvtrace.ledger.steps import StepState
from kvtrace.terms import LOADED, LOCAL_HIT, NOT_OBSERVED, PENDING, SAVED, Grade
from kvtrace.trace import format as fmt
from kvtrace.trace import rows
from kvtrace.trace.format import Kind

# --- the function ---------------------------------------------------------------------------------

UNKNOWN = StoreResult(SaveEnd.NOT_OBSERVED, Grade.NOT_OBSERVED)


def stores() -> st.SearchStrategy[StoreResult]:
    """What a read of a token, or a call that was to store it, can come to."""
    ends = st.sampled_from([end for end in SaveEnd if end != SaveEnd.NOT_OBSERVED])
    grades = st.sampled_from([Grade.DECLARED, Grade.READ, Grade.WRITTEN])
    return st.one_of(st.just(UNKNOWN), st.builds(StoreResult, ends, grades))


def tokens() -> st.SearchStrategy[Token]:
    seen = st.sampled_from([Grade.DECLARED, Grade.READ, Grade.PROVED])
    return st.builds(
        Token,
        load=st.none() | st.tuples(st.sampled_from(LoadEnd), seen),
        stores=st.lists(stores(), max_size=4).map(tuple),
        unfinished=st.none() | st.sampled_from([SaveEnd.PENDING, SaveEnd.NOT_FINISHED, SaveEnd.FAILED]),
        proved=st.booleans(),
        local=st.booleans(),
        computed=st.none() | st.sampled_from(StepState),
        stale=st.booleans(),
        silent=st.sampled_from(Blind),
        watched=st.booleans(),
    )


def forgotten(token: Token) -> Iterator[Token]:
    """With one thing less that is known."""
    for at in range(len(token.stores)):
        yield token._replace(stores=(*token.stores[:at], UNKNOWN, *token.stores[at + 1 :]))
    yield token._replace(proved=False)
    yield token._replace(watched=False)
    yield token._replace(silent=Blind.OUT_OF_SIGHT)
    if token.computed is not None:
        yield token._replace(computed=StepState.NOT_RECORDED)


def no_stronger(now: Outcome, before: Outcome) -> bool:
    """No new loss, nothing new that is saved, and no better grade. What the GPU's own cache had is the
    scheduler's word, and says nothing of the store."""
    if now.name in (NOT_OBSERVED, PENDING, LOCAL_HIT):
        return True
    return now.name == before.name and now.grade <= before.grade


@given(tokens())
def test_what_is_known_less_of_a_token_makes_no_claim_stronger(token: Token) -> None:
    before = decide(token)
    for less in forgotten(token):
        assert no_stronger(decide(less), before), less


@given(tokens())
def test_what_came_back_as_other_kv_is_read_at_most(token: Token) -> None:
    """As many bytes at rest as were read are no proof against what came back."""
    now, before = decide(token._replace(unequal=True)), decide(token)
    assert no_stronger(now, before) or now.end == token.unfinished
    if now.name == SAVED and not token.proved:
        assert now.grade <= Grade.READ


@given(tokens(), st.randoms(use_true_random=False))
def test_the_order_of_the_evidence_does_not_matter(token: Token, chance: random.Random) -> None:
    shuffled = list(token.stores)
    chance.shuffle(shuffled)
    assert decide(token._replace(stores=tuple(shuffled))) == decide(token)


@given(tokens())
def test_what_is_not_observed_has_no_better_grade(token: Token) -> None:
    outcome = decide(token)
    assert (outcome.name == NOT_OBSERVED) <= (outcome.grade == Grade.NOT_OBSERVED)


def calls() -> st.SearchStrategy[Call]:
    """What can be known of a store call."""
    flag = st.booleans()
    return st.integers(0, 64).flatmap(
        lambda named: st.builds(
            Call,
            st.sampled_from(SaveEnd),
            st.just(named),
            st.integers(0, named),
            flag,
            st.sampled_from(Blind),
            visible=flag,
            failing=flag,
            caught=flag,
            elsewhere=flag,
            slots=st.just(named),
        )
    )


@given(calls(), st.sampled_from([one for one in Blind if one]))
def test_a_call_that_is_seen_less_ends_no_more_surely(call: Call, blind: Blind) -> None:
    """Where nothing can be seen of it, what it names is taken as declared, and as no more."""
    (before, grade), (end, now) = call.end, replace(call, blind=blind).end
    assert now <= grade or end in (SaveEnd.NOT_OBSERVED, SaveEnd.SAVED)
    if end != before:
        assert (end, now) in ((SaveEnd.NOT_OBSERVED, Grade.NOT_OBSERVED), (SaveEnd.SAVED, Grade.DECLARED))


# --- runs -----------------------------------------------------------------------------------------


def leaves_out_every_other_block(sim: Sim) -> None:
    for name in "abc":
        prefill(sim, name, 0, 64, [entry(name, 0, 64)])
        sim.read(name, 0, 16)
        sim.read(name, 32, 48)
        sim.finish(name, 64)
        sim.step([], tokens=1)


def reads_another_requests_blocks(sim: Sim) -> None:
    for name in "abc":
        prefill(sim, name, 0, 64, [entry(name, 0, 64)])
        sim.read("a", 0, 64)
        sim.finish(name, 64)
        sim.step([], tokens=1)


def stores_what_no_metadata_names(sim: Sim) -> None:
    for name in "abc":
        prefill(sim, name, 0, 64)
        sim.read(name, 0, 48)
        sim.finish(name, 64)
        sim.step([], tokens=1)


RUNS = [
    *HEALTHY, leaves_out_every_other_block, reads_another_requests_blocks, stores_what_no_metadata_names
]  # fmt: skip


@dataclass(frozen=True)
class At:
    """A block of a request in a pair."""

    request: int
    block: int
    pair: int


def outcomes(sim: Sim) -> dict[At, Outcome]:
    sim.write()
    run: Run = read_run(sim.dir, watch="abcd")
    return {
        At(span.request, at // BLOCK, pair): span.outcome
        for span in run.spans
        for pair in span.pairs
        for at in range(span.start, span.end, BLOCK)
    }


@pytest.mark.parametrize("forget", WAYS)
@pytest.mark.parametrize("made", RUNS)
def test_what_is_known_less_of_a_run_makes_no_claim_stronger(
    tmp_path: Path, made: Callable[[Sim], None], forget: Callable[[Sim, Chance], None]
) -> None:
    known_less(tmp_path, made, forget)


def known_less(tmp_path: Path, made: Callable[[Sim], None], forget: Callable[[Sim, Chance], None]) -> None:
    """No claim is stronger then, but for what is declared: where nothing else can be seen, the metadata
    and what the scheduler accepted are all there is. The content of what was loaded says by itself that it
    is wrong: without it the slots were written; without these it proves the loss alone."""
    whole = cache(tmp_path / "whole")
    made(whole)
    before = outcomes(whole)
    for seed in range(3):
        sim = cache(tmp_path / str(seed))
        made(sim)
        forget(sim, random.Random(seed))
        for at, now in outcomes(sim).items():
            declared = now.name in (SAVED, LOADED) and now.grade == Grade.DECLARED
            written = now.name == LOADED and now.grade == Grade.READ and before[at].end == LoadEnd.WRONG
            proved = now.name == before[at].name == NOT_LOADED and now.grade == Grade.PROVED
            assert declared or written or proved or no_stronger(now, before[at]), (seed, at, now, before[at])


def records(spool: SpoolFile) -> tuple[bytes, list[bytes], list[bytes]]:
    """The header and the texts; the records of hooks, and those of work in the background."""
    at = fmt.RECORD_SIZE + fmt.unpack_header_block(bytes(spool.data[: fmt.RECORD_SIZE]))[2]
    at += -at % fmt.RECORD_SIZE
    texts, hooked, behind = bytes(spool.data[:at]), list[bytes](), list[bytes]()
    while at < len(spool.data):
        one = bytes(spool.data[at : at + fmt.RECORD_SIZE])
        head, length = (int.from_bytes(one[i : i + 8], "little", signed=True) for i in (0, 16))
        at += fmt.RECORD_SIZE
        if rows.kind(head) in (Kind.NAME, Kind.FACT, Kind.BYTES):
            end = at + length + -length % fmt.RECORD_SIZE
            texts, at = texts + one + bytes(spool.data[at:end]), end
        elif rows.kind(head) == Kind.SLOTS and not rows.code(head):
            behind.append(one)
        else:
            hooked.append(one)
    return texts, hooked, behind


@pytest.mark.parametrize("made", RUNS)
@settings(max_examples=8, deadline=None)
@given(chance=st.randoms(use_true_random=False))
def test_threads_and_processes_are_recorded_in_any_order(
    made: Callable[[Sim], None], chance: random.Random
) -> None:
    recorded_in_any_order(made, chance)


def recorded_in_any_order(made: Callable[[Sim], None], chance: random.Random) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sim = cache(Path(folder) / "one")
        made(sim)
        before = outcomes(sim)
        other = cache(Path(folder) / "other")
        made(other)
        for number, spool in enumerate({id(one): one for one in (other.scheduler, *other.workers)}.values()):
            texts, hooked, behind = records(spool)
            turns = [hooked] * len(hooked) + [behind] * len(behind)
            chance.shuffle(turns)
            spool.data = bytearray(texts + b"".join(whose.pop(0) for whose in turns))
            spool.path = spool.path.with_name(f"{chance.randint(0, 9)}-{number}{fmt.SPOOL_SUFFIX}")
        assert outcomes(other) == before


def test_the_runs_have_what_is_lost_and_what_is_saved(tmp_path: Path) -> None:
    names: set[str] = set()
    for number, made in enumerate(RUNS):
        sim = cache(tmp_path / str(number))
        made(sim)
        names |= {one.name for one in outcomes(sim).values()}
    assert {NOT_SAVED, SAVED} <= names
