"""A connector whose metadata names nothing: the contract guards the work that was seen, and says the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
from gated import check, contract
from synth import Sim

from kvtrace.gate.baseline import baseline_schema
from kvtrace.gate.contract import make_baseline
from kvtrace.render.contract import contract_lines
from kvtrace.report.build import build_report

COPYING = {"start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save"}
OF_METADATA = {"bind_connector_metadata", "build_connector_meta"}


def traced(where: Path, hook: str | None = "save_kv_layer", watching: int = 1, mute: bool = True) -> Any:
    """The report of three prompts; their KV is read in `hook` ("": in the background, None: not at all)."""
    where.mkdir()
    sim = Sim(where, layers=2, block=16, kv_blocks=64)
    sim.watching = watching
    for name in "abc":
        sim.one_step(name, 64, unreadable=mute)
        if hook is not None:
            sim.read(name, 0, 64, hook=hook)
    sim.write()
    return build_report(where)


def work(report: Any) -> dict[str, bool | None]:
    return {row["hook"]: row["work"] for row in make_baseline(report)["coverage"]["hooks"]}


def test_seen_work_is_guarded_though_no_metadata_names_it(tmp_path: Path) -> None:
    good = traced(tmp_path / "good")
    assert good["ledger"]["saves"]["accounts"]["saved"] > 0
    (note,) = [stage["note"] for stage in good["stages"] if stage["name"] == "hook"]
    assert note == "save_kv_layer called in 6 layer-steps, in at least 6 with work", (
        "as the ledger of the same run"
    )
    rows = work(good)
    assert rows["save_kv_layer"] is True
    assert {name for name in rows if rows[name] is None} == (COPYING | OF_METADATA) - {"save_kv_layer"}
    outcome = check(traced(tmp_path / "bad", hook=None, mute=False), contract(good))
    assert {("save_kv_layer", "failed"), ("tokens kept", "failed")} <= {
        (one.subject, one.state) for one in outcome.failed
    }


@pytest.mark.parametrize("hook", ["", None])
def test_work_that_no_call_was_seen_to_do_is_said_unknown(tmp_path: Path, hook: str | None) -> None:
    report = traced(tmp_path / "run", hook=hook, watching=1 if hook == "" else 0)
    rows = work(report)
    assert all(rows[name] is None for name in COPYING | OF_METADATA)
    assert all(rows[name] is False for name in rows if name not in COPYING | OF_METADATA)
    baseline = make_baseline(report)
    jsonschema.validate(baseline, baseline_schema())
    (line,) = [line for line in contract_lines(baseline, "file", []) if "not guarded" in line]
    assert "save_kv_layer" in line and "get_finished" not in line


def test_work_no_longer_observed_is_no_failure_of_its_own(tmp_path: Path) -> None:
    """Silence is no absence: a later run that watched nothing says so, and the tokens decide."""
    outcome = check(traced(tmp_path / "later", hook=None, watching=0), contract(traced(tmp_path / "good")))
    (one,) = [one for one in outcome.checks if one.kind == "work"]
    assert (one.subject, one.state) == ("save_kv_layer", "changed") and "not observed" in one.text
