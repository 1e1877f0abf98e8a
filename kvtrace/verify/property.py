"""What a property is: a row with a statement, the workload that tries it, the judgement of its answers;
and what several of them ask, and say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtrace.verify.answers import Answered, Verdict
from kvtrace.verify.observed import Asked, EngineFacts, Observed
from kvtrace.verify.workload import Workload, parse

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


def workloads(properties: Sequence[Property], facts: EngineFacts) -> list[tuple[str, Workload]]:
    """What is asked for each property, as far as it fits into this engine."""
    texts = [(one.id, one.workload(facts)) for one in properties]
    asked = [(ident, parse(text).fitting(facts.longest)) for ident, text in texts if text]
    return [(ident, workload) for ident, workload in asked if workload is not None]


def judged(properties: Sequence[Property], what: Observed) -> list[Answered]:
    """The answers, in the order of the properties. Pure."""
    return [Answered(one.id, one.title, one.judge(what.of(one.id), what)) for one in properties]
