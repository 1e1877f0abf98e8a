"""What a property is: a row with a statement, the workload that tries it, the judgement of its answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtrace.verify.answers import Verdict
from kvtrace.verify.observed import Asked, EngineFacts, Observed

QUICK, FULL = "quick", "full"
SUITES = (QUICK, FULL)


def no_workload(facts: EngineFacts) -> str:
    """Of a property that is judged by the requests of all others."""
    return ""


@dataclass(frozen=True)
class Property:
    """One row.

    Attributes:
        id: never renamed.
        title: what is true where it is proved.
        judge: (its own requests, everything) -> the verdict. Pure.
        workload: facts of the engine -> what is asked for it (:mod:`kvtrace.verify.workload`); "" nothing.
        suite: the smallest one that it belongs to.
        shrinks: whether a smaller workload that fails it says the same: not where a prompt may be too short.
    """

    id: str
    title: str
    judge: Callable[[list[Asked], Observed], Verdict]
    workload: Callable[[EngineFacts], str] = no_workload
    suite: str = QUICK
    shrinks: bool = True
