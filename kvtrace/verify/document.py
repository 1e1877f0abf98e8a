"""The shape of what verify writes (``kvtrace.verify/1``): the JSON Schema is made from the types."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal, TypedDict, final

from kvtrace.report.shape import Bounds, Most, json_schema

_Seconds = Annotated[float, Bounds(0, 1_000_000_000)]


@final
class PropertyRow(TypedDict):
    """One property"""

    id: Annotated[str, "never renamed"]
    model: Annotated[str, "the small model that it was tried on; empty: the command's own"]
    title: Annotated[str, "what is true where it is proved"]
    answer: Literal["proved", "failed", "does not apply", "not observed"]
    says: Annotated[str, "why, in one sentence with the numbers that decide"]
    evidence: Annotated[list[str], Most(64), "what was seen"]
    requests: Annotated[list[str], Most(64), "ids of requests that show it"]
    case: Annotated[str, "a workload that shows a failure; empty where none is known"]
    again: Annotated[str, "the command that repeats that case alone; empty where none is known"]


@final
class Verified(TypedDict):
    """What one kvtrace verify found"""

    schema: Literal["kvtrace.verify/1"]
    subject: Annotated[str, "the connector"]
    suite: Literal["quick", "full"]
    seed: Annotated[int, Bounds(0, 1 << 63), "of the prompts"]
    run: Annotated[str, "the directory with the traced runs and the server's output"]
    passed: Annotated[bool, "no property failed"]
    stopped: Annotated[bool, "it was stopped before all was asked"]
    seconds: _Seconds
    notes: Annotated[list[str], Most(64), "what the reader should know"]
    properties: Annotated[list[PropertyRow], Most(4096), "in the order of the table of properties"]


@cache
def verify_schema() -> dict[str, Any]:
    """The published schema."""
    return json_schema(
        Verified, "urn:kvtrace:verify:1", "kvtrace verify", "Which properties of a connector were proved."
    )
