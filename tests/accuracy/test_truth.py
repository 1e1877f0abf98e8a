"""The truth of a run is read from its store, and changes with it: without an engine, on a made-up model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import choices, truth
from harness.engine import Outcome, Request
from harness.reference import GpuLayout, Layout
from harness.storeview import StoreView, record_name
from kvgen.plan import Plan, draw
from kvgen.stores import LOSSY_PACKS, StoreChoice
from kvgen.workload import Round

LAYERS = [f"layer.{i}" for i in range(4)]


class MadeUp:
    """A reference whose KV is a number for each layer, token and place; every answer is right."""

    heads, head = 2, 64

    def of(self, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(abs(hash(tuple(tokens[:1]))) % 2**32)
        whole = rng.standard_normal((4, 1200, 2, 128)).astype(np.float32)
        return whole[:, : len(tokens)], np.zeros((len(tokens), 1))

    def is_answer(self, prompt: list[int], answer: list[int], tie: float) -> bool:
        return True


def layout_of(block: int, head: int) -> Layout:
    """Keys first, values after them, each token by token, but the tokens backwards."""
    place = np.arange(block * head).reshape(block, head)[::-1]
    return Layout(place, place + block * head)


@pytest.fixture(autouse=True)
def _made_up_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layout, "of", staticmethod(layout_of))


def test_a_gpus_blocks_hold_each_tokens_heads_of_k_and_of_v() -> None:
    tokens = np.arange(96 * 2 * 128, dtype=np.float32).reshape(96, 2, 128)
    blocks = GpuLayout(32).pack(tokens)
    assert blocks.shape == (3, *GpuLayout.row(2, 64)[:1], 32, GpuLayout.row(2, 64)[1])
    assert (GpuLayout(32).unpack(blocks) == tokens).all()
    # block 1, head 1 of V, its sixth token
    assert (blocks[1, 2 + 1, 5] == tokens[32 + 5, 1, 64:]).all()


def plan_for(wanted: Callable[[Plan], bool]) -> Plan:
    return next(plan for plan in (draw(seed, "") for seed in range(200)) if wanted(plan))


def consumer(**choice: Any) -> Plan:
    """A plan whose store this side can fill with what a connector would have stored, and other choices."""
    plan = plan_for(lambda plan: plan.role == "consumer" and plan.store.kind in ("npy", "raw", "sqlite"))
    if "family" in choice:
        choice["covers"] = "whole" if choice["family"] == "prefix" else "unit"
    lengths = (plan.unit * 2 + 5, plan.unit)
    prompts = tuple(tuple((n * i) % 450 + 3 for i in range(length)) for n, length in enumerate(lengths, 5))
    rounds = (Round(prompts, False, 1),)
    return replace(plan, rounds=rounds, choice={**plan.choice, "axis": "plain", **choice})


class Filled:
    """A store that holds the first round of a plan, and what is read from it."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.view = StoreView(plan, folder, "t")
        self.reference: Any = MadeUp()
        truth.fill(plan, self.view, self.reference, LAYERS)
        self.requests = [Request(f"r{i}", list(p), 0) for i, p in enumerate(plan.rounds[0].prompts)]
        for request in self.requests:
            request.finished, request.answer = True, [5]

    def rest(self, number: int = 0) -> np.ndarray:
        reader = truth.Reader(self.plan, self.view, self.reference, LAYERS)
        return reader.at_rest(self.requests[number])[0]

    def whole(self, number: int = 0) -> int:
        return truth.offered_tokens(self.plan, self.requests[number])

    def name(self, piece: int, layer: int) -> str:
        pieces = truth.pieces(self.plan, self.requests[0])
        return record_name(self.plan, pieces[piece].key, LAYERS, layer)

    def read(self, piece: int, layer: int) -> np.ndarray:
        values = self.view.read(self.name(piece, layer))
        assert values is not None
        return values.copy()

    def write(self, piece: int, layer: int, values: np.ndarray) -> None:
        self.view.write(self.name(piece, layer), values)

    def lost(self, piece: int, layer: int, values: np.ndarray) -> int:
        """Token-layers that are not at rest any more when a record holds this instead."""
        before = self.rest().sum()
        self.write(piece, layer, values)
        return int(before - self.rest().sum())


def of_units(folder: Path) -> Filled:
    return Filled(consumer(family="units", record="layer"), folder)


@pytest.mark.parametrize("family", ["units", "prefix"])
@pytest.mark.parametrize("record", ["layer", "stack"])
@pytest.mark.parametrize("axis", ["plain", "permuted", "slots"])
def test_what_was_stored_right_is_at_rest_to_the_last_unit(
    tmp_path: Path, family: str, record: str, axis: str
) -> None:
    filled = Filled(consumer(family=family, record=record, axis=axis), tmp_path)
    for number, request in enumerate(filled.requests):
        rest, whole = filled.rest(number), filled.whole(number)
        assert rest.shape == (4, len(request.prompt))
        assert rest[:, :whole].all() and not rest[:, whole:].any()


def test_a_missing_record_takes_away_its_tokens_and_no_others(tmp_path: Path) -> None:
    filled = of_units(tmp_path)
    unit = filled.plan.unit
    assert filled.lost(0, 2, np.zeros(0, dtype=np.float32)) == unit
    assert not filled.rest()[2, :unit].any()


@pytest.mark.parametrize("amount", [1e-3, 1.0, np.nan])
def test_one_value_of_one_token_counts(tmp_path: Path, amount: float) -> None:
    filled = of_units(tmp_path)
    values = filled.read(1, 0)
    values[777] += amount
    assert filled.lost(1, 0, values) == 1


def test_noise_of_the_computation_does_not_count(tmp_path: Path) -> None:
    filled = of_units(tmp_path)
    assert filled.lost(1, 0, filled.read(1, 0) + np.float32(2e-5)) == 0


@pytest.mark.parametrize(
    ("piece", "layer", "other_piece", "other_layer"), [(0, 0, 0, 1), (0, 3, 1, 3), (1, 2, 0, 2)]
)
def test_another_layers_or_units_content_is_not_at_rest(
    tmp_path: Path, piece: int, layer: int, other_piece: int, other_layer: int
) -> None:
    filled = of_units(tmp_path)
    assert filled.lost(piece, layer, filled.read(other_piece, other_layer)) == filled.plan.unit


def test_half_precision_is_another_content(tmp_path: Path) -> None:
    filled = of_units(tmp_path)
    values = filled.read(0, 0).astype(np.float16).astype(np.float32)
    assert filled.lost(0, 0, values) >= 0.9 * filled.plan.unit


def test_another_request_does_not_lend_its_record(tmp_path: Path) -> None:
    filled = Filled(consumer(family="units"), tmp_path)
    stranger = Request("s", [4, *filled.requests[0].prompt[1:]], 0, answer=[5], finished=True)
    filled.requests[0] = stranger
    assert filled.rest().sum() == 0


def test_a_cut_record_is_worth_its_whole_tokens_at_most(tmp_path: Path) -> None:
    plan = consumer(family="units", record="layer", axis="permuted")
    filled = Filled(plan, tmp_path)
    cut = replace(plan, store=replace(plan.store, flaw="cut"))
    size = 2 * 128
    filled.write(0, 0, filled.read(0, 0)[: 10 * size + 7])
    reader = truth.Reader(cut, filled.view, filled.reference, LAYERS)
    right, claim = reader.at_rest(filled.requests[0])
    # a token's key and value lie apart in its block: none is whole, ten tokens' worth of bytes are there
    assert right[0, : plan.unit].sum() == 0
    assert claim[0, : plan.unit].sum() == 10


def established(filled: Filled, plan: Plan) -> truth.Truth:
    reader = truth.Reader(plan, filled.view, filled.reference, LAYERS)
    return truth.establish(plan, Outcome(requests=filled.requests, started=True), [reader])


def pusher(**choice: Any) -> Plan:
    """A plan that pushes, whose store this side fills."""
    return consumer(family="units", record="layer", role="producer", load="none", decode=False, **choice)


@pytest.mark.parametrize(
    ("fault", "place", "all_taken"),
    [
        ("half-zeroed", "end", True),
        ("put-swallowed-in-thread", "end", True),
        ("put-swallowed-in-thread", "held", False),
        ("wrong-blocks", "end", False),
        ("rounds-up", "end", False),
    ],
)
def test_more_is_taken_than_rests_only_if_lost_after_the_read(
    tmp_path: Path, fault: str, place: str, all_taken: bool
) -> None:
    filled = Filled(pusher(place=place), tmp_path)
    filled.write(0, 2, np.zeros(0, dtype=np.float32))
    found = established(filled, replace(filled.plan, fault=fault)).requests[0]
    assert found.claimable == found.at_rest == found.expected - filled.plan.unit
    assert found.taken == (found.expected if all_taken else found.claimable)


def test_kv_computed_on_a_wrong_load_may_be_called_saved(tmp_path: Path) -> None:
    """Its KV is not the reference's, and it is the KV that it computed."""
    filled = Filled(pusher(), tmp_path)
    filled.write(1, 0, filled.read(1, 0) + 1)
    unit, plan = filled.plan.unit, replace(filled.plan, fault="loads-half")
    before = established(filled, plan).requests[0]
    filled.requests[0].cached = unit
    after = established(filled, plan).requests[0]
    assert before.claimable == before.at_rest == after.at_rest == after.expected - unit
    assert before.taken == before.expected, "another one put its KV in the place of this one's"
    assert after.claimable == after.taken == after.expected


def test_a_block_behind_an_odd_last_token_may_be_called_saved(tmp_path: Path) -> None:
    plan = pusher(axis="plain")
    plan = replace(plan, choice={**plan.choice, "family": "request-exact", "covers": "whole"})
    prompt = plan.rounds[0].prompts[0][: plan.block + 5]
    request = Request("r0", list(prompt), 0, answer=[5, 6, 7], finished=True)
    view, reference = StoreView(plan, tmp_path, "t"), MadeUp()
    whole = [*prompt, 5, 6]
    kv, _ = reference.of(whole)
    room = np.zeros((4, plan.block * 2, 2, 128), dtype=np.float32)
    room[:, : len(whole)] = kv
    layout = layout_of(plan.block, 64)
    for layer in range(4):
        view.write(record_name(plan, "r0", LAYERS, layer), layout.pack(room[layer]))
    reader = truth.Reader(plan, view, reference, LAYERS)  # type: ignore[arg-type]
    right, claim = reader.at_rest(request)
    assert right.sum() == 4 * len(prompt)
    assert claim.sum() == 4 * len(whole)


# --- does a run prove what it was made for? ---------------------------------------------------------


def run_of(plan: Plan, **changed: Any) -> tuple[Outcome, truth.Truth]:
    """A run of a plan in which everything is as a healthy connector leaves it, and what is changed."""
    outcome = Outcome(started=True, free_at_first=50, free_at_last=50)
    out = truth.Truth(4)
    for i, prompt in enumerate(p for r in plan.rounds for p in r.prompts):
        request = truth.RequestTruth(f"r{i}", len(prompt), 1, True, 32, len(prompt), 512, 512, 512, 512, True)
        out.requests.append(request)
    for name, value in changed.items():
        if hasattr(outcome, name):
            setattr(outcome, name, value)
        else:
            setattr(out.requests[0], name, value)
    return outcome, out


@pytest.mark.parametrize(
    "changed",
    [
        {"error": "IndexError: list index out of range"},
        {"finished": False},
        {"answer_right": False},
        {"at_rest": 511},
        {"at_rest": 513},
        {"free_at_last": 49},
    ],
)
def test_a_healthy_plan_that_is_broken_is_refused(changed: dict[str, Any]) -> None:
    plan = draw(4)
    assert truth.problem(plan, *run_of(plan)) == ""
    assert truth.problem(plan, *run_of(plan, **changed)) != ""


def test_a_healthy_plan_that_loads_nothing_is_refused() -> None:
    plan = plan_for(lambda plan: plan.load != "none")
    outcome, found = run_of(plan)
    assert truth.problem(plan, outcome, found) == ""
    for request in found.requests:
        request.cached = 0
    assert truth.problem(plan, outcome, found) == "nothing was loaded"


@pytest.mark.parametrize(
    "fault",
    ["takes-less", "server-down", "never-told", "into-a-copy", "hook-raises", "fails-to-start",
     "lookup-off-by-one", "receive-never-told", "load-fails", "unit-above-all", "slow-save",
     "decode-left-out"],
)  # fmt: skip
def test_a_fault_without_effect_is_refused(fault: str) -> None:
    plan = draw(1, fault)
    outcome, found = run_of(plan)
    outcome.seconds = 100.0
    assert truth.problem(plan, outcome, found) != ""


def test_a_fault_that_harms_more_than_it_explains_is_refused() -> None:
    plan = draw(1, "takes-less")
    assert truth.problem(plan, *run_of(plan, at_rest=0)) == "" or len(plan.rounds[0].prompts) > 9
    assert truth.problem(plan, *run_of(plan, at_rest=0, answer_right=False)) != ""


# --- deliberate choices -------------------------------------------------------------------------------

LENGTHS = (70, 31, 140, 96)


def chosen(design: str, limit: int = 0, variant: int = 0, **changed: Any) -> tuple[Plan, list[Request]]:
    """A plan of units of 32 with a choice, and requests of LENGTHS tokens, one after another."""
    plan = pusher()
    prompts = [[n * 400 // 7 + i % 390 for i in range(length)] for n, length in enumerate(LENGTHS, 1)]
    requests = [Request(f"r{i}", prompt, 0, [5], True) for i, prompt in enumerate(prompts)]
    plan = replace(plan, design=design, limit=limit, variant=variant, unit=32, budget=80, **changed)
    return replace(plan, choice={**plan.choice, "block": 32}), requests


@pytest.mark.parametrize(
    ("design", "limit", "variant", "expected"),
    [
        ("", 0, 0, [64, 0, 128, 96]),
        ("first-chunk", 0, 0, [64, 0, 64, 64]),
        ("minimum-length", 96, 0, [0, 0, 128, 96]),
        ("head-only", 2, 0, [64, 0, 64, 64]),
        ("end-left-out", 1, 0, [32, 0, 96, 64]),
        ("quota", 3, 0, [64, 0, 32, 0]),
        ("quota", 3, 1, [64, 0, 128, 0]),
        ("ring", 4, 0, [0, 0, 32, 96]),
        ("evicts", 8, 0, [32, 0, 128, 96]),
        ("reads-only", 0, 0, [0, 0, 0, 0]),
        ("time-to-live", 0, 0, [0, 0, 0, 96]),
        ("opt-out", 0, 0, [64, 0, 0, 96]),
        ("second-use", 0, 0, [0, 0, 0, 0]),
    ],
)
def test_what_a_choice_leaves_in_the_store(
    design: str, limit: int, variant: int, expected: list[int]
) -> None:
    plan, requests = chosen(design, limit, variant)
    plan = replace(plan, rounds=plan.rounds * 2)
    requests[2].opted_out, requests[3].round = True, 1
    offered = [truth.offered_tokens(plan, request) for request in requests]
    kept = choices.kept(plan, requests, offered)
    assert kept == expected
    for request, of, stays in zip(requests, offered, kept, strict=True):
        assert choices.took(plan, request, len(request.prompt), of, stays) == (of - stays) * bool(design)


def test_a_reused_unit_is_kept_for_all_who_share_it() -> None:
    plan, requests = chosen("second-use")
    again = Request("r9", [*requests[2].prompt[:64], *range(3, 70)], 1, [5], True)
    everyone = [*requests, again]
    offered = [truth.offered_tokens(plan, request) for request in everyone]
    assert choices.kept(plan, everyone, offered) == [0, 0, 64, 0, 64]


def test_what_a_choice_of_the_unit_or_the_answer_takes() -> None:
    for design, expected in (("large-unit", 6), ("prompt-only", 9), ("eight-bit", 64), ("decode-stored", 0)):
        plan, requests = chosen(design)
        assert choices.took(plan, requests[0], 79, 64, 64) == expected


@pytest.mark.parametrize("pack", LOSSY_PACKS)
def test_fewer_bits_are_right_within_their_bound_and_no_further(tmp_path: Path, pack: str) -> None:
    plan = consumer(family="units", record="layer", axis="plain")
    plan = replace(plan, store=StoreChoice("raw", pack=pack))
    filled = Filled(plan, tmp_path)
    whole = filled.whole()
    assert filled.rest()[:, :whole].all()
    filled.write(0, 1, filled.read(0, 1) * 1.2)
    assert filled.rest()[1, : plan.unit].sum() < plan.unit / 10
    assert filled.rest()[0, :whole].all()
