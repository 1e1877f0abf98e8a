"""The shape of a baseline (``kvtrace.baseline/1``), written once: the JSON Schema is made from the types."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Final, Literal, TypeAlias, TypedDict, final

from kvtrace.errors import KvtraceError
from kvtrace.report.model import Severity, Share
from kvtrace.report.shape import Bounds, Most, json_schema

SCHEMA: Final = "kvtrace.baseline/1"
TOLERANCE: Final = 0.02
"""By how much a share of a ledger may be worse than the baseline's, in shares of all tokens."""
MAX_ROWS = 4096
Tokens = Annotated[int, Bounds(0, 2**53)]
Few = Annotated[int, Bounds(0, 1_000_000)]
Rank = Annotated[int, Bounds(-1, 1_000_000)]


class GateError(KvtraceError):
    """A baseline, rule or configuration that cannot be used."""


@final
class Traffic(TypedDict):
    """What the engines were asked"""

    requests: Annotated[Few, "requests"]
    prompt: Annotated[Tokens, "prompt tokens of those that were admitted"]
    computed: Annotated[Tokens, "tokens whose KV was computed or reused, prompts and answers"]


class _Models(TypedDict, total=False):
    traffic: Annotated[Traffic, "said where it differs: shares of tokens follow it"]
    models: Annotated[list[str], Most(MAX_ROWS), "of the engines, paths without their folders; must fit"]


@final
class Made(_Models):
    """What the run was made with"""

    kvtrace: Annotated[str, "version, shown where it differs"]
    vllm: Annotated[str | None, "version, shown where it differs"]


EngineShape = TypedDict(
    "EngineShape",
    {
        "connector": Annotated[str | None, "name in the configuration, null without one"],
        "class": Annotated[str, "class that is live; empty where none is"],
        "module": Annotated[str, "its module"],
        "role": Annotated[str, "kv_role"],
        "ranks": Annotated[list[Rank], Most(MAX_ROWS), "ranks of its workers"],
        "kv_layers": Annotated[Few, "layers that own KV"],
    },
)


class _Where(TypedDict, total=False):
    layers: Annotated[str, "group of layers, numbers as *; absent for calls that come once a step"]
    count: Annotated[Few, "layers in the group"]
    only: Annotated[list[str], Most(MAX_ROWS), "those of these numbers; absent: all"]
    ranks: Annotated[list[Rank], Most(MAX_ROWS), "on these ranks; absent: on all"]


class _Covered(_Where):
    share: Annotated[Share, "calls in the steps in which it is due"]
    work: Annotated[
        bool | None,
        "true where it had something to store or load at least once; null where that is not known (the "
        "metadata names nothing and no call was seen to do it): not guarded; false for ops",
    ]


@final
class BaselineHook(_Covered):
    """One connector hook on one group of layers"""

    hook: Annotated[str, "connector method"]


@final
class BaselineOp(_Covered):
    """One attention op on one group of layers"""

    op: Annotated[str, "attention op"]


CoverageRow: TypeAlias = BaselineHook | BaselineOp


def subject(row: CoverageRow) -> tuple[Literal["hook", "op"], str]:
    """What a row speaks of, and its name."""
    return ("hook", row["hook"]) if "hook" in row else ("op", row["op"])


class CoveragePart(TypedDict):
    """How often hooks and ops were called"""

    hooks: Annotated[list[BaselineHook], Most(MAX_ROWS), "connector hooks"]
    ops: Annotated[list[BaselineOp], Most(MAX_ROWS), "attention ops"]


class LedgerPart(TypedDict):
    """Outcome -> share of all token-layers of the ledger; empty where that had none"""

    saves: Annotated[dict[str, Share], "every token computed or reused"]
    loads: Annotated[dict[str, Share], "every prompt token"]


class Allowed(TypedDict):
    """A finding of the good run"""

    id: Annotated[str, "cause"]
    severity: Annotated[Severity, "a more severe one fails the check"]


class Baseline(TypedDict):
    """kvtrace.baseline/1"""

    schema: Annotated[Literal["kvtrace.baseline/1"], "what this document is"]
    made: Annotated[Made, "what the run was made with"]
    engines: Annotated[list[EngineShape], Most(MAX_ROWS), "what each engine is"]
    coverage: Annotated[CoveragePart, "calls, of those that were due"]
    ledger: Annotated[LedgerPart, "what became of the tokens"]
    findings: Annotated[list[Allowed], Most(MAX_ROWS), "none of them fails a check"]
    targets: Annotated[list[str], Most(MAX_ROWS), "places in vLLM that were found and hooked"]


@cache
def baseline_schema() -> dict[str, Any]:
    """The JSON Schema of baselines."""
    return json_schema(
        Baseline,
        "urn:kvtrace:baseline:1",
        "kvtrace baseline",
        "The contract of a good run: made by kvtrace baseline, held against later runs by kvtrace check.",
    )
