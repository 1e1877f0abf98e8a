"""Layer groups, the file of a baseline, its schema, and whatever else may be thrown at a gate."""

from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
from gated import check, contract, report_of
from hypothesis import given, settings
from hypothesis import strategies as st
from mutate import mutated
from sample import sample, with_loads

from kvtrace.errors import KvtraceError
from kvtrace.gate.baseline import baseline_schema
from kvtrace.gate.contract import baseline_text, make_baseline
from kvtrace.gate.diff import difference
from kvtrace.gate.layers import group_of, index_of, ranges, spelled, within
from kvtrace.gate.read_baseline import parse_baseline
from kvtrace.gate.rules import NAMES, Rules, from_options
from kvtrace.gate.shares import kept, saved_of_offered
from kvtrace.render.check import check_page
from kvtrace.render.contract import contract_lines
from kvtrace.render.diff import diff_page
from kvtrace.render.github import commands, silenced
from kvtrace.render.junit import junit_xml
from kvtrace.render.markdown import markdown
from kvtrace.render.page import Screen
from kvtrace.render.sarif import sarif_json
from kvtrace.render.terminal import terminal
from kvtrace.report.load import check_report
from kvtrace.report.model import Report
from kvtrace.words import percent

SCHEMA = baseline_schema()
REPORTS = Path(__file__).resolve().parents[2] / "reports" / "vllm-0.32.0-cpu"


@pytest.mark.parametrize("name", ["flagship", "flagship-healthy", "healthy-example", "preempted-before-save"])
def test_baseline_check_and_diff_give_the_verdicts_share(name: str) -> None:
    """Generated tokens that are never offered are in none of them: one said 89.8 %, another 90.8 %."""
    report = check_report(json.loads((REPORTS / f"{name}.json").read_text(encoding="utf-8")), name)
    assert report["ledger"]["saves"]["accounts"]["not-saved:decode-not-offered"]
    share = re.search(r"computed here \(([\d.]+ %)\)", report["verdict"])
    assert share is not None
    baseline = contract(report)
    words = contract_lines(baseline.baseline, "base.json", [])[0]
    assert f"{share[1]} of the tokens stored or loaded" in words
    (held,) = (one for one in check(report, baseline).checks if one.subject == "tokens kept")
    assert isinstance(held.after, float) and percent(held.after) == share[1]
    other = copy.deepcopy(report)
    tokens = other["ledger"]["saves"]["tokens"]
    lost = next(name for name in tokens if name.startswith("not-saved:") and name.count("-not-offered") == 0)
    tokens["saved"], tokens[lost] = tokens["saved"] + tokens[lost], 0
    (change,) = (one for one in difference(report, other, "a", "b").saves if one.name == "saved")
    assert isinstance(change.before, float) and percent(change.before) == share[1]


@pytest.mark.parametrize(
    ("layer", "group", "index"),
    [
        ("model.layers.0.self_attn.attn", "model.layers.*.self_attn.attn", "0"),
        ("model.layers.11.self_attn.attn", "model.layers.*.self_attn.attn", "11"),
        ("3", "*", "3"),
        ("h.7", "h.*", "7"),
        ("model.layers.2.experts.5.attn", "model.layers.*.experts.*.attn", "2.5"),
        ("attn0", "attn0", ""),
        ("model.mtp2.layer_3.attn", "model.mtp2.layer_3.attn", ""),
        ("", "", ""),
    ],
)
def test_groups_of_layers(layer: str, group: str, index: str) -> None:
    assert (group_of(layer), index_of(layer)) == (group, index)


def saves(report: Report, accounts: dict[str, int]) -> Report:
    """The report with these tokens in its ledger of saves, of one layer on one rank."""
    tokens = {name: float(amount) for name, amount in accounts.items()}
    whole = sum(accounts.values())
    report["ledger"]["saves"].update(
        accounts=accounts, total=whole, tokens=tokens, total_tokens=whole, pairs=1
    )
    return report


@pytest.mark.parametrize(
    ("accounts", "share"),
    [
        ({"saved": 30, "not-saved:hook-raised": 10}, 0.75),
        ({"saved": 40, "loaded": 60, "local-hit": 9, "not-saved:decode-not-offered": 9}, 1.0),
        ({"saved": 40, "not-loaded:load-not-injected": 60}, 1.0),  # not computed here
        ({"loaded": 60, "not-loaded:loaded-partly": 4}, 1.0),
        ({"not-loaded:load-not-injected": 60}, None),
        ({}, None),
    ],
)
def test_saved_of_offered(accounts: dict[str, int], share: float | None) -> None:
    assert saved_of_offered(saves(sample(), accounts)["ledger"]["saves"]) == share


def test_what_was_reused_from_the_gpu_is_not_counted_as_kept() -> None:
    """Whether it was ever stored, its reuse does not say: 78.6 % was said, where 512 of 1 300 were stored."""
    part = {"saved": 0.2, "loaded": 0.1, "local-hit": 0.5, "not-saved:hook-raised": 0.2}
    assert kept(part) == pytest.approx(0.6)
    assert kept({"local-hit": 1.0}) == 0.0


def test_more_reuse_hides_no_loss_and_is_none(tmp_path: Path) -> None:
    def report(saved: int, lost: int, reused: int) -> Report:
        accounts = {"saved": saved, "local-hit": reused, "not-saved:hook-raised": lost}
        return saves(report_of(tmp_path / f"{saved}-{lost}-{reused}"), accounts)

    good = contract(report(80, 20, 0))
    assert "tokens kept" not in {one.subject for one in check(report(40, 10, 50), good).failed}
    assert "tokens kept" in {one.subject for one in check(report(40, 60, 900), good).failed}


def test_ranges() -> None:
    assert ranges(["5", "0", "1", "2", "10"]) == ["0-2", "5", "10"]
    assert ranges(["1.10", "1.2", "7"]) == ["7", "1.2", "1.10"]
    assert within("1", ["0-2"]) and within("1.2", ["1.2"]) and not within("3", ["0-2", "5"])
    group = "model.layers.*.attn"
    assert spelled(group, ["0", "1"], True) == group
    assert spelled(group, ["3"], False) == "model.layers.3.attn"
    assert spelled(group, ["0", "1", "4"], False) == "model.layers.{0-1,4}.attn"
    assert spelled("a.*.b.*", ["1.2", "1.3"], False) == "a.*.b.* at 1.2, 1.3"
    assert spelled(group, map(str, range(0, 40, 2)), False) == "model.layers.{0,2,4,6,8,10,…}.attn"


@given(st.sets(st.integers(0, 200)), st.integers(0, 200))
def test_a_range_holds_what_it_was_made_of(numbers: set[int], other: int) -> None:
    assert within(str(other), ranges(map(str, numbers))) == (other in numbers)


@pytest.mark.parametrize("report", [sample(), with_loads()])
def test_a_baseline_is_valid_and_comes_back_from_its_file(report: Any) -> None:
    baseline = make_baseline(report)
    jsonschema.Draft202012Validator(SCHEMA).validate(baseline)
    text = baseline_text(baseline)
    assert json.loads(text) == baseline
    file = parse_baseline(text.encode(), "b.json")
    assert file.baseline == baseline
    lines = text.splitlines()
    for row in [
        *baseline["coverage"]["hooks"],
        *baseline["findings"],
        *baseline["engines"],
        baseline["ledger"]["saves"],
    ]:
        assert json.dumps(row) in lines[file.line(row) - 1]
    assert check(report, file).passed
    assert parse_baseline(json.dumps(baseline).encode(), "one-line.json").line(baseline["engines"][0]) == 1


def test_every_hook_and_op_has_a_name_for_rules() -> None:
    assert {"save_kv_layer", "build_connector_meta", "unified_attention_with_output"} <= set(NAMES)
    assert from_options(["save_kv_layer=0.5", "save_kv_layer=1"]).minimum == {"save_kv_layer": 1.0}


def drawn(report: Any, baseline: Any, rules: Rules) -> None:
    """Everything that a gate and a comparison print."""
    outcome = check(report, baseline, rules)
    ElementTree.fromstring(junit_xml(outcome))
    json.loads(sarif_json(outcome))
    json.dumps(outcome.document(), allow_nan=False)
    assert all(line.startswith(("::error ", "::notice ")) and "\n" not in line for line in commands(outcome))
    changes = difference(report, with_loads(), "a", "b")
    json.dumps(changes.document(), allow_nan=False)
    for page in (check_page(outcome), diff_page(changes)):
        assert "\x1b" not in markdown(page)
        for width in (60, 100):
            assert "\x1b" not in terminal(page, Screen(width))


@settings(max_examples=120)
@given(st.integers(0, 2**32))
def test_any_report_is_judged_or_refused_in_one_line(seed: int) -> None:
    rng = random.Random(seed)
    report: Any = mutated(copy.deepcopy(dict(rng.choice([sample, with_loads])())), rng)
    try:
        value = check_report(report, "r.json")
    except KvtraceError as error:
        assert "\n" not in str(error)
        return
    rules = Rules(minimum={"save_kv_layer": 1.0}, min_saved_tokens=0.5, forbid=frozenset({"fault"}))
    drawn(value, contract(sample()), rules)
    drawn(value, None, Rules())
    try:
        baseline_text(make_baseline(value))
    except KvtraceError as error:
        assert "\n" not in str(error)


@settings(max_examples=120)
@given(st.integers(0, 2**32))
def test_any_baseline_is_used_or_refused_in_one_line(seed: int) -> None:
    damaged = mutated(json.loads(baseline_text(make_baseline(with_loads()))), random.Random(seed))
    try:
        data = json.dumps(damaged).encode()
        file = parse_baseline(data, "b.json")
    except KvtraceError as error:
        assert "\n" not in str(error)
        return
    drawn(sample(), file, Rules())


def test_a_workflow_log_takes_no_orders_from_a_report() -> None:
    text = silenced("a\n::set-output name=x::y\n", "0123456789abcdef")
    assert text.splitlines() == [
        "::stop-commands::0123456789abcdef", "a", "::set-output name=x::y", "::0123456789abcdef::",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="long random"):
        silenced("a", "short")


def test_many_failures_without_a_finding_are_ten_annotations() -> None:
    report = sample()
    report["findings"] = []
    for row in [*report["coverage"]["hooks"], *report["coverage"]["ops"]]:
        row["fired"] = 0
    for number, target in enumerate(list(report["instrumentation"]["targets"])):
        target["status"] = "missing"
        report["instrumentation"]["targets"].append({**target, "id": f"other-{number}"})
    lines = [one for one in commands(check(report, contract(sample()))) if one.startswith("::error")]
    assert len(lines) == 10 and "more regressions" in lines[-1]
