"""The picture of a run: the cells say what the ledger and the spools say, and its size is bounded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from synth import Chunk, Entry, Fate, Policy, Prompt, Rounding, Sim, nothing, run_json
from test_linear import SMALL, TIMES, alike, lines_of, watched

from kvtrace.picture import kinds
from kvtrace.picture.bins import MOST_COLUMNS, MOST_NUMBERS
from kvtrace.picture.draw import draw
from kvtrace.picture.lanes import MOST_LANES
from kvtrace.picture.picture import CellKind, Map, Picture, State
from kvtrace.trace.format import Flag


def look(picture: Picture, one: Map) -> list[str]:
    """Each layer as a word: the letter of each cell's most frequent state."""
    words = []
    for row in (one.rows[at] for at in one.row_of):
        cells = [row[at + 1] for at in range(0, len(row), 2) for _ in range(row[at])]
        words.append("".join(picture.kinds[one.mixes[mix][0]].state.letter for mix in cells))
    return words


def picture_of(sim: Sim, run: Path) -> Picture:
    sim.write()
    run_json(run)
    return draw(run)


def test_saved_and_called_without_work(tmp_path: Path) -> None:
    sim = Sim(tmp_path, layers=3, tp=2)
    sim.serve([Prompt("short", 100, digest=1), Prompt("long", 1024, digest=2)], Rounding(512).policy())
    picture = picture_of(sim, tmp_path)
    (one,) = picture.maps  # both workers look alike
    assert one.workers == ["worker 0", "worker 1"] and len(one.layers) == 3 and one.per == 1
    assert {word.replace("d", "") for word in look(picture, one)} == {"WDD"}
    assert sum(one.prompt) == 1124 and sum(n for _, n in one.counts) == 3 * one.total


def test_a_layer_that_raises_stands_out(tmp_path: Path) -> None:
    sim = Sim(tmp_path, layers=4)
    sim.arrive(Prompt("r", 64, digest=1))
    fate = Fate(raising=frozenset({(0, 1)}))
    sim.step([Chunk("r", 0, 64, first=True)], [Entry("r", 64, 64, 0)], prompts={"r": 64}, fate=fate)
    picture = picture_of(sim, tmp_path)
    words = look(picture, picture.maps[0])
    assert words[0] == "D" and words[1] == "E"


@pytest.mark.parametrize(
    ("fate", "letter", "why"),
    [
        (Fate(unhooked=frozenset({(0, 0)})), "X", "its save hook was not called"),
        (Fate(unbound_ranks=frozenset({0})), "X", "no metadata was bound"),
        (Fate(mode=2, dead_pairs=frozenset({(0, 0)})), "G", ""),
    ],
)
def test_skipped_and_why(tmp_path: Path, fate: Fate, letter: str, why: str) -> None:
    sim = Sim(tmp_path, layers=1)
    sim.arrive(Prompt("r", 64, digest=1))
    sim.step([Chunk("r", 0, 64, first=True)], [Entry("r", 64, 64, 0)], prompts={"r": 64}, fate=fate)
    picture = picture_of(sim, tmp_path)
    assert look(picture, picture.maps[0]) == [letter]
    seen = [picture.kinds[kind] for kind, _ in picture.maps[0].counts]
    assert any(why in kind.why for kind in seen if kind.state.letter == letter)


def test_what_was_read_is_not_called_saved(tmp_path: Path) -> None:
    sim = Sim(tmp_path, layers=1, kv_blocks=40)
    sim.arrive(Prompt("r", 64, digest=1))
    sim.step([Chunk("r", 0, 64, first=True)], [Entry("r", 64, 64, 0)], prompts={"r": 64})
    sim.read("r", 0, 64)
    picture = picture_of(sim, tmp_path)
    assert look(picture, picture.maps[0]) == ["R"]


def run_with_loads(run: Path) -> Sim:
    """Of three layers one is loaded in the first step, and the second step only declares one."""
    sim = Sim(run, layers=3, kv_blocks=40)
    sim.arrive(Prompt("r", 96, digest=1))
    sim.step([Chunk("r", 0, 64, first=True)], prompts={"r": 96})
    sim.write_kv("r", 0, 32, layers=[0])
    step = sim.step([Chunk("r", 64, 96)], prompts={"r": 96})
    sim.hook(0, "start_load_kv", step, "", 32, 1)
    sim.step([], tokens=1)
    return sim


def test_loads_are_a_map_of_their_own_with_the_same_steps(tmp_path: Path) -> None:
    picture = picture_of(run_with_loads(tmp_path), tmp_path)
    saves, loads = picture.maps
    assert (saves.what, loads.what) == ("saves", "loads")
    assert look(picture, loads) == ["Iio", "oio", "oio"]
    assert (saves.first, saves.layers) == (loads.first, loads.layers)
    assert not {"I", "i", "o"} & set("".join(look(picture, saves)))


def test_a_run_that_loads_nothing_has_no_map_of_loads(tmp_path: Path) -> None:
    sim = Sim(tmp_path, layers=2)
    sim.serve([Prompt("r", 64, digest=1)], Rounding(32).policy())
    assert [one.what for one in picture_of(sim, tmp_path).maps] == ["saves"]


def test_dummy_runs_are_not_drawn(tmp_path: Path) -> None:
    sim = Sim(tmp_path, layers=2)
    for _ in range(3):
        sim.step(tokens=8, dummy=True)
    sim.arrive(Prompt("r", 64, digest=1))
    sim.step([Chunk("r", 0, 64, first=True)], [Entry("r", 64, 64, 0)], prompts={"r": 64})
    picture = picture_of(sim, tmp_path)
    (one,) = picture.maps
    assert look(picture, one) == ["D", "D"] and one.total == 1 and one.first == one.last


def test_ranks_that_differ_are_maps_of_their_own(tmp_path: Path) -> None:
    sim = Sim(tmp_path, layers=2, tp=3, live=[True, False, True])
    sim.serve([Prompt("r", 64, digest=1)], Rounding(32).policy())
    picture = picture_of(sim, tmp_path)
    assert sorted(one.workers for one in picture.maps) == [["worker 0", "worker 2"], ["worker 1"]]


def test_lanes_tell_a_request(tmp_path: Path) -> None:
    sim = Sim(tmp_path, layers=2)
    store = Rounding(32).policy()
    sim.serve([Prompt("r", 700, digest=1, output=3)], Policy(store.store, lambda prompt, local: 64))
    picture = picture_of(sim, tmp_path)
    (lane,) = picture.lanes
    assert lane.id == "r" and lane.prompt == 700 and lane.end is not None and lane.begin == 0
    whats = [mark.what for mark in lane.marks]
    assert whats[0] == "arrival" and whats[-1] == "finish" and {"lookup", "load", "save"} <= set(whats)
    assert lane.bars and lane.bars[0].start == 64 and lane.bars[-1].end == 700
    assert all(bar.t0 < bar.t1 <= lane.end for bar in lane.bars)


def test_a_long_run_is_a_small_picture(tmp_path: Path) -> None:
    """Cells become wider, lanes are chosen; every layer-step is still counted."""
    sim = Sim(tmp_path, layers=2)
    for number in range(1300):
        store = Rounding(32).policy() if number % 5 else Policy(nothing)
        sim.serve([Prompt(f"r{number}", 64, digest=number + 1, output=1)], store)
    picture = picture_of(sim, tmp_path)
    (one,) = picture.maps
    assert len(one.first) <= MOST_COLUMNS and one.per > 1 and one.total >= 1300
    assert sum(n for _, n in one.counts) == 2 * one.total
    assert sum(map(len, one.rows)) + sum(map(len, one.mixes)) <= MOST_NUMBERS
    assert len(picture.lanes) == MOST_LANES and picture.requests == 1300
    assert len(json.dumps(picture.document())) < 300_000
    # no cell has one state alone: its share of steps without work is there
    without = [
        mix for mix in one.mixes if any(picture.kinds[kind].state is State.NO_WORK for kind in mix[::2])
    ]
    assert without and all(sum(mix[1::2]) <= one.per for mix in one.mixes)


def test_saved_beside_lost_tokens() -> None:
    saved, read, none = CellKind(State.SAVED), CellKind(State.READ), CellKind(State.NO_WORK)
    lost = CellKind(State.LOST, "it never left the connector")
    assert kinds.worse(saved, read) == kinds.worse(read, saved) == read
    assert kinds.worse(saved, none) == kinds.worse(none, CellKind(State.PARTLY)) == CellKind(State.PARTLY)
    assert kinds.worse(lost, saved) == kinds.worse(none, lost) == lost
    for one in kinds.KINDS:
        for other in kinds.KINDS:
            assert kinds.worse(one, other) in kinds.KINDS


def test_every_state_has_a_letter_of_its_own() -> None:
    assert len({state.letter for state in State}) == len(State)


def test_a_flag_of_a_step_that_is_nowhere_is_left_out(tmp_path: Path) -> None:
    """A damaged record may name any step: the picture does not grow to it."""
    sim = Sim(tmp_path, layers=1)
    sim.serve([Prompt("r", 64, digest=1)], Rounding(32).policy())
    before = sim.n
    sim.n = 2_000_000_000
    sim.hook(0, "save_kv_layer", sim.step_id, sim.layer_names[0], 32, 1, int(Flag.RAISED))
    sim.n = before
    picture = picture_of(sim, tmp_path)
    assert len(picture.maps[0].first) < 10


def test_tokens_that_are_computed_again_are_no_loss(tmp_path: Path) -> None:
    """Preempted twice: the ledger counts a token where it was computed first; the step in between is neither
    decode nor a loss."""
    sim = Sim(tmp_path, layers=1)
    sim.arrive(Prompt("r", 128, digest=1))
    sim.step([Chunk("r", 0, 64, first=True)], prompts={"r": 128})
    sim.preempt("r", 64)
    sim.step([Chunk("r", 0, 64, resumed=True)], prompts={"r": 128})
    sim.preempt("r", 64)
    sim.step([Chunk("r", 0, 128, resumed=True)], [Entry("r", 128, 128, 0)], prompts={"r": 128})
    sim.finish("r", 130, 3)
    picture = picture_of(sim, tmp_path)
    (one,), (lane,) = picture.maps, picture.lanes
    assert one.prompt == [64, 64, 128] and [bar.end for bar in lane.bars] == [64, 64, 128]
    assert look(picture, one) == ["DdD"]
    assert picture.kinds[lane.bars[1].kind] == kinds.AGAIN


@pytest.mark.parametrize("kind", [alike, watched])
def test_the_work_grows_with_the_run_and_not_with_its_square(
    kind: Callable[[Path, int], None], tmp_path: Path
) -> None:
    """Counted by lines that run, not by a clock."""
    counts = []
    for n in (SMALL, SMALL * TIMES):
        run = tmp_path / str(n)
        kind(run, n)
        run_json(run)
        counts.append(sum(lines_of(lambda run=run: draw(run)).values()))  # type: ignore[misc]
    assert counts[1] < 1.2 * TIMES * counts[0]
