"""The shape of a baseline (``kvtrace.baseline/1``) for mypy; the published truth is ``schema/``."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, Final, Literal, TypedDict, cast

from kvtrace.errors import KvtraceError

SCHEMA: Final = "kvtrace.baseline/1"
TOLERANCE: Final = 0.02
"""By how much a share of a ledger may be worse than the baseline's, in shares of all tokens."""
MAX_ROWS = 4096


class GateError(KvtraceError):
    """A baseline, rule or configuration that cannot be used."""


class Made(TypedDict):
    kvtrace: str
    vllm: str | None


EngineShape = TypedDict(
    "EngineShape",
    {
        "connector": "str | None",
        "class": str,
        "module": str,
        "role": str,
        "ranks": "list[int]",
        "kv_layers": int,
    },
)


class _CoverageRow(TypedDict):
    share: float
    work: bool


class CoverageRow(_CoverageRow, total=False):
    """One hook or op on one group of layers (``layers`` is absent for hooks of the whole step)."""

    hook: str
    op: str
    layers: str
    count: int
    only: list[str]
    ranks: list[int]


class CoveragePart(TypedDict):
    hooks: list[CoverageRow]
    ops: list[CoverageRow]


class LedgerPart(TypedDict):
    saves: dict[str, float]
    loads: dict[str, float]


class Allowed(TypedDict):
    id: str
    severity: Literal["fault", "limit", "note"]


class Baseline(TypedDict):
    schema: Literal["kvtrace.baseline/1"]
    made: Made
    engines: list[EngineShape]
    coverage: CoveragePart
    ledger: LedgerPart
    findings: list[Allowed]
    targets: list[str]


@cache
def baseline_schema() -> dict[str, Any]:
    """The published JSON Schema of baselines."""
    text = (files("kvtrace.gate") / "schema" / "kvtrace.baseline.1.json").read_text(encoding="utf-8")
    return cast("dict[str, Any]", json.loads(text))
