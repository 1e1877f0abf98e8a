"""The generator: the same seed gives the same connector, every fault can be planted, all of it is Python."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest
from kvgen.catalogue import BY_NAME, FAULTS, TAKES_ALL
from kvgen.keys import ALGORITHMS, ENCODINGS, FORMATS, KeyScheme
from kvgen.plan import HEALTHY_EVERY, draw, fault_of
from kvgen.source import generate

ROOT = Path(__file__).resolve().parents[2]

# Findings that the catalogue knows and kvtrace may not have yet.
COMING = {
    "kv-stale", "kv-misplaced", "kv-altered", "store-failed", "store-incomplete", "store-lost-later",
    "blocks-held", "kv-load-wrong", "wrong-hit", "child-lost",
}  # fmt: skip


def test_the_same_seed_gives_the_same_connector() -> None:
    for seed in range(1, 60):
        first, second = draw(seed), draw(seed)
        assert first == second
        assert generate(first) == generate(second)


def test_different_seeds_give_different_connectors() -> None:
    texts = {generate(draw(seed, "")).text() for seed in range(40)}
    assert len(texts) == 40
    assert len({draw(seed, "").describe() for seed in range(40)}) > 35


def test_a_healthy_plan_has_no_fault_and_a_named_one_is_planted() -> None:
    assert draw(4).planted is None and draw(5, "").planted is None
    planted = draw(4, "slow-save").planted
    assert planted is not None and planted.name == "slow-save"
    with pytest.raises(KeyError):
        draw(4, "no-such-fault")


def test_one_of_four_is_healthy_and_the_faults_come_evenly() -> None:
    laps = 3
    seeds = range(len(FAULTS) * laps * HEALTHY_EVERY // (HEALTHY_EVERY - 1) + 1)
    counts = Counter(fault_of(seed) for seed in seeds)
    assert counts.pop("") == len(range(0, len(seeds), HEALTHY_EVERY))
    assert set(counts) == set(BY_NAME)
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("fault", ["", *BY_NAME])
def test_every_fault_can_be_planted_and_the_source_compiles(fault: str) -> None:
    for seed in range(4):
        plan = draw(seed, fault)
        made = generate(plan)
        for path, text in made.files.items():
            ast.parse(text, filename=path)
        assert made.class_name in made.text()
        assert "@" not in made.class_name
        marks = [mark for mark in ("@PUT@", "@DEL@", "@INIT@", "@HEAD@", "@CLS@") if mark in made.text()]
        assert marks == []


def test_a_fault_changes_the_connector_or_what_it_meets() -> None:
    """Beside each fault stands a plan that differs in the fault's name alone: the source must differ too,
    except where the fault lies in the workload, the settings or the store's server."""
    outside = {
        "unit-above-all", "unit-above-most", "decode-left-out", "tail-left-out", "aborted", "server-down",
        "server-slow", "server-refuses", "late-read", "key-of-head", "hit-by-head", "key-without-parent",
        "key-collides",
    }  # fmt: skip
    from dataclasses import replace

    for fault in FAULTS:
        if fault.name in outside:
            continue
        plan = draw(1, fault.name)
        clean = replace(plan, fault="", store=replace(plan.store, flaw=""))
        texts = [generate(one).text() for one in (plan, replace(clean, fault=""))]
        assert texts[0] != texts[1], fault.name


def test_right_findings_are_ids_of_the_catalogue() -> None:
    known = {path.stem for path in (ROOT / "docs" / "causes").glob("*.md")} | COMING
    for fault in FAULTS:
        assert fault.right and fault.right <= known, fault.name


def test_there_are_enough_faults() -> None:
    assert len(FAULTS) == len(BY_NAME) >= 60
    assert set(BY_NAME) > TAKES_ALL


@pytest.mark.parametrize("flaw", ["", "head", "orphan", "narrow"])
def test_the_written_key_scheme_is_the_one_that_is_read(flaw: str) -> None:
    tokens = [(7 * i) % 491 for i in range(300)]
    for number, chain in enumerate(("chain", "prefix")):
        for algorithm, encoding, form in zip(ALGORITHMS, ENCODINGS, FORMATS, strict=True):
            scheme = KeyScheme(chain, algorithm, encoding, form, flaw, 32)
            space: dict[str, object] = {}
            exec(
                "import array, base64, hashlib, json, zlib\nimport numpy as np\n" + scheme.source("f"), space
            )
            assert space["f"](tokens, 64) == scheme.keys(tokens, 64), (number, algorithm)  # type: ignore[operator]
            assert space["f_of_nothing"]() == scheme.empty()  # type: ignore[operator]


def test_healthy_prompts_fill_the_unit() -> None:
    """A prompt below the unit is a fault by definition: no healthy connector may meet one."""
    for seed in range(0, 400, HEALTHY_EVERY):
        plan = draw(seed)
        assert min(len(prompt) for part in plan.rounds for prompt in part.prompts) >= plan.unit
