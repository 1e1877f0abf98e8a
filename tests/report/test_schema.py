"""The published schema, our small checker of it, and the TypedDicts: three that must agree."""

from __future__ import annotations

import copy
import random
import typing
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutate import mutated
from sample import sample, with_device, with_loads

from kvtrace.report import model
from kvtrace.report.validate import packaged_schema, problem, unsupported

SCHEMA = packaged_schema()
LATER = ("graphs", "device")
"""Added to the schema after its first reports: optional, so that those stay valid."""
JUDGE = jsonschema.Draft202012Validator(SCHEMA)


def test_the_schema_is_a_schema_that_our_checker_understands() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert unsupported(SCHEMA) == set()
    assert unsupported({"type": "object", "properties": {"a": {"pattern": "x"}}}) == {"pattern"}


@pytest.mark.parametrize("report", [sample(), with_loads(), with_device()])
def test_samples_are_valid(report: dict[str, Any]) -> None:
    JUDGE.validate(report)
    assert problem(report, SCHEMA, SCHEMA) is None


def test_every_object_of_ours_is_closed_and_all_its_fields_are_required() -> None:
    def walk(part: Any, at: str) -> None:
        if not isinstance(part, dict):
            return
        if "properties" in part:
            assert part["additionalProperties"] is False, at
            later = LATER if at == "report" else ()
            assert part["required"] == [name for name in part["properties"] if name not in later], at
            for name, sub in part["properties"].items():
                walk(sub, f"{at}.{name}")
        walk(part.get("items"), f"{at}[]")

    walk(SCHEMA, "report")
    for name, part in SCHEMA["$defs"].items():
        walk(part, name)


def test_typed_dicts_have_the_fields_of_the_schema() -> None:
    """Walks both trees side by side: same names, same kinds."""

    def kinds(hint: Any) -> set[str]:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Literal:
            return {"string"}
        if origin is list:
            return {"array"}
        if origin is dict or typing.is_typeddict(hint):
            return {"object"}
        if arguments:
            return set().union(*map(kinds, arguments))
        return {{int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}[hint]}

    def compare(hint: Any, rule: dict[str, Any], at: str) -> None:
        rule = SCHEMA["$defs"][rule["$ref"].split("/")[-1]] if "$ref" in rule else rule
        declared = rule.get("type", "string")
        assert kinds(hint) == ({declared} if isinstance(declared, str) else set(declared)), at
        if "enum" in rule or "const" in rule:
            assert set(typing.get_args(hint)) == set(rule.get("enum", [rule.get("const")])), at
        shape = next((one for one in [hint, *typing.get_args(hint)] if typing.is_typeddict(one)), None)
        if typing.get_origin(hint) is list:
            compare(typing.get_args(hint)[0], rule["items"], f"{at}[]")
        elif shape is not None:
            hints = typing.get_type_hints(shape)
            assert set(hints) == set(rule["properties"]), at
            for name, sub in hints.items():
                compare(sub, rule["properties"][name], f"{at}.{name}")

    compare(model.Report, SCHEMA, "report")


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
    found = problem(report, SCHEMA, SCHEMA)
    assert found is not None and says in found and "\n" not in found


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.sampled_from([with_loads(), with_device()]))
def test_our_checker_says_what_jsonschema_says(seed: int, whole: Any) -> None:
    report = mutated(copy.deepcopy(dict(whole)), random.Random(seed))
    assert (problem(report, SCHEMA, SCHEMA) is None) == JUDGE.is_valid(report)
