"""From what was observed to the answers: pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvtrace.verify.answers import Answered
from kvtrace.verify.observed import EngineFacts, Observed
from kvtrace.verify.property import Property
from kvtrace.verify.workload import Workload, parse


def workloads(properties: Sequence[Property], facts: EngineFacts) -> list[tuple[str, Workload]]:
    """What is asked for each property, as far as it fits into this engine."""
    texts = [(one.id, one.workload(facts)) for one in properties]
    asked = [(ident, parse(text).fitting(facts.longest)) for ident, text in texts if text]
    return [(ident, workload) for ident, workload in asked if workload is not None]


def judged(properties: Sequence[Property], what: Observed) -> list[Answered]:
    """The answers, in the order of the properties."""
    return [Answered(one.id, one.title, one.judge(what.of(one.id), what)) for one in properties]
