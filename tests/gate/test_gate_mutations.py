"""A good run and its baseline; then the run is broken, and the gate has to say what and why."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gated
import pytest
import synth
from gated import LAYERS, PAIRS, Plan, check, contract, failures, report_of
from synth import Fate, Policy, Rounding

from kvtrace.gate.read_baseline import BaselineFile, read_baseline
from kvtrace.report.load import read_report
from kvtrace.trace import ops
from kvtrace.trace.format import Fact

GROUP = "model.layers.*.self_attn.attn"
OP = "unified_attention_with_output"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return report_of(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def baseline(good: Any) -> BaselineFile:
    return contract(good)


def raised(sim: Any) -> None:
    fact = {"hook": "save_kv_layer", "layer": "l1", "step": sim.step_id, "type": "OSError",
            "message": "disk full", "where": "store.py:12 in write"}  # fmt: skip
    sim.workers[0].fact(Fact.EXCEPTION, fact)


@dataclass(frozen=True)
class Mutation:
    """How the run is broken; then what the gate has to say, why, and a word of the remedy."""

    plan: Plan
    failed: tuple[str, str, int | None]  # what, layers, rank
    cause: str | None
    remedy: str = ""


MUTATIONS: dict[str, Mutation] = {
    "one layer's hook is gone on one rank": Mutation(
        Plan(fate=Fate(unhooked=frozenset({(0, 3)}))),
        ("save_kv_layer", "model.layers.3.self_attn.attn", 0),
        "layer-not-hooked",
    ),
    "two layers' hooks and ops are gone on all ranks": Mutation(
        Plan(fate=Fate(dead_pairs=frozenset({(0, 1), (0, 2), (1, 1), (1, 2)}))),
        ("save_kv_layer", "model.layers.{1-2}.self_attn.attn", None),
        "layer-not-hooked",
    ),
    "the unit is larger than most prompts": Mutation(
        Plan(policy=Rounding(512).policy(), settings={"ints": {"unit": 512}}),
        ("tokens kept", "", None),
        "below-save-granularity",
        "change the rounding",
    ),
    "a rank is not traced": Mutation(
        Plan(without_spool=1),
        ("worker", "", 1),
        "agent-not-loaded",
    ),
    "a rank is not there": Mutation(
        Plan(settings={"tp": 1}),
        ("worker", "", 1),
        None,
    ),
    "the engine is a consumer": Mutation(
        Plan(policy=Policy(synth.nothing), settings={"role": "kv_consumer"}),
        ("kv_role", "", None),
        "role-does-not-save",
        "kv_both",
    ),
    "no connector in one worker": Mutation(
        Plan(settings={"live": [True, False]}),
        ("save_kv_layer", GROUP, 1),
        "connector-not-created",
    ),
    "no connector at all": Mutation(
        Plan(policy=Policy(synth.nothing), settings={"connector": None}),
        ("connector", "", None),
        "no-connector-configured",
        "--kv-transfer-config",
    ),
    "another class is live": Mutation(
        Plan(settings={"connector_facts": {"class": "OtherStore"}}),
        ("connector class", "", None),
        None,
    ),
    "metadata is not bound on one rank": Mutation(
        Plan(fate=Fate(unbound_ranks=frozenset({1}))),
        ("save_kv_layer", GROUP, 1),
        "metadata-not-bound",
        "super()",
    ),
    "metadata is not bound from some step on": Mutation(
        Plan(fate=Fate(unbound_ranks=frozenset({0, 1})), fate_from=5),
        ("bind_connector_metadata", "", None),
        "metadata-not-bound",
    ),
    "a hook raises": Mutation(
        Plan(fate=Fate(raising=frozenset({(0, 1)})), fate_from=3, facts=raised),
        ("hook-raised", "", None),
        "hook-raised",
    ),
    "wait_for_save is never called": Mutation(
        Plan(lost=("wait_for_save", lambda step: True)),
        ("wait_for_save", "", None),
        None,
    ),
    "get_finished misses one step": Mutation(
        Plan(lost=("get_finished", lambda step: step == 4)),
        ("get_finished", "", None),
        None,
    ),
    "full CUDA graphs are replayed": Mutation(
        Plan(fate=Fate(dead_pairs=PAIRS, mode=2), fate_from=3),
        ("save_kv_layer", GROUP, None),
        "full-cudagraph-replay",
        "PIECEWISE",
    ),
    "layers are called directly": Mutation(
        Plan(fate=Fate(dead_pairs=PAIRS), settings={"direct_call": True}),
        ("save_kv_layer", GROUP, None),
        "direct-call-bypass",
    ),
    "a target is missing": Mutation(
        Plan(targets={"attention-decorator": "missing"}),
        ("attention-decorator", "", None),
        None,
        "upgrade kvtrace",
    ),
    "a target's module is no longer imported": Mutation(
        Plan(targets={"worker": "pending"}),
        ("worker", "", None),
        None,
        "renew the baseline",
    ),
    "the model has fewer KV layers": Mutation(
        Plan(settings={"layers": 3}),
        ("KV layers", "", None),
        None,
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_is_caught_with_its_cause(name: str, baseline: BaselineFile, tmp_path: Path) -> None:
    mutation = MUTATIONS[name]
    outcome = check(report_of(tmp_path, mutation.plan), baseline)
    assert not outcome.passed
    assert (*mutation.failed, mutation.cause) in failures(outcome), failures(outcome)
    if mutation.cause is not None:
        explained = outcome.explanations[mutation.cause]
        assert explained.title and explained.remedy
        assert mutation.remedy in " ".join(explained.remedy)
    else:
        found = next(one for one in outcome.failed if (one.subject, one.layers, one.rank) == mutation.failed)
        assert found.remedy and mutation.remedy in found.remedy
    assert all(one.before is not None or one.kind == "finding" for one in outcome.failed)


def test_an_op_of_another_name(
    good: Any, baseline: BaselineFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "unified_mla_attention_with_output"
    monkeypatch.setattr(synth, "ATTENTION", ops.BY_NAME[other])
    outcome = check(report_of(tmp_path), baseline)
    (failed,) = outcome.failed
    assert (failed.kind, failed.subject, failed.layers, failed.before, failed.after) == (
        "coverage", OP, GROUP, 1.0, None,
    )  # fmt: skip
    assert f"seen instead: {other}" in failed.text and "renew the baseline" in failed.remedy
    assert any(one.subject == other for one in outcome.of("changed"))


def test_decode_that_is_no_longer_offered(tmp_path: Path) -> None:
    """The baseline's connector saved what decode made; now it stops at the prompt."""

    def serve(where: Path, offered: bool) -> Any:
        sim = synth.Sim(where, tp=2, layers=LAYERS, ints={"unit": 32})
        sim.arrive(synth.Prompt("a", 64, digest=1))
        sim.step([synth.Chunk("a", 0, 64, first=True)], [synth.Entry("a", 64, 64, 0)], prompts={"a": 64})
        for n in range(64):
            fills = offered and n % 32 == 31
            sim.step([], [synth.Entry("a", 32, 96, 64 + n - 31)] if fills else [], tokens=1)
        sim.finish("a", 128, 65)
        sim.write()
        synth.run_json(where)
        return gated.build_report(where)

    before, after = serve(tmp_path / "a", True), serve(tmp_path / "b", False)
    assert check(before, contract(before)).passed
    outcome = check(after, contract(before))
    assert failures(outcome) == [("tokens kept", "", None, "decode-not-offered")]
    assert (outcome.failed[0].before, outcome.failed[0].after) == (1.0, 0.5)
    # and where the good run did not offer decode either, longer answers are no regression
    assert check(report_of(tmp_path / "c", Plan(output=40)), contract(report_of(tmp_path / "d"))).passed


def test_loads_that_stop(tmp_path: Path) -> None:
    store = Rounding(32).policy().store
    good = report_of(tmp_path / "a", Plan(policy=Policy(store, gated.loading)))
    assert good["ledger"]["loads"]["accounts"]["loaded"] > 0
    bad = report_of(tmp_path / "b")
    outcome = check(bad, contract(good))
    (loads,) = [one for one in outcome.failed if one.subject == "tokens loaded"]
    assert loads.after == 0.0 and "lookup-miss" in loads.text
    assert "tokens kept" not in {one.subject for one in outcome.failed}  # what is not loaded is saved again


def test_a_rank_that_skips_steps(baseline: BaselineFile, tmp_path: Path) -> None:
    plan = Plan(fate=Fate(missing_ranks=frozenset({1})), fate_from=3)
    outcome = check(report_of(tmp_path, plan), baseline)
    assert "tokens kept" in {one.subject for one in outcome.failed}


def test_hooks_that_do_nothing_any_more(baseline: BaselineFile, tmp_path: Path) -> None:
    """Every hook is called, none has anything to store: called is not saved."""
    outcome = check(report_of(tmp_path, Plan(policy=Policy(synth.nothing))), baseline)
    idle = {one.subject for one in outcome.failed if one.kind == "work"}
    assert {"save_kv_layer", "wait_for_save", "build_connector_meta"} <= idle
    assert {one.cause for one in outcome.failed} == {"metadata-has-no-store"}


def test_an_engine_that_never_came_up(baseline: BaselineFile, tmp_path: Path) -> None:
    failed = {"ok": False, "error_type": "ModuleNotFoundError", "error": "No module named 'x'"}
    plan = Plan(prompts=[], settings={"created": False, "live": False, "connector_facts": failed})
    outcome = check(report_of(tmp_path, plan), baseline)
    assert ("tokens kept", "", None, "connector-failed-to-start") in failures(outcome)
    assert {one.cause for one in outcome.failed if one.kind == "coverage"} == {"connector-failed-to-start"}


def varied(rng: random.Random) -> Plan:
    """The same connector under another load: other prompts, other answers, dummy steps, another pace."""

    def warm_up(sim: Any) -> None:
        for _ in range(rng.randrange(3)):
            sim.step([], [], tokens=64, fate=Fate(unbound_ranks=frozenset({0, 1})), dummy=True)
        sim.t += rng.randrange(10**9)

    lengths = [32 * rng.randint(1, 24) for _ in range(rng.randint(3, 9))]
    return Plan(prompts=lengths, output=rng.randint(2, 12), before=warm_up)


def test_twenty_healthy_repeats_give_twenty_passes(baseline: BaselineFile, tmp_path: Path) -> None:
    rng = random.Random(4)
    texts = set()
    for number in range(20):
        report = report_of(tmp_path / str(number), varied(rng))
        outcome = check(report, baseline)
        assert outcome.passed, failures(outcome)
        assert not outcome.of("better") and not outcome.of("changed")
        assert check(report, None).passed
        texts.add(report["run"]["engines"][0]["steps"])
    assert len(texts) > 5  # they were really different runs


def test_better_than_the_baseline_is_said_and_passes(good: Any, tmp_path: Path) -> None:
    worse = report_of(tmp_path / "a", Plan(policy=Rounding(512).policy(), settings={"ints": {"unit": 512}}))
    outcome = check(good, contract(worse))
    assert outcome.passed
    said = {(one.subject, one.state) for one in outcome.checks}
    assert {("tokens kept", "better"), ("below-save-granularity", "better")} <= said
    dead = report_of(tmp_path / "b", Plan(fate=Fate(dead_pairs=frozenset({(0, 3)}))))
    outcome = check(good, contract(dead))
    assert outcome.passed
    layers = {(one.subject, one.before, one.after) for one in outcome.of("better") if one.kind == "coverage"}
    assert ("save_kv_layer", 0.0, 1.0) in layers


def test_a_baseline_of_uneven_layers_holds_them_apart(tmp_path: Path) -> None:
    """A layer that never was hooked is no regression; losing another one is."""
    plan = Plan(fate=Fate(dead_pairs=frozenset({(0, 3), (1, 3)})))
    uneven = contract(report_of(tmp_path / "a", plan))
    rows = [row for row in uneven.baseline["coverage"]["hooks"] if row.get("hook") == "save_kv_layer"]
    assert [(row.get("only"), row["share"], row.get("ranks")) for row in rows] == [
        (["0-2"], 1.0, None), (["3"], 0.0, None),
    ]  # fmt: skip
    assert check(report_of(tmp_path / "b", plan), uneven).passed
    more = Plan(fate=Fate(dead_pairs=frozenset({(0, 3), (1, 3), (1, 0)})))
    outcome = check(report_of(tmp_path / "c", more), uneven)
    assert ("save_kv_layer", "model.layers.0.self_attn.attn", 1, "layer-not-hooked") in failures(outcome)


def test_a_known_fault_is_allowed_and_a_new_one_is_not(tmp_path: Path) -> None:
    faulty = Plan(fate=Fate(raising=frozenset({(0, 1)})), fate_from=3, facts=raised)
    known = contract(report_of(tmp_path / "a", faulty))
    assert {"id": "hook-raised", "severity": "fault"} in known.baseline["findings"]
    assert check(report_of(tmp_path / "b", faulty), known).passed


REPORTS = Path(__file__).resolve().parents[2] / "reports"
REAL = {
    "no-connector-configured": "no-connector-configured",
    "connector-not-created": "connector-not-created",
    "role-does-not-save": "role-does-not-save",
    "metadata-has-no-store": "metadata-has-no-store",
    "metadata-has-no-store-never": "metadata-has-no-store",
    "below-save-granularity-unit": "below-save-granularity",
    "metadata-not-bound": "metadata-not-bound",
    "first-chunk-only": "first-chunk-only",
    # Its prompts are rounded to nothing: the empty key that they share is the symptom.
    "false-already-stored": "below-save-granularity",
    "already-stored": "already-stored",
}


@pytest.mark.parametrize("name", REAL)
def test_real_runs_that_are_broken_against_a_real_healthy_one(name: str) -> None:
    """The scenarios' reports of a real engine: what each shows is what the gate says, too."""
    healthy = read_baseline(REPORTS / "baselines" / "healthy-chunk-store.json")
    outcome = check(read_report(REPORTS / "vllm-0.32.0-cpu" / f"{name}.json"), healthy)
    assert ("tokens kept", "", None, REAL[name]) in failures(outcome), failures(outcome)


def test_a_baseline_is_the_same_from_run_to_run(tmp_path: Path) -> None:
    texts = {contract(report_of(tmp_path / str(n))).baseline.__repr__() for n in range(2)}
    assert len(texts) == 1
