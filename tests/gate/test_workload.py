"""A gate says first that the workload changed, and names the layer in which KV was lost."""

from __future__ import annotations

from pathlib import Path

from gated import Plan, check, contract, report_of
from synth import Fate

from kvtrace.gate.rules import Rules
from kvtrace.render.check import check_page
from kvtrace.render.page import Screen
from kvtrace.render.terminal import terminal


def test_a_changed_workload_is_said_before_all_else(tmp_path: Path) -> None:
    good = report_of(tmp_path / "good")
    other = report_of(tmp_path / "other", Plan(prompts=[64, 128, 20, 20, 20, 20, 20]))
    outcome = check(other, contract(good))
    assert outcome.notes[0].startswith(
        "the workload is not the baseline's (6 requests, 1 696 prompt tokens, 1 714 with the answers there; "
        "7 requests, 292 prompt tokens, 313 with the answers here)"
    )
    page = terminal(check_page(outcome), Screen(200)).splitlines()
    assert "the workload is not the baseline's" in page[2]
    assert not any("workload" in note for note in check(good, contract(good)).notes)


def test_the_layer_in_which_kv_was_lost_is_named(tmp_path: Path) -> None:
    good = report_of(tmp_path / "good")
    lost = Fate(unhooked=frozenset({(1, 2)}))
    bad = report_of(tmp_path / "bad", Plan(fate=lost))
    (kept,) = [one for one in check(bad, contract(good)).failed if one.subject == "tokens kept"]
    assert "on rank 1: 0 of" in kept.text and "prompt tokens saved" in kept.text
    (rule,) = check(bad, None, Rules(min_saved_tokens=0.9)).failed
    assert "on rank 1: 0 of" in rule.text and rule.after == 0
