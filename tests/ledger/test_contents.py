"""Loads, judged by what was in the KV cache: proved where the same tokens computed to the same, wrong only
where nothing else can be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from synth import Chunk, Entry, Prompt, Sim

from kvtrace.causes import diagnose
from kvtrace.causes.case import Case, make_case
from kvtrace.causes.rule import FAULT
from kvtrace.causes.rules import kv_altered
from kvtrace.ledger import Run, read_run
from kvtrace.ledger.contents.compare import Contents, Wrong, compare
from kvtrace.ledger.contents.prints import ZEROES, Origin, origin_of
from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.loads.decide import By, Gathered, InPair, LoadContents, Sign, judge, signs
from kvtrace.ledger.requests import ComputedChunk as Computed
from kvtrace.ledger.requests import Request
from kvtrace.ledger.run import Engine, OutsideBytes
from kvtrace.terms import LOADED, SAVED, Grade
from kvtrace.trace import facts, rows
from kvtrace.trace.facts import Limit
from kvtrace.trace.format import Fact, Flag, Kind

BLOCK, LAYERS = 32, 2
A, B = (11, 12, 13, 14), (11, 12, 23, 24)
"""Digests of the beginnings of two prompts whose first two blocks are the same."""


class Cache:
    """An engine with a connector that stores every prompt of four blocks."""

    def __init__(self, folder: Path, **more: object) -> None:
        folder.mkdir(exist_ok=True)
        self.sim = Sim(folder, **{"layers": LAYERS, "block": BLOCK, **more})  # type: ignore[arg-type]

    def computes(
        self,
        request: str,
        prints: list[int],
        tokens: tuple[int, ...] = A,
        answer: int = 0,
        named: bool = True,
    ) -> Cache:
        """The connector has ``answer`` tokens of it, and the engine computes it all the same. ``named``: the
        metadata names it to be stored."""
        length = len(tokens) * BLOCK
        self.sim.arrive(Prompt(request, length, digest=tokens[-1], prefixes=tokens))
        self.sim.lookup(request, 0, answer, 0)
        entries = [Entry(request, length, length, 0)] if named else []
        self.sim.step([Chunk(request, 0, length, first=True)], entries=entries, prompts={request: length})
        self.sim.prints(request, prints)
        return self

    def loads(
        self, request: str, prints: list[int], tokens: tuple[int, ...] = A, blocks: int = 3, more: int = 0,
        salt: int = 0,
    ) -> Cache:  # fmt: skip
        """The first blocks come from the connector, and ``more`` tokens of the next; the rest is computed."""
        length, taken = len(tokens) * BLOCK, blocks * BLOCK + more
        self.sim.arrive(Prompt(request, length, digest=tokens[-1], prefixes=tokens, salt=salt))
        self.sim.lookup(request, 0, taken, taken)
        self.sim.step([Chunk(request, taken, length - taken, first=True)], prompts={request: length})
        self.sim.prints(request, prints)
        return self

    def loads_behind(self, request: str, prints: list[int]) -> Cache:
        """The GPU's own prefix cache has the first block, and the connector the next two."""
        self.sim.arrive(Prompt(request, 4 * BLOCK, digest=A[-1], prefixes=A))
        self.sim.lookup(request, BLOCK, 2 * BLOCK, 2 * BLOCK)
        self.sim.step([Chunk(request, 3 * BLOCK, BLOCK, first=True)], prompts={request: 4 * BLOCK})
        self.sim.prints(request, prints)
        return self

    def reuses(self, request: str, prints: list[int], tokens: tuple[int, ...] = A) -> Cache:
        """The GPU's own prefix cache has all but the last block."""
        length = len(tokens) * BLOCK
        self.sim.arrive(Prompt(request, length, digest=tokens[-1], prefixes=tokens))
        self.sim.lookup(request, length - BLOCK, 0, 0)
        self.sim.step([Chunk(request, length - BLOCK, BLOCK, first=True)], prompts={request: length})
        self.sim.prints(request, prints)
        return self

    def run(self) -> Run:
        self.sim.write()
        run = read_run(self.sim.dir)
        run.loads.check()
        return run


def lost(run: Run) -> int:
    """Tokens that were loaded wrong, in all layers."""
    amount = run.loads.accounts.get(LoadEnd.WRONG, 0)
    assert amount % LAYERS == 0
    return amount // LAYERS


def proved(run: Run, outcome: str) -> int:
    found = [one for one in run.base if one.outcome == outcome and one.grade == Grade.PROVED]
    return sum(one.amount for one in found) // LAYERS


def why(run: Run, end: LoadEnd = LoadEnd.WRONG) -> tuple[str, ...]:
    return next((row.reasons[end] for row in run.load_rows if end in row.reasons), ())


# --- proved -----------------------------------------------------------------------------------------


def test_a_load_of_what_was_computed_proves_itself_and_the_save(tmp_path: Path) -> None:
    run = Cache(tmp_path).computes("a", [5, 6, 7, 8]).loads("b", [5, 6, 7, 9]).run()
    assert lost(run) == 0 and run.compared == {"equal": 3}
    assert proved(run, LOADED) == proved(run, SAVED) == 3 * BLOCK
    assert run.loads.grades[LoadEnd.LOADED][Grade.PROVED] == 3 * BLOCK * LAYERS


def test_of_two_computations_with_other_bits_either_may_return(tmp_path: Path) -> None:
    cache = Cache(tmp_path).computes("a", [5, 6, 7, 8]).computes("b", [15, 16, 17, 18])
    run = cache.loads("c", [5, 16, 7, 9]).run()
    assert run.compared == {"equal": 3}


def test_prompts_that_begin_alike_prove_each_other_that_far(tmp_path: Path) -> None:
    run = Cache(tmp_path).computes("a", [5, 6, 7, 8]).loads("b", [5, 6, 9, 9], B, blocks=2).run()
    assert run.compared == {"equal": 2} and lost(run) == 0


def test_each_rank_is_compared_with_itself(tmp_path: Path) -> None:
    cache = Cache(tmp_path, tp=2).computes("a", [5, 6, 7, 8])
    cache.sim.prints("a", [25, 26, 27, 28], rank=1)
    cache.loads("b", [5, 6, 7, 8])
    cache.sim.prints("b", [25, 26, 7, 28], rank=1)
    run = cache.run()
    assert run.compared == {"equal": 5, "altered": 1}
    assert run.loads.accounts[LoadEnd.ALTERED] == BLOCK * LAYERS


# --- wrong ------------------------------------------------------------------------------------------


def test_kv_that_these_tokens_never_computed_to_is_told(tmp_path: Path) -> None:
    run = Cache(tmp_path).computes("a", [5, 6, 7, 8]).loads("b", [5, 99, 7, 8]).run()
    assert run.loads.accounts[LoadEnd.ALTERED] == BLOCK * LAYERS
    assert run.compared == {"equal": 2, "altered": 1}
    assert why(run, LoadEnd.ALTERED) == ("tokens 32-64 are not what they computed to in request a",)


@pytest.mark.parametrize(("more", "altered"), [((), 0), ((15,), 2)], ids=["ends with it", "goes on"])
def test_a_prompts_last_unit_was_offered_to_nobody(
    tmp_path: Path, more: tuple[int, ...], altered: int
) -> None:
    """Of a prompt its last token is always computed: that the connector gave a unit less than all of it is no
    word that it had no more. What another engine stored there may have other bits."""
    cache = Cache(tmp_path).computes("a", [5, 6, 7, 8, 9][: 4 + len(more)], (*A, *more), answer=2 * BLOCK)
    run = cache.loads("b", [5, 6, 77, 88, 9, 10], (*A, 15, 16), blocks=4).run()
    assert run.compared.get("altered", 0) == altered


def test_kv_of_another_place_is_told_whose_it_is(tmp_path: Path) -> None:
    run = Cache(tmp_path).computes("a", [5, 6, 7, 8]).loads("b", [5, 5, 7, 8]).run()
    assert lost(run) == BLOCK
    assert why(run) == ("tokens 32-64 hold what tokens 0-32 of the same prompt computed to",)


def test_a_prompt_under_another_cache_salt_may_be_the_same_one(tmp_path: Path) -> None:
    """A salt makes other digests of equal tokens, not other KV: which tokens it is of is not known."""
    run = Cache(tmp_path).computes("a", [5, 6, 7, 8]).loads("b", [5, 6, 7, 9], (31, 32, 33, 34), salt=3).run()
    assert lost(run) == 0 and run.compared == {"not compared": 3}
    assert run.across_salts == {1: 3 * BLOCK}
    (asked,) = (one for one in diagnose(run).findings if one.id == "kv-load-wrong")
    assert (asked.severity, asked.tokens, asked.requests) == ("limit", 3 * BLOCK, 1)
    assert "put the request's cache_salt into the key" in asked.remedy[0].lower()


def test_the_same_kv_under_its_own_salt_crosses_none(tmp_path: Path) -> None:
    """Another tenant computed the same tokens too."""
    b = (31, 32, 33, 34)
    cache = Cache(tmp_path).computes("a", [5, 6, 7, 8]).loads("b", [15, 16, 17, 18], b, blocks=0, salt=3)
    assert not cache.loads("c", [15, 16, 17, 19], b, salt=3).run().across_salts


@pytest.mark.parametrize(("groups", "saved"), [(1, 3 * BLOCK), (2, 0)])
def test_of_a_pipeline_the_first_ranks_layers_are_known(tmp_path: Path, groups: int, saved: int) -> None:
    """Of several groups it is not known which of them another rank's layers are in."""
    known = [
        {
            "kind": "FullAttentionSpec",
            "block_size": BLOCK,
            "layers": [f"model.layers.{9 + at}.self_attn.attn"],
        }
        for at in range(groups)
    ]
    cache = Cache(tmp_path, engine_facts={"kv_groups": known, "pp": 2})
    run = cache.computes("a", [5, 6, 7, 8]).loads("b", [5, 6, 7, 9]).run()
    assert (proved(run, LOADED), proved(run, SAVED)) == (saved, saved)


@pytest.mark.parametrize(("tag", "saved"), [(7, 3 * BLOCK), (8, 0)], ids=["the same", "another one"])
def test_by_its_address_an_engine_reads_kv_where_it_was_made(tmp_path: Path, tag: int, saved: int) -> None:
    """What comes back to the same engine was kept somewhere."""
    one = Cache(tmp_path).computes("a", [5, 6, 7, 8], named=False)
    limit = {"connector": 1, "kind": Limit.ADDRESS.value, "hook": "register_kv_caches"}
    one.sim.workers[0].fact(Fact.WATCH_LIMITS, limit)
    other = one
    if tag != one.sim.tag:
        other = Cache(tmp_path, tag=tag, pid=200)
        one.sim.write()
    run = other.loads("b", [5, 6, 7, 9]).run()
    assert (proved(run, LOADED), proved(run, SAVED)) == (3 * BLOCK, saved)


def test_kv_that_came_back_for_others_has_a_wrong_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many bytes at rest as were read of it are no proof of it: they are the others'."""
    seen: list[Contents] = []

    def kept(*given: object) -> Contents:
        seen.append(compare(*given))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr("kvtrace.ledger.read.compare", kept)
    Cache(tmp_path).computes("a", [5, 6, 7, 8]).loads("b", [6, 6, 5, 9]).run()
    (contents,) = seen
    assert {row: parts for row, ((_, parts),) in contents.unequal([1]).items()} == {
        0: ((0, 96),),
        1: ((0, 32), (64, 96)),
    }


def test_kv_of_another_prompt_is_told_whose_it_is(tmp_path: Path) -> None:
    run = Cache(tmp_path).computes("a", [5, 6, 7, 8]).loads("b", [5, 6, 7, 9], B).run()
    assert lost(run) == BLOCK
    assert why(run) == ("tokens 64-96 hold what tokens 64-96 of another request (a) computed to",)


def test_kv_from_another_place_of_a_prompt_is_no_short_key(tmp_path: Path) -> None:
    """A place of the store was given to other KV, and something still names it."""
    cache = Cache(tmp_path).computes("a", [5, 6, 7, 8]).computes("x", [21, 22, 23, 24], (31, 32, 33, 34))
    run = cache.loads("b", [23, 6, 7, 9]).run()
    whose = "a different prompt, at another place in it (x)"
    assert why(run)[0] == f"tokens 0-32 hold what tokens 64-96 of {whose} computed to"
    (fault,) = (one for one in diagnose(run).findings if one.id == "kv-load-wrong")
    assert "(eviction, reuse)" in fault.remedy[0] and "key of all tokens" not in " ".join(fault.remedy[:-1])


@pytest.mark.parametrize(("block", "had"), [(21, True), (31, False)])
def test_kv_of_who_had_the_block_next_was_read_too_late(tmp_path: Path, block: int, had: bool) -> None:
    """Nobody saw who read it when: what came back tells."""
    cache = Cache(tmp_path, kv_blocks=64)
    cache.sim.give("a", [21, 22, 23, 24], flags=int(Flag.FIRST))
    cache.computes("a", [5, 6, 7, 8])
    cache.sim.give("x", [33, 32, block, 34], flags=int(Flag.FIRST))
    run = cache.computes("x", [31, 32, 33, 34], (31, 32, 33, 34)).loads("b", [33, 6, 7, 9]).run()
    (said,) = (line for line in why(run) if "(x)" in line)
    assert said.endswith(", in a block of the cache that had been theirs") is had
    (fault,) = (one for one in diagnose(run).findings if one.id == "kv-load-wrong")
    assert fault.remedy[0].startswith("Read a block before it is given to others") is had


def test_kv_of_ones_own_beginning_is_no_other_prompts(tmp_path: Path) -> None:
    """Who computed it had a shorter prompt, with which this one begins."""
    run = Cache(tmp_path).computes("a", [5, 6], A[:2]).loads("b", [5, 6, 5, 9]).run()
    assert why(run) == ("tokens 64-96 hold what tokens 0-32 of the same prompt computed to",)


@pytest.mark.parametrize("preempted", [True, False])
@pytest.mark.parametrize("other", [A, B], ids=["the same prompt", "one that begins so"])
def test_the_table_of_a_request_that_was_preempted(
    tmp_path: Path, other: tuple[int, ...], preempted: bool
) -> None:
    """Appended to when the request resumes, it names its first block anew in the place of a later one."""
    run = Cache(tmp_path).computes("a", [5, 6, 7, 8]).loads("b", [5, 6, 5, 9], other).run()
    run = replace(run, requests=[run.requests[0]._replace(preemptions=int(preempted)), run.requests[1]])
    (fault,) = (one for one in diagnose(run).findings if one.id == "kv-load-wrong")
    assert ("resumed_req_ids" in fault.remedy[0]) == preempted


def test_a_load_of_equal_kv_twice_needs_no_earlier_computation(tmp_path: Path) -> None:
    run = Cache(tmp_path).loads("b", [5, 5, 5, 9]).run()
    assert lost(run) == 2 * BLOCK and run.compared == {"not compared": 1, "wrong": 2}


def _into_the_same_blocks(folder: Path, prints: list[int], *, writes: bool = False) -> Run:
    """``b`` loads into the blocks in which ``a`` was computed, the last one first."""
    cache = Cache(folder, kv_blocks=5)
    cache.sim.grow("a", 4 * BLOCK)
    cache.computes("a", [5, 6, 7, 8], answer=0)
    cache.sim.finish("a", 4 * BLOCK)
    cache.sim.free("a")
    cache.sim.grow("b", 4 * BLOCK)
    cache.loads("b", prints, B)
    if writes:
        cache.sim.write_kv("b", 0, 3 * BLOCK)
    return cache.run()


def test_blocks_that_hold_what_they_held_were_not_written(tmp_path: Path) -> None:
    run = _into_the_same_blocks(tmp_path, [8, 7, 6, 9])
    assert run.loads.accounts.get(LoadEnd.NOT_WRITTEN) == 3 * BLOCK * LAYERS and not lost(run)
    first = diagnose(run).findings[0]
    assert first.id == "load-not-injected" and first.grade is Grade.PROVED


@pytest.mark.parametrize(
    ("written", "lost"),
    [
        (0, {LoadEnd.NOT_WRITTEN: 1, LoadEnd.NOT_OBSERVED: 2}),
        (1, {LoadEnd.PARTLY: 2, LoadEnd.ALTERED: 1}),
        (2, {LoadEnd.PARTLY: 1, LoadEnd.ALTERED: 2}),
    ],
)
def test_blocks_into_which_no_write_was_seen_are_not_altered(
    tmp_path: Path, written: int, lost: dict[LoadEnd, int]
) -> None:
    """What the other blocks of a load of nothing had held before is not known: they were "other numbers"."""
    cache = Cache(tmp_path, kv_blocks=64).computes("a", [5, 6, 7, 8]).loads("b", [ZEROES, 77, 78, 9])
    if written:
        cache.sim.write_kv("b", BLOCK, (1 + written) * BLOCK)
    accounts = cache.run().loads.accounts
    assert lost.items() <= {end: tokens // BLOCK // LAYERS for end, tokens in accounts.items()}.items()


def test_a_load_that_was_not_written_leaves_others_altered(tmp_path: Path) -> None:
    """KV of fewer bits was called another's, as some other load had failed."""
    cache = Cache(tmp_path, kv_blocks=64).computes("a", [5, 6, 7, 8]).loads("b", [77, 78, 79, 9])
    run = cache.loads("c", [ZEROES, ZEROES, ZEROES, 9]).run()
    assert (
        run.loads.accounts[LoadEnd.ALTERED] == run.loads.accounts[LoadEnd.NOT_WRITTEN] == 3 * BLOCK * LAYERS
    )
    assert run.compared == {"altered": 3, "wrong": 3}


@pytest.mark.parametrize("blocks", [0, 2, 3])
def test_what_stood_in_the_block_before_proves_no_load(tmp_path: Path, blocks: int) -> None:
    """... unless something was seen to be written into that very block."""
    cache = Cache(tmp_path, kv_blocks=64)
    for request in "ab":
        cache.sim.give(request, [21, 22, 23, 24], flags=int(Flag.FIRST))
        if request == "a":
            cache.computes("a", [8, 7, 6, 5])
            cache.sim.finish("a", 4 * BLOCK)
    cache.loads("b", [8, 7, 6, 9])
    if blocks:
        cache.sim.write_kv("b", 0, blocks * BLOCK)
    run = cache.run()
    assert sum(row.proved for row in run.load_rows) == blocks * BLOCK * LAYERS and not lost(run)


def test_what_holds_its_tokens_kv_was_written_unseen(tmp_path: Path) -> None:
    """A load that reads its slots, and writes them where it can't be seen."""
    cache = Cache(tmp_path, kv_blocks=64)
    cache.computes("a", [8, 7, 6, 5]).loads("b", [8, 7, 4, 9])
    cache.sim.read("b", 0, 3 * BLOCK, hook="start_load_kv")
    run = cache.run()
    ends = run.load_rows[-1].ends
    assert ends[LoadEnd.LOADED] == 2 * BLOCK * LAYERS
    assert ends[LoadEnd.NOT_WRITTEN] == BLOCK * LAYERS


def test_a_begun_block_behind_blocks_written_unseen_is_open(tmp_path: Path) -> None:
    """NIXL's first load waits for a handshake, and is written in a step that is not watched: all whole blocks
    hold their tokens' KV, and the last one, which is begun, has no fingerprint."""
    cache = Cache(tmp_path, kv_blocks=64)
    cache.computes("a", [8, 7, 6, 5]).loads("b", [8, 7, 6, 9], more=11)
    cache.sim.read("b", 0, 3 * BLOCK + 11, hook="start_load_kv")
    ends = cache.run().load_rows[-1].ends
    assert ends[LoadEnd.LOADED] == 3 * BLOCK * LAYERS
    assert ends[LoadEnd.NOT_OBSERVED] == 11 * LAYERS
    assert LoadEnd.NOT_WRITTEN not in ends


@pytest.mark.parametrize(
    ("prints", "lost"),
    [([ZEROES, ZEROES, 7, 9], 2), ([ZEROES, 8, ZEROES, 9], 2), ([8, 7, 6, 9], 0)],
)
def test_loaded_blocks_of_zeroes_were_never_written(tmp_path: Path, prints: list[int], lost: int) -> None:
    run = Cache(tmp_path, kv_blocks=64).loads("a", prints).run()
    assert run.loads.accounts.get(LoadEnd.NOT_WRITTEN, 0) == lost * BLOCK * LAYERS
    if lost:
        assert diagnose(run).findings[0].id == "load-not-injected"


def test_a_load_that_brought_its_first_block_came_in_part(tmp_path: Path) -> None:
    """A lookup that promises more than is stored."""
    run = Cache(tmp_path, kv_blocks=64).computes("a", [8, 7, 6, 5]).loads("b", [8, ZEROES, ZEROES, 9]).run()
    ends = run.load_rows[-1].ends
    assert ends[LoadEnd.LOADED] == BLOCK * LAYERS and ends[LoadEnd.PARTLY] == 2 * BLOCK * LAYERS
    fault = diagnose(run).findings[0]
    assert (fault.id, fault.tokens, fault.grade) == ("loaded-partly", 2 * BLOCK, Grade.PROVED)


def test_a_model_that_computes_zeroes_may_load_them(tmp_path: Path) -> None:
    cache = Cache(tmp_path, kv_blocks=64)
    run = cache.computes("a", [ZEROES, ZEROES, 6, 5], B).loads("b", [ZEROES, ZEROES, ZEROES, 9]).run()
    assert not run.loads.accounts.get(LoadEnd.NOT_WRITTEN)


@pytest.mark.parametrize(
    ("more", "end"),
    [
        ({"hook": "thread", "asked_by": "start_load_kv"}, LoadEnd.FAILED),
        ({"hook": "wait_for_layer_load"}, LoadEnd.FAILED),
        ({"hook": "thread", "asked_by": "save_kv_layer"}, LoadEnd.NOT_WRITTEN),
        ({"hook": "thread", "asked_by": "start_load_kv", "went_on": True}, LoadEnd.NOT_WRITTEN),
        ({"hook": "start_load_kv", "type": "FileNotFoundError"}, LoadEnd.NOT_WRITTEN),
    ],
)
def test_a_load_that_caught_an_exception_and_has_nothing_failed(
    tmp_path: Path, more: dict[str, object], end: LoadEnd
) -> None:
    cache = Cache(tmp_path, kv_blocks=64).loads("a", [ZEROES, ZEROES, ZEROES, 9])
    fact = {"type": "OSError", "message": "gone", "where": "c.py:1 in pull", "step": cache.sim.step_id}
    cache.sim.workers[0].fact(Fact.SWALLOWED, {**fact, **more})
    run = cache.run()
    assert run.loads.accounts.get(end) == 3 * BLOCK * LAYERS
    assert ("OSError: gone" in " ".join(run.load_rows[0].reasons[end])) == (end is LoadEnd.FAILED)


# --- looked at again ------------------------------------------------------------------------------------


def _looked_at(
    cache: Cache, then: list[int], given: int | None = None, request: str = "b", steps: int = 2
) -> Cache:
    """Two steps later the request's blocks hold this. ``given``: they are another one's by then, in this KV
    cache group."""
    for _ in range(steps):
        cache.sim.step()
    if given is not None:
        cache.sim.give("z", [21, 22, 23, 24], given, int(Flag.FIRST))
        cache.computes("z", [15, 16, 17, 18], B)
    cache.sim.prints(request, then, kind=Kind.REPRINTS)
    return cache


def _nothing_yet(tmp_path: Path, request: str = "b", blocks: tuple[int, ...] = (21, 22, 23, 24)) -> Cache:
    cache = Cache(tmp_path, kv_blocks=64)
    cache.sim.give(request, list(blocks), flags=int(Flag.FIRST))
    return cache.loads(request, [ZEROES, ZEROES, ZEROES, 9])


def test_a_block_that_changes_after_its_use_was_loaded_too_late(tmp_path: Path) -> None:
    run = _looked_at(_nothing_yet(tmp_path), [5, 6, 7]).run()
    assert run.loads.accounts.get(LoadEnd.USED_BEFORE) == 3 * BLOCK * LAYERS
    (fault,) = (one for one in diagnose(run).findings if one.tokens)
    assert fault.id == "load-after-use" and fault.tokens == 3 * BLOCK
    assert any("2 steps later they hold other KV" in line for line in fault.evidence)


def test_a_change_to_what_is_not_its_kv_is_no_late_load(tmp_path: Path) -> None:
    cache = Cache(tmp_path, kv_blocks=64).computes("a", [15, 16, 17, 18], B)
    cache.sim.give("b", [21, 22, 23, 24], flags=int(Flag.FIRST))
    run = _looked_at(cache.loads("b", [ZEROES, ZEROES, ZEROES, 9]), [16, 17, 15]).run()
    assert run.loads.accounts.get(LoadEnd.NOT_WRITTEN) == 3 * BLOCK * LAYERS
    first = diagnose(run).findings[0]
    assert first.id == "load-not-injected"
    assert any("they hold other KV, which is not theirs either" in line for line in first.evidence)


def test_a_load_that_came_to_the_next_request_was_late(tmp_path: Path) -> None:
    """What the first one was to be given stands in its blocks when another has them. How long that one's own
    load takes nobody knows: its blocks could be looked at until then alone."""
    cache = Cache(tmp_path, kv_blocks=64).computes("a", [15, 16, 17, 18])
    for request, digests in (("b", A), ("c", (31, 32, 33, 34))):
        cache.sim.give(request, [21, 22, 23, 24], flags=int(Flag.FIRST))
        cache.loads(request, [ZEROES, ZEROES, ZEROES, 9], digests)
    run = _looked_at(cache, [15, 16, 17], request="c").run()
    assert run.loads.accounts.get(LoadEnd.USED_BEFORE) == 6 * BLOCK * LAYERS
    (fault,) = (one for one in diagnose(run).findings if one.severity is FAULT)
    assert fault.id == "load-after-use" and fault.tokens == 6 * BLOCK
    said = next(line for line in fault.evidence if "when another request had the blocks" in line)
    assert "3 steps later, when another request had the blocks, they are what theirs computed to" in said
    other = run.load_rows[2].reasons[LoadEnd.USED_BEFORE][1]
    assert "theirs either, and after that could not be looked at; other loads came 3 steps after" in other


@pytest.mark.parametrize(
    ("block", "cause", "remedy"),
    [
        (21, "kv-load-wrong", "See what came into the store: zeroes come back"),
        (41, "load-not-injected", "Look at start_load_kv"),
    ],
)
def test_zeroes_in_a_block_that_others_had_were_written(
    tmp_path: Path, block: int, cause: str, remedy: str
) -> None:
    cache = Cache(tmp_path, kv_blocks=64)
    cache.sim.give("a", [21, 22, 23, 24], flags=int(Flag.FIRST))
    cache.computes("a", [5, 6, 7, 8])
    cache.sim.give("b", [block + at for at in range(4)], flags=int(Flag.FIRST))
    first = diagnose(cache.loads("b", [ZEROES, ZEROES, ZEROES, 9]).run()).findings[0]
    assert (first.id, first.tokens) == (cause, 3 * BLOCK)
    assert first.remedy[0].startswith(remedy)


def test_a_load_of_unknown_end_is_no_token_computed_here(tmp_path: Path) -> None:
    """What its blocks hold may be its own, or of before."""
    cache = Cache(tmp_path, kv_blocks=64).computes("a", [5, 6, 7, 8])
    cache.sim.give("b", [41, 42, 43, 44], flags=int(Flag.FIRST))
    run = cache.loads("b", [ZEROES, 77, 78, 9]).run()
    assert run.loads.accounts[LoadEnd.NOT_OBSERVED] == 2 * BLOCK * LAYERS
    saves = diagnose(run).saves
    assert sum(sum(of.values()) for of in saves.prompts.values()) == (4 + 1) * BLOCK
    assert saves.tokens["not-observed"] == 3 * BLOCK, "they are tokens of the run, all the same"


def test_a_block_that_stays_as_it_was_says_for_how_long(tmp_path: Path) -> None:
    run = _looked_at(_nothing_yet(tmp_path), [ZEROES, ZEROES, ZEROES]).run()
    assert run.loads.accounts.get(LoadEnd.NOT_WRITTEN) == 3 * BLOCK * LAYERS
    first = diagnose(run).findings[0]
    assert first.id == "load-not-injected"
    assert any("2 steps later they still do" in line for line in first.evidence)


@pytest.mark.parametrize("group", [0, 1])
def test_a_block_given_to_another_request_since_says_nothing(tmp_path: Path, group: int) -> None:
    """Of whatever KV cache group: they share their blocks."""
    run = _looked_at(_nothing_yet(tmp_path), [5, 6, 7], given=group).run()
    assert run.loads.accounts.get(LoadEnd.NOT_WRITTEN) == 3 * BLOCK * LAYERS


def test_a_block_that_is_computed_after_all_says_nothing(tmp_path: Path) -> None:
    cache = _nothing_yet(tmp_path)
    cache.sim.step([Chunk("b", 0, 128)], prompts={"b": 128})
    run = _looked_at(cache, [5, 6, 7]).run()
    assert not run.loads.accounts.get(LoadEnd.USED_BEFORE)


def test_a_block_in_part_that_is_whole_later_was_loaded_late(tmp_path: Path) -> None:
    """Each layer held something new when attention used it, such as keys without their values."""
    cache = Cache(tmp_path, kv_blocks=64).computes("a", [5, 6, 7, 8])
    cache.sim.give("b", [21, 22, 23, 24], flags=int(Flag.FIRST))
    run = _looked_at(cache.loads("b", [5, 36, 37, 9]), [5, 6, 38]).run()
    assert run.loads.accounts.get(LoadEnd.USED_BEFORE) == BLOCK * LAYERS
    assert run.compared == {"equal": 1, "wrong": 1, "altered": 1}
    (fault,) = (one for one in diagnose(run).findings if one.severity is FAULT)
    assert fault.id == "load-after-use" and fault.tokens == BLOCK
    assert any("2 steps later they are what theirs computed to" in line for line in fault.evidence)


def test_a_later_change_in_a_block_loaded_right_is_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path, kv_blocks=64).computes("a", [5, 6, 7, 8])
    cache.sim.give("b", [21, 22, 23, 24], flags=int(Flag.FIRST))
    run = _looked_at(cache.loads("b", [5, 6, 7, 9]), [15, 16, 17]).run()
    assert run.compared == {"equal": 3} and not run.loads.accounts.get(LoadEnd.USED_BEFORE)


@pytest.mark.parametrize(("steps", "late"), [(1, 6), (4, 3)])
def test_a_load_not_looked_at_for_as_long_as_late_ones_take(tmp_path: Path, steps: int, late: int) -> None:
    cache = _looked_at(_nothing_yet(tmp_path), [5, 6, 7], steps=3)
    cache.sim.give("c", [31, 32, 33, 34], flags=int(Flag.FIRST))
    cache.loads("c", [ZEROES, ZEROES, ZEROES, 9])
    run = _looked_at(cache, [ZEROES] * 3, request="c", steps=steps).run()
    assert run.loads.accounts[LoadEnd.USED_BEFORE] == late * BLOCK * LAYERS
    assert run.loads.accounts.get(LoadEnd.NOT_WRITTEN, 0) == (6 - late) * BLOCK * LAYERS


def test_what_was_seen_to_be_written_is_wrong_itself(tmp_path: Path) -> None:
    assert lost(_into_the_same_blocks(tmp_path, [8, 7, 6, 9], writes=True)) > 0


def test_the_same_places_of_another_prompt_may_be_a_wrong_key(tmp_path: Path) -> None:
    assert lost(_into_the_same_blocks(tmp_path, [5, 6, 7, 9])) == BLOCK


# --- not compared -----------------------------------------------------------------------------------


def unsure(run: Run, blocks: int) -> bool:
    return lost(run) == 0 and run.compared.get("not compared") == blocks


def test_what_the_run_never_computed_is_not_compared(tmp_path: Path) -> None:
    assert unsure(Cache(tmp_path).loads("b", [5, 6, 7, 9]).run(), 3)


def test_what_the_store_had_before_the_run_is_not_wrong(tmp_path: Path) -> None:
    assert unsure(Cache(tmp_path).computes("a", [5, 6, 7, 8], answer=128).loads("b", [5, 99, 7, 8]).run(), 1)
    cache = Cache(tmp_path / "again").loads("b", [5, 99, 7, 9]).computes("a", [5, 6, 7, 8])
    assert unsure(cache.loads("c", [5, 99, 7, 9]).run(), 4)


def test_loaded_blocks_that_the_gpu_keeps_excuse_no_load(tmp_path: Path) -> None:
    """A third request has them from the GPU's prefix cache: that is no KV from before the run."""
    cache = Cache(tmp_path).computes("a", [5, 6, 7, 8]).loads("b", [5, 99, 7, 8]).reuses("c", [5, 99, 7, 8])
    assert cache.run().compared == {"equal": 2, "altered": 1}


def test_where_one_computation_was_not_printed_nothing_is_wrong(tmp_path: Path) -> None:
    cache = Cache(tmp_path).computes("a", [5, 6, 7, 8]).computes("b", [])
    assert unsure(cache.loads("c", [5, 99, 7, 8]).run(), 1)


def test_what_is_computed_only_later_says_nothing(tmp_path: Path) -> None:
    assert unsure(Cache(tmp_path).loads("b", [15, 16, 17, 9]).computes("a", [5, 6, 7, 8]).run(), 3)


def test_a_model_of_one_layer_is_not_judged(tmp_path: Path) -> None:
    run = Cache(tmp_path, layers=1).computes("a", [5, 6, 7, 8]).loads("b", [5, 5, 99, 9]).run()
    assert run.compared == {"equal": 1, "not compared": 2}


@pytest.mark.parametrize(
    ("group", "held", "found"),
    [(1, 5, "wrong"), (1, 99, "altered"), (0, 5, "not compared")],
    ids=["another place", "the same place of another prompt", "the first layer"],
)
def test_a_kv_cache_group_of_one_layer_is_judged(tmp_path: Path, group: int, held: int, found: str) -> None:
    """Models with sliding windows may have such. One layer may see no further than its window; the first one
    sees the token alone."""
    cache = Cache(tmp_path, layers=2, groups=[(BLOCK, [0]), (BLOCK, [1])])

    def printed(request: str, prints: list[int]) -> None:
        cache.sim.prints(request, prints, group=group)
        cache.sim.prints(request, [1000 + at for at in range(len(prints))], group=1 - group)

    cache.computes("a", [])
    printed("a", [5, 6, 7, 8])
    cache.computes("other", [], tokens=(91, 92, 93, 94))
    printed("other", [15, 99, 17, 18])
    cache.loads("b", [])
    printed("b", [5, held, 7])
    assert cache.run().compared == {"equal": 5, found: 1}


def test_zeroes_are_nobody_s(tmp_path: Path) -> None:
    """Where it was seen that they were written, they are no other tokens' KV."""
    cache = Cache(tmp_path, kv_blocks=64).loads("b", [ZEROES, ZEROES, ZEROES, 9])
    cache.sim.write_kv("b", 0, 3 * BLOCK)
    run = cache.run()
    assert unsure(run, 3)
    assert not run.loads.accounts.get(LoadEnd.NOT_WRITTEN)


@pytest.mark.parametrize(("loaded", "finding"), [(ZEROES, "kv-load-wrong"), (77, "kv-altered")])
def test_written_zeroes_are_no_store_of_fewer_bits(tmp_path: Path, loaded: int, finding: str) -> None:
    cache = Cache(tmp_path, kv_blocks=64).computes("a", [5, 6, 7, 8])
    numbers = [loaded, loaded + 1, loaded + 2] if loaded != ZEROES else [ZEROES] * 3
    cache.loads("b", [*numbers, 9])
    cache.sim.write_kv("b", 0, 3 * BLOCK)
    run = cache.run()
    assert run.compared == {("wrong" if loaded == ZEROES else "altered"): 3}
    assert finding in {one.id for one in diagnose(run).findings}


def test_engines_of_another_shape_are_not_compared(tmp_path: Path) -> None:
    one = Cache(tmp_path).computes("a", [5, 6, 7, 8])
    other = Cache(tmp_path, layers=3, tag=8, pid=200).loads("b", [95, 96, 97, 98])
    one.sim.write()
    assert unsure(other.run(), 3)


@pytest.mark.parametrize(("model", "dtype"), [("m", "torch.bfloat16"), ("n", "torch.float16")])
def test_engines_of_another_model_or_dtype_compute_other_kv(tmp_path: Path, model: str, dtype: str) -> None:
    def facts_of(model: str, dtype: str) -> dict[str, object]:
        layers = [f"model.layers.{at}.self_attn.attn" for at in range(LAYERS)]
        group = {"kind": "FullAttentionSpec", "block_size": BLOCK, "layers": layers, "dtype": dtype}
        return {"model": model, "kv_groups": [group]}

    one = Cache(tmp_path, engine_facts=facts_of("m", "torch.float16")).computes("a", [5, 6, 7, 8])
    other = Cache(tmp_path, engine_facts=facts_of(model, dtype), tag=8, pid=200).loads("b", [5, 6, 7, 9])
    one.sim.write()
    run = other.run()
    assert unsure(run, 3) and not proved(run, LOADED) and not proved(run, SAVED)


@pytest.mark.parametrize(
    ("second", "layers", "apart"),
    [([15, 16, 17, 18], 0, 4), ([15, 16, 17, 18], 33, 0), ([15, 6, 17, 18], 0, 0)],
)
def test_an_engine_of_other_weights_proves_no_load(
    tmp_path: Path, second: list[int], layers: int, apart: int
) -> None:
    """``layers``: the KV that both computed in their first layer, if any: so they have the same weights."""
    one = Cache(tmp_path).computes("a", [5, 6, 7, 8])
    other = Cache(tmp_path, tag=8, pid=200).computes("b", second)
    for cache, request in ((one, "a"), (other, "b")) if layers else ():
        cache.sim.of_layers(request, [(layers, 50 if request == "a" else 60)])
    other.loads("c", [5, 6, 7, 9])
    one.sim.write()
    run = other.run()
    assert run.apart == apart and lost(run) == 0
    assert run.compared == ({"not compared": 3} if apart else {"equal": 3})
    questions = [found for found in diagnose(run).findings if found.id == "kv-load-wrong"]
    assert [(one.severity, one.tokens) for one in questions] == ([("limit", 3 * BLOCK)] if apart else [])


def test_what_a_step_computed_behind_a_failed_load_is_no_proof(tmp_path: Path) -> None:
    """vLLM throws that step away, and computes the tokens anew; the connector may have stored it."""
    cache = Cache(tmp_path).loads("a", [95, 96, 97, 98])
    cache.sim.step([Chunk("a", 0, 128)], prompts={"a": 128})
    cache.sim.prints("a", [5, 6, 7, 8])
    run = cache.loads("b", [5, 6, 7, 98], blocks=4).run()
    assert run.compared == {"equal": 3, "not compared": 1}


def test_a_load_known_to_have_failed_is_left_to_its_cause(tmp_path: Path) -> None:
    """What vLLM computes again after a failed load was never used."""
    cache = Cache(tmp_path).computes("a", [5, 6, 7, 8]).loads("b", [5, 99, 99, 9])
    cache.sim.step([Chunk("b", 32, 96)], prompts={"b": 128})
    assert lost(cache.run()) == 0


@pytest.mark.parametrize(("lacking", "end"), [(True, LoadEnd.NOT_OBSERVED), (False, LoadEnd.WRONG)])
def test_a_load_nobody_watched_beside_others_that_came_late(lacking: bool, end: LoadEnd) -> None:
    """What stood in its blocks was "loaded with KV that is not theirs"; of another's KV that is so."""
    engine = Engine(0, 1, "engine core", facts.EngineFact(block_size=32), None, pairs=1)
    watched = {InPair(signs([(0, 64)], Sign(By.SLOT, LoadEnd.USED_BEFORE)), True): 1}
    assert Gathered(watched).came_late
    said = [Wrong(0, 32, 1, "x"), Wrong(32, 64, 1, "y", whose=((1, 1), (0, 32)))]
    judged = judge((0, 64), Gathered({InPair(): 1}), LoadContents(said, lacking=lacking), engine)
    ends = {at: ended for parts in judged.lost for start, stop, ended in parts for at in (start, stop - 1)}
    assert (ends[0], ends[63]) == (end, LoadEnd.WRONG)


@pytest.mark.parametrize(
    ("block", "unlike", "pairs", "wrong"),
    [
        ((0, 32), False, 0b11, 64),  # layer 1 lost the other block
        ((0, 32), True, 0b11, 64),
        ((32, 64), False, 0b11, 32),  # it holds another prompt's KV, but for what did not come
        ((32, 64), False, 0b01, 32),  # it is known to differ in layer 0
        ((32, 64), True, 0b11, 0),  # all that is known is explained by what did not come
    ],
)
def test_wrong_kv_in_a_load_that_lost_a_layer_counts_as_wrong(
    block: tuple[int, int], unlike: bool, pairs: int, wrong: int
) -> None:
    """Everything that was wrong in it was dropped, and counted as loaded."""
    missing = signs([(32, 64)], Sign(By.SLOT, LoadEnd.PARTLY))
    gathered = Gathered({InPair((), True): 0b01, InPair(missing, True): 0b10})
    found = Wrong(*block, pairs, "why", of=0b11, unlike=unlike)
    engine = Engine(0, 1, "engine core", facts.EngineFact(block_size=32), None, pairs=2)
    judged = judge((0, 64), gathered, LoadContents([found]), engine)
    ends: Counter[LoadEnd] = Counter()
    for parts, of in judged.lost.items():
        for start, end, ended in parts:
            ends[ended] += (end - start) * of.bit_count()
    assert ends[LoadEnd.WRONG] == wrong
    assert ends[LoadEnd.PARTLY] == 32 and ends.total() == 32 + wrong


# --- what the report says ----------------------------------------------------------------------------


def test_equal_blocks_are_ruled_out_with_how_many(tmp_path: Path) -> None:
    said = diagnose(Cache(tmp_path).computes("a", [5, 6, 7, 8]).loads("b", [5, 6, 7, 9]).run())
    (line,) = (one for one in said.ruled_out if one.id == "kv-verified")
    assert "all 3 loaded blocks" in line.evidence and "96 of 96 accepted tokens" in line.evidence
    assert "kv-load-wrong" not in {one.id for one in said.findings}


def test_wrong_blocks_are_a_fault_with_whose_they_are(tmp_path: Path) -> None:
    said = diagnose(Cache(tmp_path).computes("a", [5, 6, 7, 8]).loads("b", [5, 5, 7, 9]).run())
    (fault,) = (one for one in said.findings if one.id == "kv-load-wrong")
    assert fault.tokens == BLOCK and fault.grade is Grade.PROVED
    assert any("tokens 0-32 of the same prompt" in line for line in fault.evidence)
    assert "kv-verified" not in {one.id for one in said.ruled_out}


@pytest.mark.parametrize(
    ("came", "accounted", "whole"),
    [(8192, 8192, True), (8192, 4096, True), (8192, 0, False), (4096, 0, False)],
)
def test_other_numbers_of_the_same_size_are_said_to_be(
    tmp_path: Path, came: int, accounted: int, whole: bool
) -> None:
    """Fewer bits take fewer bytes, whatever else comes to rest beside them."""
    run = Cache(tmp_path).computes("a", [5, 6, 7, 8]).loads("b", [95, 96, 97, 9]).run()
    outside = (OutsideBytes(1, 8192, came, came, accounted, 64),)
    (found,) = (one for one in diagnose(replace(run, outside=outside)).findings if one.id == "kv-altered")
    assert ("as many bytes came to rest as were read" in found.title) is whole
    assert ("order of dimensions" in found.remedy[0]) is whole


@pytest.mark.parametrize(
    ("comes", "ident"),
    [([95, 96, 97], "kv-altered"), ([95, 6, 97], "kv-altered"), ([95, 5, 97], "kv-load-wrong")],
)
def test_other_numbers_are_a_choice_unless_some_are_others(
    tmp_path: Path, comes: list[int], ident: str
) -> None:
    """Eight bits are meant so, or are not; in one tier of a store, or in all."""
    said = diagnose(Cache(tmp_path).computes("a", [5, 6, 7, 8]).loads("b", [*comes, 9]).run())
    (found,) = (one for one in said.findings if one.id in ("kv-altered", "kv-load-wrong"))
    assert (found.id, found.severity) == (ident, "limit" if ident == "kv-altered" else "fault")


def sketch(signs: int, size: float = 1.0) -> int:
    return signs | round((rows.SIZE_OFFSET + math.log2(size)) * rows.SIZE_STEPS) << rows.SIGNS


EVERY = (1 << rows.SIGNS) - 1
OF_A = [EVERY & int(digit * rows.SIGNS, 16) for digit in "359c"]
"""The signs of four blocks, each of which differs from the next in half of them."""


def _sketched(tmp_path: Path, *loads: Callable[[int], int]) -> Run:
    """Loads of other numbers, each as these change the sketches of what was computed."""
    cache = Cache(tmp_path).computes("a", [5, 6, 7, 8])
    cache.sim.prints("a", [sketch(one) for one in OF_A], kind=Kind.SKETCHES)
    for number, change in enumerate(loads):
        cache.loads(f"b{number}", [95 + 4 * number, 96 + 4 * number, 97 + 4 * number, 9])
        cache.sim.prints(f"b{number}", [change(one) for one in OF_A[:3]], kind=Kind.SKETCHES)
    return cache.run()


@pytest.mark.parametrize(
    ("change", "ident", "words"),
    [
        (lambda signs: sketch(signs ^ 1), "kv-altered", "4 % of the way to KV of other tokens, 1.00 times"),
        (
            lambda signs: sketch(signs ^ EVERY >> 24),
            "kv-load-wrong",
            "no nearer than KV of other tokens",
        ),
        (lambda signs: sketch(signs, 1.1), "kv-altered", "1.10 times as large"),
        (lambda signs: sketch(signs, 0.5), "kv-load-wrong", "0.50 times as large"),
        (lambda signs: sketch(signs ^ EVERY >> 34), "kv-altered", "58 % of the way"),  # of few blocks
    ],
    ids=["rounded", "nothing in common", "a little larger", "half as large", "in between"],
)
def test_numbers_that_were_not_rounded_are_no_choice(
    tmp_path: Path, change: Callable[[int], int], ident: str, words: str
) -> None:
    (found,) = (one for one in diagnose(_sketched(tmp_path, change)).findings if one.id.startswith("kv-"))
    assert (found.id, found.severity) == (ident, "limit" if ident == "kv-altered" else "fault")
    assert any(words in line for line in found.evidence), found.evidence
    assert ("the type and the scale" in found.remedy[0].lower()) is (found.severity == "fault")
    in_part = found.remedy[0].startswith("Where no tier keeps fewer bits: see that all of a block is written")
    assert in_part is (words == "58 % of the way"), "no store of two bits goes so far"


def test_one_wrong_load_leaves_rounded_ones_rounded(tmp_path: Path) -> None:
    run = _sketched(tmp_path, lambda signs: sketch(signs ^ 1), lambda signs: sketch(signs ^ EVERY >> 24))
    assert run.compared == {"altered": 3, "wrong": 3}


@pytest.mark.parametrize(
    ("signs", "blocks", "end"),
    [(1, 3, LoadEnd.ALTERED), (EVERY >> 32, 3, LoadEnd.WRONG), (EVERY >> 42, 1, LoadEnd.WRONG)],
    ids=["rounded", "other KV", "too few signs to tell"],
)
def test_some_layers_of_a_store_may_keep_fewer_bits(
    tmp_path: Path, signs: int, blocks: int, end: LoadEnd
) -> None:
    """Mixed precision: the others come back bit for bit."""
    cache = Cache(tmp_path).computes("a", [5, 6, 7, 8])
    cache.sim.prints("a", [sketch(one) for one in OF_A], kind=Kind.SKETCHES)
    cache.sim.of_layers("a", [[50, 51], [60, 61], [70, 71], [80, 81]])
    cache.loads("b", [95, 96, 97, 9][-1 - blocks :], blocks=blocks, tokens=A[: blocks + 1])
    cache.sim.prints("b", [sketch(one ^ signs) for one in OF_A[:blocks]], kind=Kind.SKETCHES)
    cache.sim.of_layers("b", [[50, 99], [60, 98], [70, 97]][:blocks])
    run = cache.run()
    assert run.loads.accounts.get(end) == blocks * BLOCK


def test_several_loads_are_too_far_together(tmp_path: Path) -> None:
    """What one alone shows with too few signs."""
    between = [lambda signs: sketch(signs ^ EVERY >> 34)] * 4
    assert _sketched(tmp_path, *between).compared == {"wrong": 12}


def test_what_was_stored_too_early_comes_back_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-computed blocks came back as they were stored: that was a choice of its own, and the blocks beside
    them had "not been compared"."""
    run = Cache(tmp_path).computes("a", [5, 6, 7, 8]).loads("b", [95, 6, 97, 9]).run()
    (verified,) = (one for one in diagnose(run).ruled_out if one.id == "kv-verified")
    assert verified.evidence.startswith("1 of 3 loaded blocks hold exactly")
    assert "(32 of 96 accepted tokens in all layers and ranks)" in verified.evidence
    read_early = {"kv-stale": 16}
    monkeypatch.setattr(Case, "affected", lambda case, cause: [cause] if cause.id in read_early else [])
    monkeypatch.setattr(Case, "tokens", lambda case, cause: read_early.get(cause.id, 0))
    for early, mend in ((16, True), (15, False)):  # of 64
        read_early["kv-stale"] = early
        (found,) = kv_altered.rule(make_case(run))
        assert found.remedy[0].startswith("Mend kv-stale first") is mend
        assert found.title.endswith("Is that meant?") is not mend


@pytest.mark.parametrize("right", ["a load from the first token", "a load behind a hit"])
def test_where_loads_began_tells_the_wrong_from_the_right(tmp_path: Path, right: str) -> None:
    cache = Cache(tmp_path).computes("a", [5, 6, 7, 8])
    load = cache.loads if right == "a load from the first token" else cache.loads_behind
    for request in ("b", "e", "f"):
        load(request, [5, 6, 7, 8])
    run = cache.loads_behind("c", [5, 7, 6, 8]).loads_behind("d", [5, 7, 6, 8]).run()
    first = diagnose(run).findings[0]
    said = first.evidence[0] == (
        "begun behind a hit in the GPU's own prefix cache: all 2 of these, none of the 3 others that came "
        "whole"
    )
    asked = first.remedy[0].startswith("See whether start_load_kv, or the metadata, counts from the first")
    assert first.id == "kv-load-wrong" and said == asked == (right == "a load from the first token")


def test_requests_whose_loads_came_wrong_stand_first(tmp_path: Path) -> None:
    run = Cache(tmp_path).computes("a", [5, 6, 7, 8]).loads("b", [5, 99, 7, 8]).run()
    assert [one.request.id for one in diagnose(run).requests] == ["b", "a"]


def test_where_nothing_was_compared_it_says_so(tmp_path: Path) -> None:
    said = diagnose(Cache(tmp_path).loads("b", [5, 6, 7, 9]).run())
    assert {"kv-load-wrong"} <= {one.id for one in said.not_observed}
    assert not {"kv-load-wrong", "kv-verified"} & {one.id for one in (*said.findings, *said.ruled_out)}


# --- where KV came from -----------------------------------------------------------------------------


def request(*chunks: tuple[int, int, int], **more: int) -> Request:
    computed = tuple(Computed(step, step, start, end) for step, start, end in chunks)
    return Request("r", 1, 128, 128, 0, chunks=computed, **more)  # type: ignore[arg-type]


def test_the_origin_of_a_block() -> None:
    load = (32, 72)
    one = request((3, 72, 96), (4, 96, 128))
    seen = [origin_of(one, load, (at, at + 32), 3) for at in (0, 32, 64, 96)]
    assert seen == [Origin.OTHER, Origin.LOADED, Origin.OTHER, Origin.OTHER]
    assert origin_of(one, load, (96, 128), 4) is Origin.COMPUTED
    assert origin_of(request((3, 0, 64), (5, 0, 64), preemptions=1, preempt_step=4), None, (0, 32), 5) is (
        Origin.OTHER
    )


@given(
    st.lists(st.integers(2, 6), min_size=4, max_size=4), st.lists(st.integers(2, 6), min_size=4, max_size=4)
)
def test_the_books_balance_and_a_loaded_block_is_judged_once(
    tmp_path_factory: object, first: list[int], second: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("run")  # type: ignore[attr-defined]
    run = Cache(folder).computes("a", first).loads("b", second).run()
    assert sum(run.compared.values()) == 3
    assert lost(run) == run.compared.get("wrong", 0) * BLOCK
    assert proved(run, LOADED) == run.compared.get("equal", 0) * BLOCK
