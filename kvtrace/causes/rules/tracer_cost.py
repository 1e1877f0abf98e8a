"""tracer-cost: an estimate of what tracing took; it is not measured call by call."""

from __future__ import annotations

from kvtrace.causes.rule import NOTE, Case, Cause, Results
from kvtrace.words import count, percent

CAUSE = Cause(
    id="tracer-cost",
    severity=NOTE,
    asks=False,
    meaning="What tracing itself took.",
    seen_as=(
        "An estimate, as the agent does not measure itself call by call: records times 4 µs against the "
        "time in steps, without steps that compute nothing. A finding from a tenth of it, and 1 s, on."
    ),
    remedy="Trace fewer layers or a shorter run; see docs/overhead.md.",
    live=False,
    timed=True,
)

RECORD_NS = 4_000
"""Host time of tracing for each record of a step that is not watched: all that the step costs more, divided
by its records, rounded up; by the ratios of benchmarks/overhead.py and the time of a step there."""
_SHARE = 0.1


def rule(case: Case) -> Results:
    workers = case.run.workers()
    records = {spool.name: spool.records for spool in case.run.spools}
    parts = []
    for name in {worker.spool for worker in workers}:
        spent = sum(worker.exec_ns for worker in workers if worker.spool == name and worker.steps)
        engines = [case.engines[worker.engine] for worker in workers if worker.spool == name]
        steps, real = sum(one.steps for one in engines), sum(one.real_steps for one in engines)
        # While vLLM waits for transfers it makes steps with nothing to compute: they cost nobody anything.
        at_work = round(records.get(name, 0) * (real / steps if steps else 1))
        if spent and at_work:
            parts.append((at_work * RECORD_NS / spent, at_work))
    if not parts:
        return
    part, most = max(parts)
    estimate = (
        f"estimated, not measured: {count(most)} records at {RECORD_NS / 1000:.0f} µs each make "
        f"{percent(part, 1)} of the time that this process spent in its steps; watched calls (the first of "
        "each kind) cost more"
    )
    if part >= _SHARE and most * RECORD_NS >= 10**9:
        yield case.finding(
            CAUSE, f"Tracing took an estimated {percent(part, 1)} of the steps' time.", evidence=[estimate]
        )
    else:
        yield CAUSE.not_observed(estimate)
