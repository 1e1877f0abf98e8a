"""metadata-not-bound: the forward of a real step ran without connector metadata."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case
from kvtrace.causes.model import Finding, RuledOut
from kvtrace.causes.steps import calls, skipped
from kvtrace.words import count, plural

ID = "metadata-not-bound"


def rule(case: Case) -> Iterator[Finding | RuledOut]:
    run = case.run
    unbound = skipped(run, "NO_CONNECTOR_METADATA")
    hooked = skipped(run, "HOOKED")
    steps, bound, _, _ = calls(run, "bind_connector_metadata")
    # Cleared too early is a cause of its own: the metadata was bound, and the same calls show it.
    if ID in case.booked or (unbound and "metadata-cleared-early" not in case.booked):
        overriding = sorted(
            {
                f"{c.cls}.{name}"
                for c in run.connectors
                for name in c.overrides
                if name in ("bind_connector_metadata", "clear_connector_metadata") and c.role == "worker"
            }
        )
        evidence = [
            f"{count(unbound)} attention calls in real steps ran while has_connector_metadata() was false, "
            f"{count(hooked)} with metadata; bind_connector_metadata was called in {bound}/{steps} steps"
        ]
        if overriding:
            evidence.append(
                f"overridden by the connector: {', '.join(overriding)} (is super() called there?)"
            )
        lost = len(case.booked[ID].requests) if ID in case.booked else 0
        yield case.finding(
            ID,
            "The forward ran without the connector's metadata, so vLLM left its layer hooks out in silence"
            + (f": {plural(lost, 'request')} with a store entry lost it." if lost else "."),
            evidence=evidence,
            events=case.events(ID, "a store entry in the metadata, and none bound on the worker"),
            headline="the connector's metadata was not bound when the forward ran",
        )
    elif hooked and not unbound:
        yield RuledOut(
            ID, f"metadata was bound at {count(hooked)}/{count(hooked)} attention calls of real steps"
        )
