"""Whose tokens the slots were that a worker touched: sets of slots, block tables, and the time of a read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from synth import WATCHED, Chunk, Entry, Fate, Prompt, Sim

from kvtrace.ledger.requests import collect
from kvtrace.ledger.scan import scan
from kvtrace.ledger.slots.accounts import Accounts
from kvtrace.ledger.slots.reads import Slots, Touch
from kvtrace.ledger.slots.resolve import given_blocks, slots_of
from kvtrace.ledger.slots.sets import SlotSet, parse
from kvtrace.ledger.slots.touches import touches, was_read, was_written
from kvtrace.ledger.topology import topology
from kvtrace.trace import hooks
from kvtrace.trace.format import Fact, Flag, Kind, Role, pack_head
from kvtrace.trace.reader import spool_paths
from kvtrace.trace.run_file import read_run_file

FIRST, RESUMED, SHARED = int(Flag.FIRST), int(Flag.FIRST | Flag.RESUMED), int(Flag.SHARED)
STORE, LOAD = int(Flag.STORE), int(Flag.LOAD)

Parts = tuple[tuple[int, int], ...]


def cache(tmp_path: Path, **more: object) -> Sim:
    """An engine of one layer, with blocks of 4 tokens."""
    return Sim(tmp_path, **{"layers": 1, "block": 4, "kv_blocks": 64, **more})  # type: ignore[arg-type]


def resolved(sim: Sim) -> tuple[Slots, list[str]]:
    """What a worker touched, and the ids of the requests by row."""
    sim.write()
    scans = [scan(path) for path in spool_paths(sim.dir)]
    engine = topology(scans, read_run_file(sim.dir)[0]).engines[0]
    found = collect(scans, {engine.tag}).requests
    worker = engine.workers[0]
    spool = next(one for one in scans if one.name == worker.spool)
    given = given_blocks(scans, found).get(engine.tag, [])
    slots = slots_of(engine, worker, touches(spool, worker), given, dict(enumerate(found)), Accounts())
    return slots, [request.id for request in found]


def owners(sim: Sim) -> dict[str, list[Touch]]:
    """What was read, by request."""
    slots, ids = resolved(sim)
    return {ids[row]: list(reads) for row, reads in slots.reads.items()}


def positions(sim: Sim) -> dict[str, list[Parts]]:
    """... the computed ones of each read."""
    return {request: [touch.positions for touch in reads] for request, reads in owners(sim).items()}


def only(sim: Sim, request: str = "a") -> tuple[Parts, Parts]:
    """Positions of the one read of one request that had been computed, and that had not."""
    (touch,) = owners(sim)[request]
    return touch.positions, touch.stale


def compute(sim: Sim, request: str, start: int, end: int, first: bool | None = None) -> int:
    """A step with one chunk of a request."""
    if start == 0 and not sim.workers[0].names.get(request):
        sim.arrive(Prompt(request, end))
    chunk = Chunk(request, start, end - start, first=start == 0 if first is None else first)
    return sim.step([chunk], prompts={request: end})


# ------------------------------------------------------------------------------------------ sets


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("1280+128,2048+64", SlotSet(((1280, 1408), (2048, 2112)))),
        ("8+4/16+1", SlotSet(((8, 12),), ((16, 17),))),
        ("/4+4", SlotSet((), ((4, 8),))),
        ("", SlotSet(())),
        ("8+4,x+2,7,-3+1,9+0,+5,1099511627777+1,4+2", SlotSet(((8, 12), (4, 6)))),
    ],
)
def test_a_set_of_slots_is_read_from_its_name(text: str, wanted: SlotSet) -> None:
    assert parse(text) == wanted


def test_slots_touched_in_part_are_not_counted() -> None:
    assert parse("8+4/16+1").slots == 4


# --------------------------------------------------------------------------------- block tables


@pytest.mark.parametrize(
    ("blocks", "touched", "positions"),
    [
        ([7, 3], [*range(12, 16), *range(28, 32)], ((0, 8),)),
        ([9, 8, 7], range(28, 34), ((4, 6), (8, 12))),
    ],
    ids=["in any order", "a falling run"],
)
def test_new_blocks_are_the_tokens_of_their_places(
    tmp_path: Path, blocks: list[int], touched: Sequence[int], positions: Parts
) -> None:
    sim = cache(tmp_path)
    sim.give("a", blocks, flags=FIRST)
    compute(sim, "a", 0, 4 * len(blocks))
    sim.touch({0: touched})
    assert only(sim) == (positions, ())


def test_slots_of_which_a_part_was_read_are_no_tokens(tmp_path: Path) -> None:
    sim = cache(tmp_path)
    compute(sim, "a", 0, 8)
    sim.workers[0].names["4+4"] = sim.workers[0].name("4+2/6+2")
    sim.touch({0: range(4, 8)}, hook="")
    assert only(sim) == (((0, 2),), ())


@pytest.mark.parametrize("asked", [True, False], ids=["by its lookup", "by its first chunk"])
def test_a_hit_of_the_prefix_cache_is_both_requests(tmp_path: Path, asked: bool) -> None:
    sim = cache(tmp_path, prefix_caching=True)
    sim.asks = False
    sim.give("a", [5, 6], flags=FIRST)
    compute(sim, "a", 0, 8)
    sim.arrive(Prompt("b", 8))
    if asked:
        sim.lookup("b", 4, 0, 0)
    sim.give("b", [5, 9], flags=FIRST)
    sim.step([Chunk("b", 4, 4, first=True)], prompts={"b": 8})
    sim.touch({0: range(20, 24)})
    sim.touch({0: range(36, 40)})
    assert positions(sim) == {"a": [((0, 4),)], "b": [((0, 4),), ((4, 8),)]}


def test_a_hit_of_what_the_same_step_computes_is_both_requests(tmp_path: Path) -> None:
    """vLLM admits the second request with a block that the first one is given in that step. Records of those
    who are admitted come first: the block was taken for one that went from the second to the first."""
    sim = cache(tmp_path, prefix_caching=True)
    sim.asks = False
    sim.give("old", [6], flags=FIRST)
    compute(sim, "old", 0, 4)
    sim.give("a", [5], flags=FIRST)
    sim.arrive(Prompt("a", 12))
    sim.step([Chunk("a", 0, 4, first=True)], prompts={"a": 12})
    sim.arrive(Prompt("b", 12))
    sim.lookup("b", 8, 0, 0)
    sim.give("b", [5, 6, 9], flags=FIRST)
    sim.give("a", [6, 7])
    sim.step([Chunk("a", 4, 8), Chunk("b", 8, 4, first=True)], prompts={"a": 12, "b": 12})
    sim.touch({0: range(20, 28)})
    sim.touch({0: range(36, 40)})
    assert positions(sim) == {"a": [((0, 8),)], "b": [((0, 8),), ((8, 12),)]}


def test_blocks_of_a_preempted_request_are_its_own_until_given(tmp_path: Path) -> None:
    sim = cache(tmp_path)
    sim.arrive(Prompt("a", 12))
    sim.give("a", [5, 6], flags=FIRST)
    sim.step([Chunk("a", 0, 8, first=True)], prompts={"a": 12})
    sim.preempt("a", 8)
    sim.step([], tokens=1)
    sim.touch({0: range(20, 28)}, hook="")
    sim.give("a", [11, 12, 13], flags=RESUMED)
    sim.step([Chunk("a", 0, 12, first=True, resumed=True)], prompts={"a": 12})
    sim.touch({0: range(52, 56)})
    assert positions(sim) == {"a": [((0, 8),), ((8, 12),)]}


def test_the_table_before_a_preemption_is_not_filled_after_it(tmp_path: Path) -> None:
    sim = cache(tmp_path)
    sim.arrive(Prompt("a", 8))
    sim.give("a", [5, 6], flags=FIRST)
    sim.step([Chunk("a", 0, 6, first=True)], prompts={"a": 8})
    sim.preempt("a", 6)
    sim.give("a", [11, 12], flags=RESUMED)
    sim.step([Chunk("a", 0, 8, first=True, resumed=True)], prompts={"a": 8})
    sim.touch({0: range(20, 28)}, hook="")
    assert only(sim) == (((0, 6),), ((6, 8),))


def test_a_resumed_request_whose_blocks_the_prefix_cache_gives(tmp_path: Path) -> None:
    sim = cache(tmp_path, prefix_caching=True)
    sim.arrive(Prompt("a", 12))
    sim.give("a", [5, 6], flags=FIRST)
    sim.step([Chunk("a", 0, 8, first=True)], prompts={"a": 12})
    sim.preempt("a", 8)
    sim.lookup("a", 8, 0, 0)
    sim.give("a", [5, 6, 7], flags=RESUMED)
    sim.step([Chunk("a", 8, 4, first=True, resumed=True)], prompts={"a": 12})
    sim.touch({0: range(20, 32)})
    assert only(sim) == (((0, 12),), ())


def test_a_block_given_to_another_group_is_not_the_first_ones(tmp_path: Path) -> None:
    sim = cache(tmp_path, layers=2, groups=[(4, [0]), (4, [1])])
    sim.give("a", [5], 0, FIRST)
    sim.give("a", [6], 1, FIRST)
    compute(sim, "a", 0, 4)
    sim.give("b", [6], 0, FIRST)
    sim.give("b", [5], 1, FIRST)
    compute(sim, "b", 0, 4)
    # The layers lie on the same bytes: both have a record of every read.
    sim.touch({0: range(20, 24), 1: range(20, 24)}, flags=STORE | SHARED)
    slots, ids = resolved(sim)
    assert {
        ids[row]: [(one.columns, one.positions) for one in reads] for row, reads in slots.reads.items()
    } == {"b": [(2, ((0, 4),))]}
    step = sim.step_id
    assert (slots.amount(step, 0).read, slots.amount(step, 1).read) == (0, 4)
    assert not any(one.useless for one in slots.amounts.values())


def test_before_the_forward_a_block_is_no_former_group_s(tmp_path: Path) -> None:
    """A hook for loading reads what it is to fill; the layer of the former group lies on the same bytes."""
    sim = cache(tmp_path, layers=2, groups=[(4, [0]), (4, [1])])
    sim.give("a", [5], 0, FIRST)
    sim.give("a", [6], 1, FIRST)
    compute(sim, "a", 0, 4)
    sim.give("b", [7], 0, FIRST)
    sim.give("b", [5], 1, FIRST)
    step = compute(sim, "b", 0, 4)
    t = sim.hook_t[0, step, "start_load_kv", ""]
    sim.touch({0: range(20, 24), 1: range(20, 24)}, flags=STORE | SHARED, t=t, hook="start_load_kv")
    assert list(owners(sim)) == ["b"]


def test_a_table_said_twice_for_a_load_in_the_background(tmp_path: Path) -> None:
    sim = cache(tmp_path)
    sim.arrive(Prompt("a", 12))
    sim.lookup("a", 0, 8, 8, int(Flag.ASYNC))
    sim.give("a", [5, 6], flags=FIRST)
    sim.step([], tokens=1)
    sim.touch({0: range(20, 28)}, hook="", flags=LOAD)
    sim.give("a", [5, 6, 7], flags=FIRST)
    sim.step([Chunk("a", 8, 4, first=True)], prompts={"a": 12})
    sim.touch({0: range(20, 32)})
    slots, _ = resolved(sim)
    assert [touch.positions for touch in slots.writes[0]] == [((0, 8),)]
    assert [(touch.positions, touch.stale) for touch in slots.reads[0]] == [(((0, 12),), ())]


def test_an_id_that_is_used_again_is_the_later_request(tmp_path: Path) -> None:
    sim = cache(tmp_path)
    sim.give("a", [5], flags=FIRST)
    compute(sim, "a", 0, 4)
    sim.finish("a", 4)
    sim.arrive(Prompt("a", 4))
    sim.give("a", [8], flags=FIRST)
    sim.step([Chunk("a", 0, 4, first=True)], prompts={"a": 4})
    sim.touch({0: range(20, 24)})
    sim.touch({0: range(32, 36)})
    slots, _ = resolved(sim)
    assert {row: [one.positions for one in reads] for row, reads in slots.reads.items()} == {
        0: [((0, 4),)], 1: [((0, 4),)],
    }  # fmt: skip


# ------------------------------------------------------------------------------ the time of a read


def test_a_slot_read_before_the_forward_of_its_step_is_stale(tmp_path: Path) -> None:
    """... and belongs to no former holder of its block, in the steps after the block's first."""
    sim = cache(tmp_path)
    sim.give("a", [5], flags=FIRST)
    compute(sim, "a", 0, 4)
    sim.give("b", [5], flags=FIRST)
    sim.arrive(Prompt("b", 4))
    sim.step([Chunk("b", 0, 2, first=True)], prompts={"b": 4})
    sim.step([Chunk("b", 2, 2)], prompts={"b": 4})
    sim.touch({0: range(20, 24)}, hook="start_load_kv")
    assert {ids: [(one.positions, one.stale) for one in of] for ids, of in owners(sim).items()} == {
        "b": [(((0, 2),), ((2, 4),))]
    }


def test_without_a_body_the_wait_for_a_layer_tells_its_time(tmp_path: Path) -> None:
    sim = cache(tmp_path, layers=2)
    sim.workers[0].fact(Fact.TARGET, {"id": "attention-decorator", "status": "late"})
    unseen = Fate(dead_pairs=frozenset({(0, 0), (0, 1)}))
    step = sim.one_step("a", 4, ends=False, fate=unseen)
    for layer in sim.layer_names:
        sim.hook(0, "wait_for_layer_load", step, layer)
        sim.hook(0, "save_kv_layer", step, layer)
    sim.read("a", 0, 4, t=sim.hook_t[0, step, "bind_connector_metadata", ""], hook="bind_connector_metadata")
    sim.read("a", 0, 4, t=sim.hook_t[0, step, "save_kv_layer", sim.layer_names[0]])
    early, in_time = owners(sim)["a"]
    assert (early.columns, early.positions, early.stale) == (3, (), ((0, 4),))
    assert (in_time.columns, in_time.positions, in_time.stale) == (1, ((0, 4),), ())


def test_decode_tokens_after_a_preemption_are_computed_again(tmp_path: Path) -> None:
    sim = cache(tmp_path)
    compute(sim, "a", 0, 4)
    sim.grow("a", 8)
    for _ in range(3):
        sim.step([], tokens=1)
    sim.preempt("a", 7)
    sim.give("a", [11, 12, 13], flags=RESUMED)
    sim.step([Chunk("a", 0, 4, first=True, resumed=True)], tokens=8, prompts={"a": 4})
    sim.step([], tokens=1)
    sim.touch({0: range(44, 56)})
    sim.finish("a", 9, 6)
    assert only(sim) == (((0, 9),), ((9, 12),))


def test_background_work_before_the_forward_reads_the_former(tmp_path: Path) -> None:
    """A block goes to another request; a thread reads it before that one's forward."""
    sim = cache(tmp_path)
    sim.give("a", [5, 6], flags=FIRST)
    sim.one_step("a", 8, [Entry("a", 4, start=0)])
    sim.give("b", [6], flags=FIRST)
    step = sim.one_step("b", 4, [Entry("a", 4, start=4)], ends=False)
    sim.touch({0: range(24, 28)}, hook="", step=step, t=sim.hook_t[0, step, "start_load_kv", ""])
    (read,) = owners(sim)["a"]
    assert list(owners(sim)) == ["a"] and (read.positions, read.stale) == (((4, 8),), ())


def test_slots_that_hold_nobodys_tokens(tmp_path: Path) -> None:
    sim = cache(tmp_path)
    sim.give("a", [5], flags=FIRST)
    step = compute(sim, "a", 0, 4)
    sim.touch({0: range(20, 32)})
    slots, _ = resolved(sim)
    assert [touch.positions for touch in slots.reads[0]] == [((0, 4),)]
    assert slots.amounts[step, 0][:2] == (12, 8)


# -------------------------------------------------------------------------- what was read or written


@pytest.mark.parametrize(
    ("hook", "flags", "read", "written"),
    [
        ("save_kv_layer", STORE, True, False),
        ("start_load_kv", LOAD, False, True),
        ("start_load_kv", STORE, True, False),
        # Given out by address: what the hook is for decides, of background work either may be.
        ("save_kv_layer", WATCHED, True, False),
        ("start_load_kv", WATCHED, False, True),
        ("", WATCHED, True, True),
    ],
)
def test_what_was_read_and_what_was_written(
    tmp_path: Path, hook: str, flags: int, read: bool, written: bool
) -> None:
    sim = cache(tmp_path)
    compute(sim, "a", 0, 4)
    sim.read("a", 0, 4, hook=hook, flags=flags)
    slots, _ = resolved(sim)
    assert (bool(slots.reads), bool(slots.writes)) == (read, written)


def test_what_a_load_writes_is_for_whom_the_block_was_given_to(tmp_path: Path) -> None:
    sim = cache(tmp_path)
    sim.give("a", [5], flags=FIRST)
    compute(sim, "a", 0, 4)
    sim.arrive(Prompt("b", 8))
    sim.lookup("b", 0, 4, 4)
    sim.give("b", [5, 6], flags=FIRST)
    sim.step([Chunk("b", 4, 4, first=True)], prompts={"b": 8})
    sim.write_kv("b", 0, 4)
    slots, ids = resolved(sim)
    assert {
        ids[row]: [(one.positions, one.late) for one in touched] for row, touched in slots.writes.items()
    } == {"b": [(((0, 4),), False)]}


def test_what_is_written_after_the_attention_is_late(tmp_path: Path) -> None:
    sim = cache(tmp_path, layers=2)
    step = sim.one_step("a", 8, taken=4, ends=False)
    sim.write_kv("a", 0, 4, hook="", t=sim.hook_t[0, step, "save_kv_layer", sim.layer_names[0]])
    slots, _ = resolved(sim)
    assert [(touch.columns, touch.late) for touch in slots.writes[0]] == [(1, True), (2, False)]


def test_a_connector_inside_another_one_counts_once(tmp_path: Path) -> None:
    sim = cache(tmp_path)
    step = compute(sim, "a", 0, 4)
    sim.read("a", 0, 4)
    sim.tag += 1  # another connector's index
    sim.read("a", 0, 4, step=step, t=sim.clock())
    slots, _ = resolved(sim)
    assert slots.amounts[step, 0].read == 4


@pytest.mark.parametrize(
    ("marks", "hook", "read", "written"),
    [
        (Flag.STORE, "start_load_kv", True, False),
        (Flag.LOAD, "save_kv_layer", False, True),
        (Flag.STORE | Flag.LOAD, "save_kv_layer", True, False),
        (Flag.STORE | Flag.LOAD, "start_load_kv", False, True),
        (Flag.STORE | Flag.LOAD, "", True, True),
    ],
)
def test_an_address_was_given_out_for_what_the_hook_is_for(
    marks: int, hook: str, read: bool, written: bool
) -> None:
    head = pack_head(Kind.SLOTS, Role.WORKER, hooks.BY_NAME[hook].code if hook else 0, 0, int(marks))
    assert (bool(was_read(head)), bool(was_written(head))) == (read, written)
    assert was_read(np.array([head])).tolist() == [read]
