"""From what was observed to the answers: pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvtrace.verify.answers import Answered
from kvtrace.verify.observed import Facts, Observed
from kvtrace.verify.property import Property
from kvtrace.verify.workload import Workload, parse


def workloads(properties: Sequence[Property], facts: Facts) -> list[tuple[str, Workload]]:
    """What is asked for each property; those that fit into this engine."""
    found = []
    for one in properties:
        text = one.workload(facts)
        if text:
            workload = parse(text)
            if workload.longest(facts.longest):
                found.append((one.id, workload))
    return found


def judged(properties: Sequence[Property], what: Observed) -> list[Answered]:
    """The answers, in the order of the properties."""
    return [Answered(one.id, one.title, one.judge(what.of(one.id), what)) for one in properties]
