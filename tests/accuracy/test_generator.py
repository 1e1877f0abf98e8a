"""The generator: the same seed gives the same connector, every fault can be planted, all of it is Python."""

from __future__ import annotations

import ast
import hashlib
import lzma
import os
import pickle
import subprocess
import sys
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import lossy, storeview
from kvgen import stores
from kvgen.catalogue import BY_NAME, BYTES_REST, FAULTS, PLACES, PROPERTIES, TAKES_ALL
from kvgen.designs import DESIGN_BY_NAME, DESIGNS, GONE_LATER, LOSSY
from kvgen.keys import ALGORITHMS, ENCODINGS, FORMATS, KeyScheme
from kvgen.plan import DESIGN_EVERY, HEALTHY_EVERY, OPTIONS, Plan, draw, fault_of
from kvgen.source import generate
from kvgen.stores import FILE_KINDS, KINDS, LOSSY_PACKS, PACKS, PUBLISH, ROW, StoreChoice

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


@pytest.mark.parametrize("seed", range(60))
def test_on_a_gpu_no_copy_takes_kv_for_host_memory(seed: int) -> None:
    plan = replace(draw(seed), cuda=True)
    text = generate(plan).text()
    ast.parse(text)
    assert "kv.numpy()" not in text and "memmove" not in text
    saves = plan.role != "consumer"
    assert ("out = out.cpu()" in text) == saves and ("tensor.to(kv.device)" in text) == plan.returns


def body(plan: Plan) -> str:
    """A connector's source without the name of its module."""
    made = generate(plan)
    return "".join(made.files.values()).replace(made.module.partition(".")[0], "")


def test_a_fault_changes_the_connector_or_what_it_meets() -> None:
    """Beside each fault stands a plan that differs in the fault's name alone: the source must differ too,
    except where the fault lies in the workload, the settings or the store's server."""
    outside = {
        "unit-above-all", "unit-above-most", "decode-left-out", "tail-left-out", "aborted", "server-down",
        "server-slow", "server-refuses", "server-refuses-some", "late-read", "key-of-head", "hit-by-head",
        "key-without-parent", "key-collides", "salted-hash", "salt-left-out",
    }  # fmt: skip
    for fault in FAULTS:
        if fault.name in outside:
            continue
        plan = draw(1, fault.name)
        clean = replace(plan, fault="", store=replace(plan.store, flaw=""))
        assert body(plan) != body(replace(clean, fault="")), fault.name


def test_right_findings_are_ids_of_the_catalogue() -> None:
    known = {path.stem for path in (ROOT / "docs" / "causes").glob("*.md")} | COMING
    for fault in FAULTS:
        assert fault.right <= known, fault.name
        assert fault.right or fault.shows == "return-only", fault.name


def test_there_are_enough_faults_and_choices() -> None:
    assert len(FAULTS) == len(BY_NAME) >= 80
    assert set(BY_NAME) > TAKES_ALL | BYTES_REST
    assert len(DESIGNS) == len(DESIGN_BY_NAME) >= 12
    assert not set(DESIGN_BY_NAME) & set(BY_NAME)


def test_every_fault_says_what_it_breaks_and_where_it_shows() -> None:
    for fault in FAULTS:
        assert fault.breaks <= set(PROPERTIES) and fault.shows in PLACES, fault.name
        assert fault.breaks or fault.grade != "fault" or fault.name == "child-dead", fault.name
    assert {fault.shows for fault in FAULTS} == set(PLACES)
    # verify's other properties are of the engine and the store's conditions, which no connector here breaks
    broken = frozenset().union(*(fault.breaks for fault in FAULTS))
    assert set(PROPERTIES) - broken == {"lengths", "store-conditions"}


def test_a_loss_behind_a_store_of_no_files_shows_in_no_size() -> None:
    """Nor does one behind files that another process writes."""
    seen = {draw(seed, "files-empty").shows for seed in range(4)}
    hidden = {
        plan.shows for plan in (draw(seed, "deque-full") for seed in range(40)) if plan.store.kind == "memory"
    } | {draw(seed, "writer-dies").shows for seed in range(4)}
    assert (seen, hidden) == ({"sizes"}, {"return-only"})
    assert draw(4).shows == ""


def test_healthy_connectors_are_half_choices_of_every_kind() -> None:
    plans = [draw(seed) for seed in range(0, HEALTHY_EVERY * DESIGN_EVERY * len(DESIGNS), HEALTHY_EVERY)]
    assert all(plan.planted is None for plan in plans)
    assert Counter(plan.design for plan in plans if plan.design) == dict.fromkeys(DESIGN_BY_NAME, 1)
    assert sum(not plan.design for plan in plans) == len(DESIGNS)


@pytest.mark.parametrize("name", DESIGN_BY_NAME)
def test_every_choice_can_be_drawn_and_the_source_compiles(name: str) -> None:
    """Beside it stands a plan that differs in the choice alone: its source differs, or its values."""
    in_values = {"large-unit", "whole-blocks", "decode-stored", "prompt-only", "kept-under-preemption",
                 *GONE_LATER, *LOSSY}  # fmt: skip
    for seed in range(4):
        plan = draw(seed, name)
        made = generate(plan)
        for path, text in made.files.items():
            ast.parse(text, filename=path)
        if name not in in_values:
            assert body(replace(plan, design="")) != body(plan)
        assert plan.chosen is not None and plan.planted is None and f"choice={name}" in plan.describe()


def test_all_kinds_of_stores_packs_and_threads_are_drawn() -> None:
    plans = [draw(seed) for seed in range(0, 1600, HEALTHY_EVERY)]
    assert {plan.store.kind for plan in plans} == set(KINDS)
    assert {plan.store.pack for plan in plans} == {*PACKS, *LOSSY_PACKS}
    assert {plan.store.publish for plan in plans if plan.store.kind in FILE_KINDS} == set(PUBLISH)
    assert {plan.run for plan in plans} == set(OPTIONS["run"])


@pytest.mark.parametrize("pack", [*PACKS, *LOSSY_PACKS])
def test_packed_kv_is_read_from_outside_and_the_other_way(pack: str) -> None:
    torch = pytest.importorskip("torch")
    space: dict[str, Any] = {"torch": torch, "np": np, "zlib": zlib, "lzma": lzma, "pickle": pickle, "os": os,
                             "hashlib": hashlib}  # fmt: skip
    exec(stores._packing(StoreChoice("raw", pack=pack)), space)
    values = np.random.default_rng(3).standard_normal((5, 2, 32, ROW)).astype(np.float32) * 4
    bound = lossy.bound(replace(draw(4, ""), store=StoreChoice("raw", pack=pack)), values)
    out = storeview.floats(space["_packed"](torch.from_numpy(values)), pack)
    back = space["_floats"](storeview.packed(values, pack)).numpy()
    for found in (out, back):
        assert (np.abs(found.reshape(values.shape) - values) <= bound).all()
    assert pack in LOSSY_PACKS or (out == values.ravel()).all()


def test_a_scale_that_does_not_fit_is_outside_the_bound() -> None:
    torch = pytest.importorskip("torch")
    space: dict[str, Any] = {"torch": torch, "np": np}
    exec(stores._packing(StoreChoice("raw", "bad-scale", pack="int8")), space)
    values = np.random.default_rng(3).standard_normal((2, 2, 32, ROW)).astype(np.float32)
    bound = lossy.bound(replace(draw(4, ""), store=StoreChoice("raw", pack="int8")), values)
    found = storeview.floats(space["_packed"](torch.from_numpy(values)), "int8").reshape(values.shape)
    assert not (np.abs(found - values) <= bound).all()


def test_salted_keys_are_others_in_another_process() -> None:
    scheme = KeyScheme("prefix", "sha256", "int32", "hex", "hash")
    script = "import array, base64, hashlib, json, zlib\n" + scheme.source("f") + "print(f([1, 2, 3, 4], 2))"
    keys = [
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True
        )
        for seed in ("1", "2", "1")
    ]
    assert keys[0].stdout == keys[2].stdout != keys[1].stdout


@pytest.mark.parametrize("flaw", ["", "head", "orphan", "narrow", "hash"])
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


def test_prompts_fill_the_unit_where_no_choice_says_otherwise() -> None:
    for seed in range(0, 400, HEALTHY_EVERY):
        plan = draw(seed, "")
        assert min(len(prompt) for part in plan.rounds for prompt in part.prompts) >= plan.unit


def test_a_sound_connector_promises_what_it_can_keep() -> None:
    """Of a plain store of files that is asked itself, everything but that it survives its store."""
    plain = next(
        plan
        for plan in (draw(seed, "") for seed in range(200))
        if plan.role == "both"
        and plan.store.kind in FILE_KINDS
        and {plan.dedupe, plan.lookup} <= {"ask", "none"}
        and not plan.whole
        and plan.store.pack == "plain"
    )
    assert plain.unpromised == {"store-conditions"}
    assert "restart" in replace(plain, store=StoreChoice("memory")).unpromised
    heads = (draw(seed, "head-only") for seed in range(200))
    head_only = next(plan for plan in heads if plan.returns and not plan.whole)
    assert "transfer" in head_only.unpromised and "whole-units" not in head_only.unpromised
    assert plain.all_units and not head_only.all_units  # verify is told so
    assert "whole-units" in draw(4, "ring").unpromised
    assert "outputs" in draw(4, "fp8").unpromised
    packed = replace(plain, choice={**plain.choice, "run": "inline"}, store=StoreChoice("pt", pack="lzma"))
    assert "step-time" in packed.unpromised
    assert "step-time" not in replace(packed, store=StoreChoice("pt", pack="shuffle")).unpromised
    assert "returns-equal" not in frozenset().union(*(draw(4, name).unpromised for name in DESIGN_BY_NAME))


def test_what_a_fault_breaks_is_what_its_connector_promises() -> None:
    lost = {"transfer", "whole-units", "lookups-agree"}
    for seed in range(60):
        for name in ("wiped", "slow-save", "half-zeroed"):
            plan = draw(seed, name)
            if plan.role == "consumer":
                assert not plan.breaks
            elif not plan.returns:  # nothing can come back
                assert plan.breaks == ({"step-time"} if name == "slow-save" else set())
            else:
                assert (plan.breaks >= lost) == (name == "wiped")
    for seed in range(20):  # nothing is put between a lookup and the load that it promises
        plan = draw(seed, "time-to-live")
        assert plan.load in ("none", "sync") and plan.run == "inline" and not plan.async_scheduling
