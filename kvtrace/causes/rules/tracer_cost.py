"""tracer-cost: an estimate of what tracing took; it is not measured call by call."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case
from kvtrace.causes.model import Finding, NotObserved
from kvtrace.words import count, percent

ID = "tracer-cost"

RECORD_NS = 10_000
"""Host time of tracing for each record: all that a step costs more, divided by its records, as measured on
whole engines of the CPU build, rounded up (docs/overhead.md). Most of it is what stands around the record."""
_SHARE = 0.1


def rule(case: Case) -> Iterator[Finding | NotObserved]:
    workers = case.run.workers()
    records = {spool.name: spool.records for spool in case.run.spools}
    parts = []
    for name in {worker.spool for worker in workers}:
        spent = sum(worker.exec_ns for worker in workers if worker.spool == name)
        if spent and records.get(name):
            parts.append((records[name] * RECORD_NS / spent, records[name]))
    if not parts:
        return
    part, most = max(parts)
    estimate = (
        f"estimated, not measured: {count(most)} records at {RECORD_NS / 1000:.0f} µs each make "
        f"{percent(part, 1)} of the time that this process spent in its steps; watched calls "
        "(the first of each kind) cost more"
    )
    if part >= _SHARE and most * RECORD_NS >= 10**9:
        yield case.finding(
            ID, f"Tracing took an estimated {percent(part, 1)} of the steps' time.", evidence=[estimate]
        )
    else:
        yield NotObserved(ID, estimate)
