"""The report's types, the schema that is made of them, its published file, and our small checker of it."""

from __future__ import annotations

import copy
import json
import math
import random
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, TypedDict, get_args

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutate import mutated
from sample import sample, with_device, with_loads

from kvtrace.gate.baseline import baseline_schema
from kvtrace.report.model import Severity, report_schema
from kvtrace.report.shape import Bounds, Digits, Most, json_schema, row
from kvtrace.report.validate import problem
from kvtrace.terms import SEVERITIES, Stage

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = report_schema()
KNOWN = {
    "$schema", "$id", "$ref", "$defs", "title", "description", "properties", "required", "type",
    "const", "enum", "additionalProperties", "items", "maxItems", "minimum", "maximum",
}  # fmt: skip
OPTIONAL = {
    "report": ("connectors", "graphs", "device", "digest", "layers", "logged"),
    "RunFacts": ("running", "profiles"), "RequestRows": ("unended",), "Limits": ("partly_watched",),
    "Ledgers": ("states",),
}  # fmt: skip
"""Absent where there is no such thing."""
JUDGE = jsonschema.Draft202012Validator(SCHEMA)


@pytest.mark.parametrize("schema", [SCHEMA, baseline_schema()])
def test_the_schemas_are_schemas_that_our_checker_understands(schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    assert unsupported(schema) == set()
    assert unsupported({"type": "object", "properties": {"a": {"pattern": "x"}}}) == {"pattern"}


def unsupported(schema: object) -> set[str]:
    """Keywords in a schema that our checker would ignore."""
    if not isinstance(schema, dict):
        return set()
    found = set(schema) - KNOWN
    for group in ("properties", "$defs"):
        for sub in schema.get(group, {}).values():
            found |= unsupported(sub)
    return found | unsupported(schema.get("items")) | unsupported(schema.get("additionalProperties"))


def test_the_types_name_what_the_terms_are() -> None:
    assert get_args(Severity) == SEVERITIES
    assert SCHEMA["$defs"]["Stage"]["properties"]["stage"]["maximum"] == max(Stage)


def test_the_published_files_are_made_from_the_types() -> None:
    """Else: python scripts/schemas.py"""
    files = runpy.run_path(str(ROOT / "scripts" / "schemas.py"))["files"]()
    assert len(files) == 3
    for path, text in files.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python scripts/schemas.py"
    report, baseline, _ = (json.loads(text) for text in files.values())
    assert (report, baseline) == (SCHEMA, baseline_schema())


class Part(TypedDict):
    """A part"""

    share: Annotated[float, Bounds(0, 1), "of all"]


class Row(TypedDict):
    """A row"""

    tokens: Annotated[float, Bounds(0, 100), Digits(1), "tokens"]
    share: Annotated[float | None, "of all"]
    rank: Annotated[Annotated[int, Bounds(-1, 9)] | None, "rank"]
    calls: Annotated[int, Bounds(0, 9), "calls"]
    name: Annotated[str, "name"]
    by: Annotated[dict[str, int], "by name"]


def test_a_row_takes_fields_by_name_and_makes_them_plain() -> None:
    source = {
        "tokens": np.float32(12.34), "share": math.nan, "rank": np.int64(-1), "calls": -3, "name": math.nan,
        "by": {"a": np.int64(2)}, "other": 1,
    }  # fmt: skip
    plain = {"tokens": 12.3, "share": None, "rank": -1, "calls": 0, "name": "", "by": {"a": 2}}
    assert row(Row, source) == plain
    assert json.dumps(row(Row, SimpleNamespace(**source))) == json.dumps(plain)
    assert row(Row, source, name="given", tokens=1e9) == {**plain, "name": "given", "tokens": 100}
    with pytest.raises(AttributeError):
        row(Row, SimpleNamespace(name="x"))


class _Later(TypedDict, total=False):
    part: Annotated[Part | None, "if any"]


class Whole(_Later):
    parts: Annotated[list[Part], Most(2), "one or two"]
    counts: Annotated[dict[str, Annotated[int, Bounds(0, 9)]], "by name"]
    kind: Annotated[Literal["a", "b"], "which"]


def test_types_become_a_schema() -> None:
    part = {"type": "number", "minimum": 0, "maximum": 1, "description": "of all"}
    closed = {"properties": {"share": part}, "required": ["share"], "additionalProperties": False}
    made = json_schema(Whole, "urn:x", "whole", "a test")
    assert made["$defs"] == {"Part": {"type": "object", "title": "A part", **closed}}
    assert made["required"] == ["parts", "counts", "kind"]  # and the optional field stands last
    assert made["properties"] == {
        "parts": {
            "type": "array",
            "items": {"$ref": "#/$defs/Part"},
            "maxItems": 2,
            "description": "one or two",
        },
        "counts": {
            "type": "object",
            "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
            "description": "by name",
        },
        "kind": {"enum": ["a", "b"], "description": "which"},
        "part": {"type": ["object", "null"], "title": "A part", **closed, "description": "if any"},
    }
    assert (
        problem({"parts": [{"share": 2}], "counts": {}, "kind": "a"}, made)
        == "parts[0].share is out of range: 2"
    )


@pytest.mark.parametrize("report", [sample(), with_loads(), with_device()])
def test_samples_are_valid(report: dict[str, Any]) -> None:
    JUDGE.validate(report)
    assert problem(report, SCHEMA) is None


def test_objects_are_closed_their_fields_described_and_required() -> None:
    def walk(part: Any, at: str) -> None:
        if not isinstance(part, dict):
            return
        if "properties" in part:
            assert part["additionalProperties"] is False, at
            optional = OPTIONAL.get(at, ())
            assert part["required"] == [name for name in part["properties"] if name not in optional], at
            for name, sub in part["properties"].items():
                assert sub["description"].strip(), f"{at}.{name}"
                walk(sub, f"{at}.{name}")
        walk(part.get("items"), f"{at}[]")

    walk(SCHEMA, "report")
    for name, part in SCHEMA["$defs"].items():
        walk(part, name)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (["run", "seconds"], "long", "run.seconds should be number"),
        (["run", "seconds"], float("nan"), "run.seconds should be number"),
        (["ledger", "saves", "total"], True, "ledger.saves.total should be integer"),
        (["ledger", "saves", "total"], 1 << 70, "ledger.saves.total is out of range"),
        (["findings", 0, "severity"], "doom", "findings[0].severity should be one of fault, limit, note"),
        (["stages", 0, "in"], -1, "stages[0].in is out of range"),
        (["requests", "rows"], [{}], "requests.rows[0] lacks 'id'"),
        (["extra"], 1, "unknown field 'extra'"),
        (["findings", 0, "events"], [{}] * 4, "findings[0].events has 4 items, more than 3"),
    ],
)
def test_a_problem_names_its_place(path: list[Any], value: object, says: str) -> None:
    report: Any = sample()
    part = report
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = value
    found = problem(report, SCHEMA)
    assert found is not None and says in found and "\n" not in found


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.sampled_from([with_loads(), with_device()]))
def test_our_checker_says_what_jsonschema_says(seed: int, whole: Any) -> None:
    report = mutated(copy.deepcopy(dict(whole)), random.Random(seed))
    assert (problem(report, SCHEMA) is None) == JUDGE.is_valid(report)
