"""Loads that put a layer's KV into another layer: seen and named, and nothing is said of a model whose layers
hold the same by design."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_contents import BLOCK, Cache, lost, why

from kvtrace.causes import diagnose
from kvtrace.ledger import Run
from kvtrace.ledger.ends import LoadEnd

LAYERS = 4
RIGHT = [[11, 12, 13, 14], [21, 22, 23, 24], [31, 32, 33, 34]]
"""Numbers of the layers of three blocks."""
C = (31, 32, 33, 34)
"""Digests of the beginnings of a prompt that shares no token with any other."""


def cache(folder: Path) -> Cache:
    made = Cache(folder, layers=LAYERS).computes("a", [5, 6, 7, 8])
    made.sim.of_layers("a", RIGHT)
    return made


def loads(made: Cache, prints: list[int], numbers: list[list[int]], *of_whom: tuple[int, ...]) -> Run:
    made.loads("b", prints, *of_whom)
    made.sim.of_layers("b", numbers)
    return made.run()


def wrong(run: Run) -> int:
    return run.loads.accounts.get(LoadEnd.WRONG, 0)


def layers(run: Run) -> list[str]:
    (row,) = (row for row in run.load_rows if LoadEnd.WRONG in row.places)
    return [layer for _, layer in row.places[LoadEnd.WRONG]]


def test_exactly_the_layers_with_wrong_kv_are_named(tmp_path: Path) -> None:
    made = cache(tmp_path)
    run = loads(made, [5, 99, 7], [RIGHT[0], [21, 22, 24, 23], RIGHT[2]])
    (said,) = why(run)
    assert said.startswith("tokens 32-64 are not what they computed to in request a: ")
    assert said.endswith("layers 2, 3 of 4 hold the KV of layers 3, 2")
    assert wrong(run) == 2 * BLOCK and layers(run) == made.sim.layer_names[2:]


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([22, 23, 24, 21], "layers 0, 1, 2, 3 of 4 hold the KV of layers 1, 2, 3, 0"),
        ([21, 22, 99, 24], "layer 2 of 4 differs"),
        ([21, 24, 99, 98], "layer 1 of 4 holds the KV of layer 3, layers 2, 3 of 4 other KV"),
        ([24, 24, 24, 24], "layers 0, 1, 2 of 4 hold the KV of layers 3, 3, 3"),
    ],
)
def test_what_stands_in_the_wrong_layers_is_said(tmp_path: Path, numbers: list[int], said: str) -> None:
    run = loads(cache(tmp_path), [5, 99, 7], [RIGHT[0], numbers, RIGHT[2]])
    assert why(run)[0].endswith(f": {said}")


@pytest.mark.parametrize(
    ("prints", "numbers", "remedy"),
    [
        ([5, 99, 7], [RIGHT[0], [21, 22, 24, 23], RIGHT[2]], "Store and load each layer under its own name"),
        ([5, 7, 6], [], "Check, one by one, which block"),
        ([5, 8, 8], [], "Check, one by one, which block"),
    ],
)
def test_what_the_kv_is_has_its_own_remedy(
    tmp_path: Path, prints: list[int], numbers: list[list[int]], remedy: str
) -> None:
    diagnosis = diagnose(loads(cache(tmp_path), prints, numbers))
    (found,) = (one for one in diagnosis.findings if one.id == "kv-load-wrong")
    assert found.remedy[0].startswith(remedy) and found.remedy[-2].startswith("Check the key")
    assert found.remedy[-1].startswith("Where native code writes"), "no write was watched"


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("measured", [True, False])
def test_a_load_may_be_told_early_where_its_writes_are_unseen(
    tmp_path: Path, measured: bool, asynchronous: bool
) -> None:
    """It was said of loads that were seen to be written in time, with other KV."""
    run = loads(cache(tmp_path), [5, 7, 6], [])
    rows = [replace(one, asynchronous=asynchronous, measured=measured) for one in run.load_rows]
    found = diagnose(replace(run, load_rows=rows)).findings[0]
    early = any(one.startswith("In get_finished, name a load only once") for one in found.remedy)
    assert found.id == "kv-load-wrong" and early == (asynchronous and not measured)


def test_layers_of_another_kv_cache_group_are_named(tmp_path: Path) -> None:
    made = Cache(tmp_path, layers=LAYERS, groups=[(BLOCK, [0, 2]), (BLOCK, [1, 3])])
    made.computes("a", [5, 6, 7, 8])
    made.sim.prints("a", [15, 16, 17, 18], group=1)
    for group in (0, 1):
        made.sim.of_layers("a", [of_block[group::2] for of_block in RIGHT], group=group)
    made.loads("b", [5, 99, 7])
    made.sim.prints("b", [15, 16, 17], group=1)
    made.sim.of_layers("b", [RIGHT[0][::2], RIGHT[1][1::2], RIGHT[2][::2]])
    run = made.run()
    assert why(run)[0].endswith(": layers 0, 2 hold the KV of layers 1, 3")
    assert wrong(run) == 2 * BLOCK and layers(run) == made.sim.layer_names[::2]


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([41, 42, 43, 44], "layers 0, 1, 2, 3 of 4 hold the KV of rank 1"),
        ([21, 22, 43, 44], "layers 2, 3 of 4 hold the KV of rank 1"),
        ([21, 22, 44, 99], "layer 2 of 4 holds the KV of layer 3 of rank 1, layer 3 of 4 other KV"),
    ],
)
def test_kv_of_another_rank_is_named(tmp_path: Path, layers: list[int], said: str) -> None:
    made = Cache(tmp_path, layers=LAYERS, tp=2).computes("a", [5, 6, 7, 8])
    made.sim.of_layers("a", RIGHT)
    made.sim.prints("a", [15, 16, 17, 18], rank=1)
    made.sim.of_layers("a", [[1, 2, 3, 4], [41, 42, 43, 44]], rank=1)
    assert why(loads(made, [5, 99, 7], [RIGHT[0], layers, RIGHT[2]]))[0].endswith(f": {said}")


@pytest.mark.parametrize(
    "numbers",
    [
        [[1, 2, 3, 3], [4, 5, 6, 7], [7, 8, 9, 10]],  # once: it may be chance
        [[1, 2, 3, 3], [4, 5, 3, 3], [7, 8, 3, 3]],  # the same everywhere: nothing was loaded there
        [[1, 2, 0, 0], [4, 5, 0, 0], [7, 8, 0, 0]],  # zeroes: nothing was loaded there either
    ],
)
def test_layers_alike_for_another_reason_are_not_wrong(tmp_path: Path, numbers: list[list[int]]) -> None:
    assert lost(loads(cache(tmp_path), [97, 98, 99], numbers, C)) == 0


def test_layers_that_compute_the_same_may_hold_the_same(tmp_path: Path) -> None:
    made = Cache(tmp_path, layers=LAYERS).computes("a", [5, 6, 7, 8])
    made.sim.of_layers("a", [[11, 12, 13, 13], [21, 22, 23, 23]])
    assert wrong(loads(made, [97, 98, 99], [[1, 2, 3, 3], [4, 5, 6, 6], [7, 8, 9, 9]], C)) == 0
