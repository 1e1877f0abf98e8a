"""scripts/ablation.py: what each rule is worth is felt by switching it off."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import ablation
import pytest
import score as scoring
from ablation import RULES, Answer, Kept, Rule, kept_runs, row, table

from kvtrace.ledger.ends import NOT_SAVED, SaveEnd
from kvtrace.ledger.saves import positions
from kvtrace.terms import SAVED, Grade

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_stands_where_the_table_says(rule: Rule) -> None:
    module, _, name = rule.place.partition(":")
    found = import_module(module)
    for part in name.split("."):
        if (owner := found) and part == "entries":
            assert "entries" in owner.__dataclass_fields__
            return
        found = getattr(found, part)


def test_without_its_rule_what_came_back_was_of_other_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    token = positions.Token(stores=(positions.StoreResult(SaveEnd.MISPLACED, Grade.READ),), proved=True)
    assert positions.decide(token).name == SAVED
    monkeypatch.setattr(positions, "_not_saved", positions._not_saved)  # put back in the end
    next(one for one in RULES if one.off is ablation._never_back).switch_off()
    assert positions.decide(token).name == NOT_SAVED


def test_a_rule_is_worth_what_changes_without_it() -> None:
    right, silent = Answer(scoring.RIGHT, "", "a"), Answer("silent", "", "b")
    alarm = Answer(scoring.FALSE_ALARM, "1 tokens called saved, 0 taken", "c")
    felt, cells = row(
        Rule("the unit", "", None), [right, right, silent, right], [right, silent, right, alarm]
    )
    assert (felt, cells) == (5, ["the unit", "2", "1", "+1", "+1", "3"])
    assert row(Rule("windows", "", None), [right], [right])[1] == ["windows", "0", "0", "0", "0", "0"]
    page = table({"a": (0, ["a", *"00000"]), "b": (5, ["b", *"50000"])}, 7)
    assert page.startswith("7 kept runs.") and page.index("| b |") < page.index("| a |")


def test_a_trace_is_read_once_for_all_causes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rules, read = import_module("kvtrace.causes.diagnose"), []
    all_rules = rules.RULES
    monkeypatch.setattr(ablation, "read_run", lambda trace: read.append(trace) or trace)
    monkeypatch.setattr(ablation, "diagnose", lambda _: [one for one in all_rules if one not in rules.RULES])

    def of_missing(_: Path, missing: list[object]) -> dict[str, object]:
        said = [{"id": one.__module__.rpartition(".")[2], "severity": "note"} for one in missing]
        loads = {"grades": {"loaded": {"proved": 7}}}
        return {"findings": said, "ledger": {"saves": {"accounts": [], "grades": {}}, "loads": loads}}

    monkeypatch.setattr(ablation, "assemble", of_missing)
    causes = [at for at, one in enumerate(RULES) if one.is_cause][:2]
    found = ablation.answers_of_causes((causes, Kept(tmp_path)))
    names = [RULES[at].name.removeprefix("cause ").replace("-", "_") for at in causes]
    grades = [{}, {"loaded": {"proved": 7}}]
    assert [json.loads(one.said) for one in found] == [[[[name, "note"]], [], grades] for name in names]
    assert read == [tmp_path] and all_rules is rules.RULES


def test_only_runs_whose_truth_was_proven_are_scored(tmp_path: Path) -> None:
    for name, document in (
        ("7", {"truth": {"problem": ""}}),
        ("8-shifted", {"truth": {"problem": ""}}),
        ("9", {"truth": {"problem": "its share is small"}}),
        ("10", {"broken": "it died"}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "outcome.json").write_text(json.dumps(document), encoding="utf-8")
    assert [(one.seed, one.fault) for one in kept_runs(tmp_path)] == [(7, None), (8, "shifted")]


def test_a_folder_without_runs_is_a_usage_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ablation.__file__, "--keep", str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "ablation: no kept run there: make some with scripts/accuracy.py --keep DIR\n"
