"""Which tokens of a load came, by the slots that were written: outcome, end and grade in both ledgers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synth import WATCHED, Chunk, Entry, Fate, Prompt, Sim
from test_positions import BLOCK, SAVED, Fates, alike, by_pair, cache, checked

from kvtrace.ledger import read_run
from kvtrace.ledger.ends import LoadEnd
from kvtrace.terms import NOT_OBSERVED, Grade
from kvtrace.trace.facts import Limit
from kvtrace.trace.format import STEP_SHIFT, Flag
from kvtrace.trace.format import Fact as FactCode

LOAD, ASYNC, FIRST = int(Flag.LOAD), int(Flag.ASYNC), int(Flag.FIRST)
LOADED, REST = "loaded READ", "NOT_DECLARED DECLARED"
"""No store of this connector was ever seen: that it names none is all that is known."""


def loading(tmp_path: Path, **more: object) -> Sim:
    """A connector that loads in start_load_kv alone."""
    return cache(tmp_path, noop=("wait_for_layer_load",), **more)


def load(sim: Sim, request: str = "a", tokens: int = 48, fate: Fate | None = None) -> int:
    """A step that loads so many tokens of a prompt of 64, and computes the rest."""
    sim.arrive(Prompt(request, 64))
    sim.lookup(request, 0, tokens, tokens)
    chunk = Chunk(request, tokens, 64 - tokens, first=True)
    entries = [Entry(request, tokens, tokens, 0, LOAD)]
    return sim.step([chunk], entries, prompts={request: 64}, fate=fate or Fate())


def witness(sim: Sim) -> None:
    """Another request, loaded as it should be: this connector writes where it can be seen."""
    load(sim, "w")
    sim.write_kv("w", 0, 48)
    sim.finish("w", 64)


def arrived(sim: Sim, request: str = "a") -> dict[str, int]:
    """The request's account of the load, in token-layers, with the grades of the run's."""
    run = checked(sim)
    (of,) = [one for one in run.load_rows if one.id == request]
    return {end.name: amount for end, amount in of.ends.items() if end != LoadEnd.MISSED}


Work = Callable[[Sim], None]
NOT_WRITTEN, PARTLY, USED_BEFORE = "load NOT_WRITTEN READ", "load PARTLY READ", "load USED_BEFORE READ"
TAKEN = "loaded DECLARED"


def written(start: int, end: int, request: str = "a", **more: Any) -> Work:
    return lambda sim: sim.write_kv(request, start, end, **more)


def before_the_forward(sim: Sim) -> None:
    sim.write_kv("a", 0, 48, hook="", t=sim.hook_t[0, sim.step_id, "start_load_kv", ""])


@pytest.mark.parametrize(
    ("work", "fates", "amounts"),
    [
        ([written(0, 48)], {(0, 48): LOADED}, {"LOADED": 96}),
        (
            [written(0, 16), written(32, 48)], {(0, 16): LOADED, (16, 32): PARTLY, (32, 48): LOADED},
            {"LOADED": 64, "PARTLY": 32},
        ),
        ([written(0, 48, flags=WATCHED)], {(0, 48): LOADED}, {"LOADED": 96}),
        ([before_the_forward], {(0, 48): LOADED}, {"LOADED": 96}),
        (
            [written(0, 16), written(16, 48, hook="")], {(0, 16): LOADED, (16, 48): USED_BEFORE},
            {"LOADED": 32, "USED_BEFORE": 64},
        ),
        ([], {(0, 48): TAKEN}, {"LOADED": 96}),
    ],
    ids=[
        "all of it", "a part", "memory given out by address in a load hook",
        "in the background before the attention", "partly after the attention", "no write was ever seen",
    ],
)  # fmt: skip
def test_what_of_a_load_was_written_in_time_is_loaded(
    tmp_path: Path, work: list[Work], fates: Fates, amounts: dict[str, int]
) -> None:
    sim = loading(tmp_path)
    load(sim)
    for one in work:
        one(sim)
    sim.finish("a", 64)
    assert alike(sim) == {**fates, (48, 64): REST}
    assert arrived(sim) == amounts
    if fates == {(0, 48): LOADED}:
        assert checked(sim).loads.grades[LoadEnd.LOADED] == {Grade.READ: 96}


@pytest.mark.parametrize(
    ("watching", "work", "fates"),
    [
        (WATCHED, [], [{(0, 48): NOT_WRITTEN}] * 2),
        # What is written into another request's blocks is not this one's.
        (WATCHED, [written(0, 48, "w")], [{(0, 48): NOT_WRITTEN}] * 2),
        (WATCHED, [written(0, BLOCK)] * 3, [{(0, 16): LOADED, (16, 48): PARTLY}] * 2),
        (WATCHED, [written(0, 48, layers=[0])], [{(0, 48): LOADED}, {(0, 48): NOT_WRITTEN}]),
        (int(Flag.STORE), [], [{(0, 48): TAKEN}] * 2),
    ],
    ids=["nothing", "other slots", "every block into the first one", "one layer", "not watched"],
)
def test_what_a_connector_that_writes_in_sight_left_out(
    tmp_path: Path, watching: int, work: list[Work], fates: list[Fates]
) -> None:
    sim = loading(tmp_path)
    witness(sim)
    sim.watching = watching
    load(sim)
    for one in work:
        one(sim)
    sim.finish("a", 64)
    assert by_pair(sim) == [{**of_layer, (48, 64): REST} for of_layer in fates]


def test_slots_that_were_written_as_each_layer_was_waited_for(tmp_path: Path) -> None:
    sim = cache(tmp_path)
    load(sim)
    sim.write_kv("a", 0, 48, hook="wait_for_layer_load")
    sim.finish("a", 64)
    assert alike(sim) == {(0, 48): LOADED, (48, 64): REST}


def test_what_was_loaded_and_read_again_to_be_stored(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    load(sim)
    sim.read("a", 0, 48, hook="start_load_kv")
    sim.write_kv("a", 0, 48)
    sim.read("a", 0, 64)
    sim.finish("a", 64)
    assert alike(sim) == {(0, 48): LOADED, (48, 64): SAVED}
    assert arrived(sim) == {"LOADED": 96}


@pytest.mark.parametrize("flags", [0, ASYNC])
def test_what_was_seen_written_is_loaded_whatever_is_named(tmp_path: Path, flags: int) -> None:
    """Of entries that could not all be read, the ones that could name a part."""
    sim = loading(tmp_path)
    sim.arrive(Prompt("a", 64))
    sim.lookup("a", 0, 48, 48, flags)
    entries = [Entry("a", 32, 32, 0, LOAD)]
    if flags:
        sim.grow("a", 48)
        sim.step([], entries, tokens=0)
        sim.write_kv("a", 0, 48)
        sim.step([Chunk("a", 48, 16, first=True)], prompts={"a": 64})
    else:
        sim.step([Chunk("a", 48, 16, first=True)], entries, prompts={"a": 64})
        sim.write_kv("a", 0, 48)
    sim.finish("a", 64)
    assert arrived(sim) == {"LOADED": 96}


def test_a_load_that_reads_its_slots_without_a_write_is_a_copy(tmp_path: Path) -> None:
    """... whether or not any write of this connector was ever seen; its reads are no stores."""
    sim = loading(tmp_path)
    load(sim)
    sim.read("a", 0, 48, hook="start_load_kv")
    sim.finish("a", 64)
    assert alike(sim) == {(0, 48): NOT_WRITTEN, (48, 64): REST}
    assert arrived(sim) == {"NOT_WRITTEN": 96}
    run = checked(sim)
    (of,) = run.load_rows
    (why,) = of.reasons[LoadEnd.NOT_WRITTEN]
    assert "a copy of them" in why
    assert not run.engines[0].store_entries


def test_a_thread_that_reads_what_it_is_to_load_filled_a_copy(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    asked = load(sim)
    before = sim.hook_t[0, asked, "start_load_kv", ""]
    sim.read("a", 0, 48, hook="", step=asked, t=before)
    sim.finish("a", 64)
    assert arrived(sim) == {"NOT_WRITTEN": 96}


@pytest.mark.parametrize(
    ("kind", "hook", "end"),
    [
        (Limit.ADDRESS, "register_kv_caches", "LOADED"),
        (Limit.THREAD, "", "LOADED"),
        (Limit.ADDRESS, "save_kv_layer", "NOT_WRITTEN"),
        (Limit.EXCEPTIONS, "start_load_kv", "NOT_WRITTEN"),
    ],
)
def test_reads_of_a_load_that_may_write_unseen_say_nothing(
    tmp_path: Path, kind: Limit, hook: str, end: str
) -> None:
    sim = loading(tmp_path)
    load(sim)
    sim.read("a", 0, 48, hook="start_load_kv")
    sim.workers[0].fact(FactCode.WATCH_LIMITS, {"connector": 1, "kind": kind.value, "hook": hook})
    sim.finish("a", 64)
    assert arrived(sim) == {end: 96}


def test_slots_written_when_others_had_them_came_too_late(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    witness(sim)
    sim.give("a", [20, 21, 22, 23], flags=FIRST)
    asked = load(sim)
    slots = sim.slots("a", 0, 48)
    sim.finish("a", 64)
    sim.give("b", [20, 21, 22, 23], flags=FIRST)
    load(sim, "b")
    sim.write_kv("b", 0, 48)
    sim.touch_all(slots, hook="", step=asked, flags=LOAD)
    sim.finish("b", 64)
    assert arrived(sim) == {"USED_BEFORE": 96}
    assert arrived(sim, "b") == {"LOADED": 96}


def test_one_rank_of_a_load_was_not_written(tmp_path: Path) -> None:
    sim = loading(tmp_path, tp=2)
    witness(sim)
    sim.write_kv("w", 0, 48, rank=1)
    load(sim)
    sim.write_kv("a", 0, 48, rank=0)
    sim.finish("a", 64)
    there: Fates = {(0, 48): LOADED, (48, 64): REST}
    missing: Fates = {(0, 48): NOT_WRITTEN, (48, 64): REST}
    assert by_pair(sim) == [there, there, missing, missing]


@pytest.mark.parametrize("flags", [LOAD, LOAD | ASYNC])
@pytest.mark.parametrize("late", [True, False])
def test_what_may_have_been_written_out_of_sight_is_not_missing(
    tmp_path: Path, flags: int, late: bool
) -> None:
    """... nor late, where it is written once more."""
    sim = loading(tmp_path)
    witness(sim)
    step = load(sim)
    before = sim.hook_t[0, step, "start_load_kv", ""]
    sim.touch_unknown(hook="", step=step, flags=flags, t=before)
    if late:
        sim.write_kv("a", 0, 48, hook="", step=step)
    sim.finish("a", 64)
    assert alike(sim)[0, 48] in (LOADED, TAKEN)


def test_a_way_without_a_record_may_have_loaded_the_missing(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    witness(sim)
    load(sim)
    sim.workers[0].fact(FactCode.WATCH_LIMITS, {"connector": 1, "kind": Limit.THREAD.value, "hook": ""})
    sim.finish("a", 64)
    assert alike(sim)[0, 48] == TAKEN


def test_slots_that_were_written_in_a_later_step(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    load(sim)
    step = sim.step([], tokens=1)
    sim.write_kv("a", 0, 48, hook="", t=sim.hook_t[0, step, "start_load_kv", ""])
    sim.finish("a", 65, 2)
    assert alike(sim)[0, 48] == USED_BEFORE


def test_a_load_hook_that_raised_after_it_wrote(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    step = load(sim)
    sim.write_kv("a", 0, 48)
    sim.hook(0, "start_load_kv", step, flags=int(Flag.RAISED))
    sim.finish("a", 64)
    assert alike(sim)[0, 48] == "load FAILED READ"


# ----------------------------------------------------------------------------- in the background


def in_background(sim: Sim, request: str = "a", tokens: int = 48) -> int:
    """A load that is begun two steps before its request is scheduled; its step."""
    return sim.load_begins(request, 64, tokens, tokens=1)


def scheduled(sim: Sim, request: str = "a", tokens: int = 48, finish: bool = True) -> None:
    sim.done(request, flags=LOAD)
    assert sim.blocks is not None
    table = list(sim.blocks.table(request))
    sim.give(request, table, flags=FIRST)  # said once more
    sim.step([Chunk(request, tokens, 64 - tokens, first=True)], prompts={request: 64})
    if finish:
        sim.finish(request, 64)


@pytest.mark.parametrize(
    ("seen", "watching", "wrote", "fates", "amounts"),
    [
        (False, WATCHED, 48, {(0, 48): LOADED}, {"LOADED": 96}),
        (False, WATCHED, 32, {(0, 32): LOADED, (32, 48): PARTLY}, {"LOADED": 64, "PARTLY": 32}),
        (True, WATCHED, 0, {(0, 48): NOT_WRITTEN}, {"NOT_WRITTEN": 96}),
        (True, int(Flag.STORE), 0, {(0, 48): TAKEN}, {"LOADED": 96}),
    ],
    ids=["all of it", "a part", "nothing", "in steps that were not watched"],
)
def test_a_load_in_the_background(
    tmp_path: Path, seen: bool, watching: int, wrote: int, fates: Fates, amounts: dict[str, int]
) -> None:
    """``seen``: another load was written where it can be seen."""
    sim = loading(tmp_path)
    if seen:
        witness(sim)
    sim.watching = watching
    step = in_background(sim)
    sim.step([], tokens=1)
    if wrote:
        sim.write_kv("a", 0, wrote, hook="", step=step)
    scheduled(sim)
    assert alike(sim) == {**fates, (48, 64): REST}
    assert arrived(sim) == amounts


def test_a_background_load_reported_as_finished_too_early(tmp_path: Path) -> None:
    """What it wrote at whatever time was taken for loaded, or for KV of somebody else's."""
    sim = loading(tmp_path)
    step = in_background(sim)
    sim.write_kv("a", 0, 16, hook="", step=step)
    scheduled(sim, finish=False)
    sim.step([], tokens=1)
    sim.write_kv("a", 16, 48, hook="", step=sim.step_id)
    sim.finish("a", 64)
    assert arrived(sim) == {"LOADED": 32, "USED_BEFORE": 64}


@pytest.mark.parametrize(
    ("took_ms", "steps", "later_ms", "end"),
    [
        (5, 10, 600, "PENDING"),  # hardly ever asked for
        (700, 120, 600, "NOT_FINISHED"),  # a slow load, asked for a hundred times
        (700, 120, 300, "PENDING"),
        (700, 30, 600, "PENDING"),
    ],
)
def test_a_load_that_was_written_and_asked_for_in_vain(
    tmp_path: Path, took_ms: int, steps: int, later_ms: int, end: str
) -> None:
    sim = loading(tmp_path)
    step = in_background(sim)
    sim.clock(took_ms * 10**6)
    sim.write_kv("a", 0, 48, hook="", step=step)
    for _ in range(steps):
        sim.clock(later_ms * 10**6 // steps)
        sim.step([], tokens=1)
    sim.finish("a", 48, 0, "FINISHED_ABORTED")
    assert arrived(sim) == {end: 96}


@pytest.mark.parametrize(
    ("hooks", "end"), [(["get_finished"], "PENDING"), (["start_load_kv"], "NOT_FINISHED"), ([], "PENDING")]
)
def test_a_load_of_which_no_hook_tells_the_end(tmp_path: Path, hooks: list[str], end: str) -> None:
    sim = loading(tmp_path, connector_facts={"overrides": hooks})
    in_background(sim)
    sim.step([], tokens=1)
    assert arrived(sim) == {end: 96}


LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(2)]


def windowed(tmp_path: Path, kind: str = "SlidingWindowSpec", left: int = 2) -> Sim:
    """Of the second layer the first ``left`` blocks of request a are the null block: its window has left
    them."""
    kinds = [("FullAttentionSpec", LAYERS[:1]), (kind, LAYERS[1:])]
    told = [{"kind": kind, "block_size": BLOCK, "layers": layers} for kind, layers in kinds]
    sim = loading(tmp_path, groups=[(BLOCK, [0]), (BLOCK, [1])], engine_facts={"kv_groups": told})
    witness(sim)
    sim.give("a", [40, 41, 42, 43], 0, FIRST)
    sim.give("a", [*[0] * left, 44, 45, 46, 47][:4], 1, FIRST)
    load(sim)
    return sim


@pytest.mark.parametrize(
    ("kind", "left", "in_window", "amounts"),
    [
        ("SlidingWindowSpec", 2, True, {"LOADED": 96}),
        ("SlidingWindowSpec", 3, False, {"LOADED": 96}),  # all of it lies before the window
        ("SlidingWindowSpec", 2, False, {"LOADED": 80, "NOT_WRITTEN": 16}),
        # Records of its first blocks are missing: that is no window.
        ("FullAttentionSpec", 2, True, {"LOADED": 64, "PARTLY": 32}),
    ],
)
def test_what_a_window_has_left_is_not_to_be_written(
    tmp_path: Path, kind: str, left: int, in_window: bool, amounts: dict[str, int]
) -> None:
    sim = windowed(tmp_path, kind, left)
    sim.write_kv("a", 0, 48, layers=[0])
    if in_window:
        sim.write_kv("a", 32, 48, layers=[1])
    sim.finish("a", 64)
    assert arrived(sim) == amounts


@pytest.mark.parametrize(("engine", "unseen"), [(0, True), (7, True), (8, False)])
def test_an_address_of_one_engines_kv_hides_no_other_engine(
    tmp_path: Path, engine: int, unseen: bool
) -> None:
    """Each engine of a process has a KV cache of its own."""
    sim = Sim(tmp_path, layers=1, tag=7)
    step = engine and engine << STEP_SHIFT | 1
    limit = {"connector": 1, "kind": Limit.ADDRESS.value, "hook": "wait_for_save", "step": step}
    sim.workers[0].fact(FactCode.WATCH_LIMITS, limit)
    sim.arrive(Prompt("a", 64, digest=4))
    sim.lookup("a", 0, 0, 0)
    sim.step([Chunk("a", 0, 64, first=True)], prompts={"a": 64})
    sim.finish("a", 64)
    sim.write()
    run = read_run(tmp_path)
    assert [one.outcome for one in run.base] == [NOT_OBSERVED] * unseen and bool(run.lost) is not unseen
