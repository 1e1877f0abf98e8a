"""Which tokens of a load came, by the slots that were written: outcome, end and grade in both ledgers."""

from __future__ import annotations

from pathlib import Path

import pytest
from synth import WATCHED, Chunk, Entry, Fate, Prompt, Sim
from test_positions import BLOCK, SAVED, Fates, alike, by_pair, cache, checked

from kvtrace.ledger.ends import LoadEnd
from kvtrace.terms import Grade
from kvtrace.trace.facts import Limit
from kvtrace.trace.format import Fact as FactCode
from kvtrace.trace.format import Flag, Kind, Role, pack_head

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


def test_all_slots_of_a_load_were_written(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    load(sim)
    sim.write_kv("a", 0, 48)
    sim.finish("a", 64)
    assert alike(sim) == {(0, 48): LOADED, (48, 64): REST}
    assert checked(sim).loads.grades[LoadEnd.LOADED] == {Grade.READ: 96}


def test_a_part_of_the_slots_was_written(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    load(sim)
    sim.write_kv("a", 0, 16)
    sim.write_kv("a", 32, 48)
    sim.finish("a", 64)
    assert alike(sim) == {
        (0, 16): LOADED, (16, 32): "load PARTLY READ", (32, 48): LOADED, (48, 64): REST,
    }  # fmt: skip
    assert arrived(sim) == {"LOADED": 64, "PARTLY": 32}


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


def test_none_of_the_slots_was_written(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    witness(sim)
    load(sim)
    sim.finish("a", 64)
    assert alike(sim) == {(0, 48): "load NOT_WRITTEN READ", (48, 64): REST}
    assert arrived(sim) == {"NOT_WRITTEN": 96}


def test_a_load_that_reads_its_slots_without_a_write_is_a_copy(tmp_path: Path) -> None:
    """... whether or not any write of this connector was ever seen; its reads are no stores."""
    sim = loading(tmp_path)
    load(sim)
    sim.read("a", 0, 48, hook="start_load_kv")
    sim.finish("a", 64)
    assert alike(sim) == {(0, 48): "load NOT_WRITTEN READ", (48, 64): REST}
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


def test_a_load_that_reads_and_writes_its_slots_loaded_them(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    load(sim)
    sim.read("a", 0, 48, hook="start_load_kv")
    sim.write_kv("a", 0, 48)
    sim.finish("a", 64)
    assert arrived(sim) == {"LOADED": 96}


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
    sim.touch({0: slots, 1: slots}, hook="", step=asked, flags=LOAD)
    sim.finish("b", 64)
    assert arrived(sim) == {"USED_BEFORE": 96}
    assert arrived(sim, "b") == {"LOADED": 96}


def test_other_slots_were_written(tmp_path: Path) -> None:
    """What is written into the other request's blocks is not this one's."""
    sim = loading(tmp_path)
    witness(sim)
    load(sim)
    sim.write_kv("w", 0, 48)
    sim.finish("a", 64)
    assert alike(sim) == {(0, 48): "load NOT_WRITTEN READ", (48, 64): REST}


def test_every_block_of_a_load_went_into_the_first_one(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    witness(sim)
    load(sim)
    for _ in range(3):
        sim.write_kv("a", 0, BLOCK)
    sim.finish("a", 64)
    assert alike(sim) == {(0, 16): LOADED, (16, 48): "load PARTLY READ", (48, 64): REST}


def test_one_layer_of_a_load_was_not_written(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    witness(sim)
    load(sim)
    sim.write_kv("a", 0, 48, layers=[0])
    sim.finish("a", 64)
    first, second = by_pair(sim)
    assert first == {(0, 48): LOADED, (48, 64): REST}
    assert second == {(0, 48): "load NOT_WRITTEN READ", (48, 64): REST}


def test_one_rank_of_a_load_was_not_written(tmp_path: Path) -> None:
    sim = loading(tmp_path, tp=2)
    witness(sim)
    sim.write_kv("w", 0, 48, rank=1)
    load(sim)
    sim.write_kv("a", 0, 48, rank=0)
    sim.finish("a", 64)
    there: Fates = {(0, 48): LOADED, (48, 64): REST}
    missing: Fates = {(0, 48): "load NOT_WRITTEN READ", (48, 64): REST}
    assert by_pair(sim) == [there, there, missing, missing]


def test_slots_that_were_written_after_the_attention(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    load(sim)
    sim.write_kv("a", 0, 16)
    sim.write_kv("a", 16, 48, hook="")
    sim.finish("a", 64)
    assert alike(sim) == {(0, 16): LOADED, (16, 48): "load USED_BEFORE READ", (48, 64): REST}


@pytest.mark.parametrize("flags", [LOAD, LOAD | ASYNC])
@pytest.mark.parametrize("late", [True, False])
def test_what_may_have_been_written_out_of_sight_is_not_missing(
    tmp_path: Path, flags: int, late: bool
) -> None:
    """... nor late, where it is written once more."""
    sim = loading(tmp_path)
    witness(sim)
    step = load(sim)
    sim.workers[0].names["0+1"] = 0  # which slots is not known
    before = sim.hook_t[0, step, "start_load_kv", ""]
    sim.touch({0: [0], 1: [0]}, hook="", step=step, flags=flags, t=before)
    if late:
        sim.write_kv("a", 0, 48, hook="", step=step)
    sim.finish("a", 64)
    assert alike(sim)[0, 48] in (LOADED, "loaded DECLARED")


def test_a_way_without_a_record_may_have_loaded_the_missing(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    witness(sim)
    load(sim)
    sim.workers[0].fact(FactCode.WATCH_LIMITS, {"connector": 1, "kind": Limit.THREAD.value, "hook": ""})
    sim.finish("a", 64)
    assert alike(sim)[0, 48] == "loaded DECLARED"


def test_slots_that_were_written_in_a_later_step(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    load(sim)
    step = sim.step([], tokens=1)
    sim.write_kv("a", 0, 48, hook="", t=sim.hook_t[0, step, "start_load_kv", ""])
    sim.finish("a", 65, 2)
    assert alike(sim)[0, 48] == "load USED_BEFORE READ"


def test_slots_written_in_the_background_before_the_attention(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    step = load(sim)
    sim.write_kv("a", 0, 48, hook="", t=sim.hook_t[0, step, "start_load_kv", ""])
    sim.finish("a", 64)
    assert alike(sim) == {(0, 48): LOADED, (48, 64): REST}


def test_slots_that_were_written_as_each_layer_was_waited_for(tmp_path: Path) -> None:
    sim = cache(tmp_path)
    load(sim)
    sim.write_kv("a", 0, 48, hook="wait_for_layer_load")
    sim.finish("a", 64)
    assert alike(sim) == {(0, 48): LOADED, (48, 64): REST}


def test_memory_that_was_given_out_by_address_in_a_load_hook(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    load(sim)
    sim.write_kv("a", 0, 48, flags=WATCHED)
    sim.finish("a", 64)
    assert alike(sim) == {(0, 48): LOADED, (48, 64): REST}


@pytest.mark.parametrize("writes", [False, True])
def test_a_load_step_that_was_not_watched_is_taken_as_declared(tmp_path: Path, writes: bool) -> None:
    sim = loading(tmp_path)
    if writes:
        witness(sim)
    sim.watching = int(Flag.STORE)
    load(sim)
    sim.finish("a", 64)
    assert alike(sim) == {(0, 48): "loaded DECLARED", (48, 64): REST}
    assert arrived(sim) == {"LOADED": 96}


def test_a_connector_without_a_seen_write_is_as_declared(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    load(sim)
    sim.finish("a", 64)
    assert alike(sim)[0, 48] == "loaded DECLARED"


def test_a_load_hook_that_raised_after_it_wrote(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    step = load(sim)
    sim.write_kv("a", 0, 48)
    sim.hook(0, "start_load_kv", step, flags=int(Flag.RAISED))
    sim.finish("a", 64)
    assert alike(sim)[0, 48] == "load FAILED READ"


def test_what_was_loaded_and_read_again_to_be_stored(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    load(sim)
    sim.write_kv("a", 0, 48)
    sim.read("a", 0, 64)
    sim.finish("a", 64)
    assert alike(sim) == {(0, 48): LOADED, (48, 64): SAVED}


# ----------------------------------------------------------------------------- in the background


def in_background(sim: Sim, request: str = "a", tokens: int = 48) -> int:
    """A load that is begun two steps before its request is scheduled; its step."""
    sim.arrive(Prompt(request, 64))
    sim.lookup(request, 0, tokens, tokens, ASYNC)
    sim.grow(request, tokens)
    return sim.step([], [Entry(request, tokens, tokens, 0, LOAD)], tokens=1)


def scheduled(sim: Sim, request: str = "a", tokens: int = 48, finish: bool = True) -> None:
    head = pack_head(Kind.DONE, Role.SCHEDULER, 0, 0, LOAD)
    sim.scheduler.add(head, sim.clock(), sim.scheduler.name(request), sim.step_id, 0)
    assert sim.blocks is not None
    table = list(sim.blocks.table(request))
    sim.give(request, table, flags=FIRST)  # said once more
    sim.step([Chunk(request, tokens, 64 - tokens, first=True)], prompts={request: 64})
    if finish:
        sim.finish(request, 64)


def test_a_load_in_the_background(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    step = in_background(sim)
    sim.step([], tokens=1)
    sim.write_kv("a", 0, 48, hook="", step=step)
    scheduled(sim)
    assert alike(sim) == {(0, 48): LOADED, (48, 64): REST}
    assert arrived(sim) == {"LOADED": 96}


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


def test_a_load_in_the_background_of_which_a_part_was_written(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    step = in_background(sim)
    sim.step([], tokens=1)
    sim.write_kv("a", 0, 32, hook="", step=step)
    scheduled(sim)
    assert alike(sim) == {(0, 32): LOADED, (32, 48): "load PARTLY READ", (48, 64): REST}
    assert arrived(sim) == {"LOADED": 64, "PARTLY": 32}


def test_a_load_in_the_background_of_which_nothing_was_written(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    witness(sim)
    in_background(sim)
    sim.step([], tokens=1)
    scheduled(sim)
    assert alike(sim) == {(0, 48): "load NOT_WRITTEN READ", (48, 64): REST}


def test_a_background_load_in_steps_that_were_not_watched(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    witness(sim)
    sim.watching = int(Flag.STORE)
    in_background(sim)
    sim.step([], tokens=1)
    scheduled(sim)
    assert alike(sim)[0, 48] == "loaded DECLARED"


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


def test_what_a_window_has_left_is_not_to_be_written(tmp_path: Path) -> None:
    sim = windowed(tmp_path)
    sim.write_kv("a", 0, 48, layers=[0])
    sim.write_kv("a", 32, 48, layers=[1])
    sim.finish("a", 64)
    assert arrived(sim) == {"LOADED": 96}


def test_a_load_behind_its_window_has_nothing_to_write_there(tmp_path: Path) -> None:
    sim = windowed(tmp_path, left=3)
    sim.write_kv("a", 0, 48, layers=[0])
    sim.finish("a", 64)
    assert arrived(sim) == {"LOADED": 96}


def test_what_is_in_a_window_and_not_written_is_missing(tmp_path: Path) -> None:
    sim = windowed(tmp_path)
    sim.write_kv("a", 0, 48, layers=[0])
    sim.finish("a", 64)
    assert arrived(sim) == {"LOADED": 80, "NOT_WRITTEN": 16}


def test_full_attention_has_left_nothing(tmp_path: Path) -> None:
    """Records of its first blocks are missing: that is no window."""
    sim = windowed(tmp_path, kind="FullAttentionSpec")
    sim.write_kv("a", 0, 48, layers=[0])
    sim.write_kv("a", 32, 48, layers=[1])
    sim.finish("a", 64)
    assert arrived(sim) == {"LOADED": 64, "PARTLY": 32}
