"""Ledgers of models whose layers do not all keep KV of tokens, and of those that keep none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from synth import Fate, Prompt, Rounding, Sim

from kvtrace.ledger import Run, read_run
from kvtrace.report.build import build_report
from kvtrace.trace.format import Fact

LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(3)]


def group(kind: str, block: int, *layers: int) -> dict[str, Any]:
    return {"kind": kind, "block_size": block, "layers": [LAYERS[i] for i in layers]}


def served(path: Path, *groups: dict[str, Any], told: dict[str, Any] | None = None, block: int = 64) -> Path:
    """A run of one prompt on three layers in these groups; ``told``: more of the worker."""
    sim = Sim(path, layers=3, block=block, engine_facts={"kv_groups": list(groups)})
    if told is not None:
        sim.workers[0].fact(Fact.WORKER, {"ordinal": sim.tag, "worker_class": "W", **told}, sim.t)
    sim.serve([Prompt("a", 128)], Rounding(32).policy())
    sim.write()
    return path


def layers_of(run: Run) -> tuple[str, ...]:
    return run.engines[0].workers[0].kv_layers


HYBRID = (group("MambaSpec", 64, 0, 2), group("FullAttentionSpec", 32, 1))


def test_layers_with_a_state_are_said_to_be_in_no_token_book(tmp_path: Path) -> None:
    run = read_run(served(tmp_path, *HYBRID))
    engine = run.engines[0]
    assert layers_of(run) == (LAYERS[1],) and engine.pairs == 1 and engine.block_size == 32
    assert engine.other_layers == {LAYERS[0]: "state", LAYERS[2]: "state"}
    assert any(note.startswith("2 layers keep a state") for note in run.notes)


def test_save_hooks_are_due_on_layers_with_kv_of_tokens_alone(tmp_path: Path) -> None:
    sim = Sim(tmp_path, layers=3, engine_facts={"kv_groups": list(HYBRID)})
    unhooked = Fate(unhooked=frozenset({(0, 0), (0, 2)}))
    sim.serve([Prompt("a", 128)], Rounding(32).policy(), fate=lambda n: unhooked)
    sim.write()
    report = build_report(tmp_path)
    due = {row["hook"]: row for row in report["coverage"]["summary"]}["save_kv_layer"]
    assert due["fired"] == due["eligible"] > 0
    assert "layer-not-hooked" not in [finding["id"] for finding in report["findings"]]


def test_the_report_tells_groups_of_each_kind_and_block_size(tmp_path: Path) -> None:
    groups = group("SlidingWindowSpec", 32, 0), group("SlidingWindowSpec", 32, 1), group("MambaSpec", 64, 2)
    told = build_report(served(tmp_path, *groups))["run"]["engines"][0]["kv_groups"]
    assert [(row["kind"], row["keeps"], row["block_size"], row["groups"], row["layers"]) for row in told] == [
        ("SlidingWindowSpec", "tokens", 32, 2, 2),
        ("MambaSpec", "state", 64, 1, 1),
    ]


def test_a_workers_word_of_its_layers_goes_before_a_schedulers(tmp_path: Path) -> None:
    told = {"kv_layers": LAYERS[:2], "other_layers": {LAYERS[2]: "encoder"}}
    run = read_run(served(tmp_path, group("FullAttentionSpec", 32, 0, 1), told=told))
    assert layers_of(run) == tuple(LAYERS[:2])
    assert any(note.startswith("1 layer keeps KV of the encoder") for note in run.notes)


def no_kv(path: Path, worker_class: str = "W", **told: Any) -> Path:
    """A run of two prompts on a model without a layer that keeps KV of tokens."""
    sim = Sim(path, layers=0, engine_facts={"kv_groups": []})
    sim.workers[0].fact(Fact.WORKER, {"ordinal": sim.tag, "worker_class": worker_class, **told}, sim.t)
    sim.serve([Prompt("a", 128), Prompt("b", 40)], Rounding(32).policy())
    sim.write()
    return path


def test_a_model_without_kv_has_empty_books_and_no_fault(tmp_path: Path) -> None:
    report = build_report(no_kv(tmp_path))
    assert report["verdict"].startswith("No layer of this model keeps KV of tokens")
    assert [report["ledger"][book]["total"] for book in ("saves", "loads")] == [0, 0]
    assert not report["findings"]


def test_states_alone_are_no_kv_of_tokens_either(tmp_path: Path) -> None:
    report = build_report(no_kv(tmp_path, other_layers={"m": "state"}))
    assert report["verdict"].startswith("No layer of this model keeps KV of tokens")


def test_a_worker_that_said_nothing_is_not_one_without_kv(tmp_path: Path) -> None:
    report = build_report(no_kv(tmp_path, worker_class=""))
    assert report["ledger"]["saves"]["accounts"] == {"not-observed": 168}
