"""Connectors that vLLM gets past its factory, on a real engine."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
from side_by_side import Done, Place, Ran, Script

from kvtrace.agent.hooks import held
from kvtrace.trace import hooks

pytestmark = pytest.mark.engine
SCRIPT = Path(__file__).with_name("past_factory.py")


def past_factory(place: Place) -> Done:
    return place.start(sys.executable, SCRIPT, place.model, place.store)


SCRIPTS = (past_factory,)


def test_they_are_traced_and_the_report_says_what_was_not_seen(ran: Mapping[Script, Ran]) -> None:
    run = ran[past_factory]
    assert run.done.returncode == 0, run.done.stderr[-3000:]
    report = json.loads((run.place.run / "report.json").read_text())
    fired = {row["hook"] for row in report["coverage"]["hooks"] if row["fired"]}
    assert {hooks.BUILD_METADATA.name, hooks.BIND_METADATA.name, hooks.SAVE_LAYER.name} <= fired
    saves = report["ledger"]["saves"]
    assert saves["accounts"]["saved"] > 0 and sum(saves["accounts"].values()) == saves["total"]
    notes = [note for note in report["limits"]["notes"] if note.startswith("not every call of a hook")]
    assert len(notes) == 2 and all(" of Mine on the " in note and held.LATE in note for note in notes)
    assert [one["id"] for one in report["findings"] if one["severity"] == "fault"] == []


def test_vllm_calls_no_hook_through_a_class() -> None:
    """``Class.hook(connector)`` would pass by what vLLM holds. What a connector does is its own business."""
    (root,) = find_spec("vllm").submodule_search_locations or [""]  # type: ignore[union-attr]
    passed = []
    for path in Path(root).rglob("*.py"):
        text = path.read_text(encoding="utf-8", errors="replace")
        if "kv_connector" not in text or "kv_connector/v1" in path.as_posix():
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in hooks.NAMES:
                holder = getattr(node.func, "value", None)
                name = getattr(holder, "id", getattr(holder, "attr", ""))
                of_type = isinstance(holder, ast.Call) and getattr(holder.func, "id", "") == "type"
                if of_type or name[:1].isupper() or name.endswith(("cls", "class")):
                    passed.append(f"{path.relative_to(root)}:{node.lineno}")
    assert not passed
